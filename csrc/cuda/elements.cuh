// The element types in registers, 16 bytes at a time.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

#include "../element_types.h"

namespace maxrl::cuda {

constexpr int kAccess = 16;  // bytes that a thread reads or writes at once
constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;

__device__ inline float to_real(float x) { return x; }
__device__ inline double to_real(double x) { return x; }
__device__ inline float to_real(BFloat16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}

template <typename Element, typename Real>
__device__ inline Element from_real(Real x) {
  return x;
}
template <>
__device__ inline BFloat16 from_real<BFloat16, float>(float x) {
  return BFloat16{__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}

// 2^x in one instruction; 0 below 2^-126.
__device__ inline float exponential2(float x) {
#ifdef __CUDACC__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return x < -126.0f ? 0.0f : exp2f(x);
#endif
}
__device__ inline double exponential2(double x) { return exp2(x); }

// The greater number; NaN if x is NaN.
__device__ inline float at_least(float x, float least) {
#ifdef __CUDACC__
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(least));
  return y;
#else
  return x < least ? least : x;
#endif
}
__device__ inline double at_least(double x, double least) { return x < least ? least : x; }

// 16 bytes of a row.
template <typename Element>
union Chunk {
  static constexpr int kSize = kAccess / sizeof(Element);
  uint4 bits;
  Element elements[kSize];
  uint32_t pairs[4];  // of bfloat16

  __device__ Chunk() {}
  __device__ explicit Chunk(const Element* from) : bits(*reinterpret_cast<const uint4*>(from)) {}
  __device__ static Chunk zeros() { return of_words(0); }
  __device__ static Chunk of_words(uint32_t word) {
    Chunk chunk;
    chunk.bits = uint4{word, word, word, word};
    return chunk;
  }
  // Writes the first `size` elements, 8 or 16 bytes.
  template <int size = kSize>
  __device__ void write(Element* to) const {
    if constexpr (size == kSize)
      *reinterpret_cast<uint4*>(to) = bits;
    else
      *reinterpret_cast<uint2*>(to) = uint2{bits.x, bits.y};
  }
};

// Two numbers in one register, the first in the lower half.
__device__ inline uint32_t rounded_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}
__device__ inline uint32_t greater(uint32_t a, uint32_t b) {
  __nv_bfloat162 x, y;
  memcpy(&x, &a, sizeof x);
  memcpy(&y, &b, sizeof y);
  x = __hmax2(x, y);
  memcpy(&a, &x, sizeof a);
  return a;
}

template <typename Element, typename Real, int size>
__device__ inline Chunk<Element> rounded(const Real (&values)[size]) {
  Chunk<Element> chunk;
#pragma unroll
  for (int i = 0; i < size; ++i) {
    if constexpr (sizeof(Element) == 2) {
      if (i % 2 == 0) chunk.pairs[i / 2] = rounded_pair(values[i], values[i + 1]);
    } else {
      chunk.elements[i] = values[i];
    }
  }
  return chunk;
}

template <typename Real, typename Element>
__device__ inline void unpack(const Chunk<Element>& chunk, Real (&values)[Chunk<Element>::kSize]) {
#pragma unroll
  for (int i = 0; i < Chunk<Element>::kSize; ++i) values[i] = to_real(chunk.elements[i]);
}
template <>
__device__ inline void unpack(const Chunk<BFloat16>& chunk,
                              float (&values)[8]) {  // an instruction each
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = __uint_as_float(chunk.pairs[i] << 16);
    values[2 * i + 1] = __uint_as_float(chunk.pairs[i] & 0xffff0000u);
  }
}

// Makes element i -inf.
template <typename Element>
__device__ inline void without(Chunk<Element>& chunk, unsigned i) {
#ifdef __CUDACC__
  asm volatile("");  // a branch: selects would cost every chunk a dozen instructions
#endif
#pragma unroll
  for (unsigned k = 0; k < Chunk<Element>::kSize; ++k)
    if (i == k) {
      if constexpr (sizeof(Element) == 2)
        chunk.pairs[k / 2] = k % 2 ? (chunk.pairs[k / 2] & 0xffffu) | 0xff800000u
                                   : (chunk.pairs[k / 2] & 0xffff0000u) | 0xff80u;
      else
        chunk.elements[k] = -static_cast<Element>(INFINITY);
    }
}

// The greatest element; unspecified if one is NaN.
template <typename Real, typename Element>
__device__ inline Real greatest_of(const Chunk<Element>& chunk) {
  if constexpr (sizeof(Element) == 2) {
    const uint32_t pair =
        greater(greater(chunk.pairs[0], chunk.pairs[1]), greater(chunk.pairs[2], chunk.pairs[3]));
    const Real low = to_real(Element{static_cast<uint16_t>(pair)}),
               high = to_real(Element{static_cast<uint16_t>(pair >> 16)});
    return low > high || high != high ? low : high;
  } else {
    Real greatest = chunk.elements[0];
#pragma unroll
    for (int i = 1; i < Chunk<Element>::kSize; ++i)
      greatest = chunk.elements[i] > greatest ? chunk.elements[i] : greatest;
    return greatest;
  }
}

}  // namespace maxrl::cuda
