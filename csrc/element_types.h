// The element types of tensors, converted to and from double by the same code on a CPU and on a GPU.
#pragma once
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define MAXRL_HOST_DEVICE __host__ __device__
#else
#define MAXRL_HOST_DEVICE
#endif

namespace maxrl {

struct BFloat16 {
  uint16_t bits;  // the upper half of a float
};

template <typename T>
MAXRL_HOST_DEVICE inline double to_double(T x) {
  return static_cast<double>(x);
}

template <>
MAXRL_HOST_DEVICE inline double to_double(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
MAXRL_HOST_DEVICE inline T from_double(double x) {
  return static_cast<T>(x);
}

template <>
MAXRL_HOST_DEVICE inline BFloat16 from_double(double x) {
  const float value = static_cast<float>(x);
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (x != x) return BFloat16{0x7fc0};
  return BFloat16{static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};  // to nearest, ties to even
}

}  // namespace maxrl
