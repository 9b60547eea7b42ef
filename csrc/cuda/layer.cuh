// What the kernels of a decoder layer share. They take one launch each, read and write numbers
// once, 16 bytes at a time, and compute in float32. All sums are added in an order that depends on
// the shapes alone.
#pragma once
#include <stdexcept>

#include "../layer.h"
#include "elements.cuh"
#include "launch.h"
#include "reduce.cuh"

namespace maxrl::cuda {

constexpr int kThreads = 256;

// Loads `size` numbers, one or two chunks.
template <typename Element, int size>
__device__ void load(const Element* from, float (&values)[size]) {
  constexpr int kSize = Chunk<Element>::kSize;
#pragma unroll
  for (int start = 0; start < size; start += kSize) {
    float part[kSize];
    unpack(Chunk<Element>(from + start), part);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[start + i] = part[i];
  }
}

// Rounds and stores `size` numbers, one or two chunks.
template <typename Element, int size>
__device__ void store(Element* to, const float (&values)[size]) {
  constexpr int kSize = Chunk<Element>::kSize;
#pragma unroll
  for (int start = 0; start < size; start += kSize) {
    float part[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) part[i] = values[start + i];
    __stwb(reinterpret_cast<uint4*>(to + start),
           rounded<Element>(part).bits);  // the compiler splits some plain stores
  }
}

// The gradient of an RMS norm x rate w in x is rate w g - slope x. Both numbers follow from two
// sums over the row.
struct NormGradient {
  float rate, slope;
  __device__ NormGradient(float squares, float product, int size,
                          float eps)  // sum of x^2, of w g x
      : rate(rsqrtf(squares / size + eps)), slope(rate * rate * rate * product / size) {}
};

// The blocks of a launch with this many threads, whose indices have 32 bits.
inline int64_t blocks_for(int64_t threads) {
  if (threads > int64_t{UINT32_MAX} - kThreads)
    throw std::invalid_argument("a layer's batch has too many elements");
  return (threads + kThreads - 1) / kThreads;
}

}  // namespace maxrl::cuda
