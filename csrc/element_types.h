// The element types of tensors, and conversions to and from double, the same on a CPU and on a GPU.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __CUDACC__
#define MAXRL_HOST_DEVICE __host__ __device__
#else
#define MAXRL_HOST_DEVICE
#endif

namespace maxrl {

struct BFloat16 {
  uint16_t bits;  // the upper half of a float
};

// The type of the arithmetic on these elements.
template <typename Element>
using RealOf = std::conditional_t<std::is_same_v<Element, double>, double, float>;

// Of a tensor's elements, as Python names it.
template <typename T>
constexpr const char* kDtype = nullptr;
template <>
inline constexpr const char* kDtype<float> = "float32";
template <>
inline constexpr const char* kDtype<double> = "float64";
template <>
inline constexpr const char* kDtype<BFloat16> = "bfloat16";

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

MAXRL_HOST_DEVICE inline BFloat16 rounded(float x) {  // to nearest even
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return {static_cast<uint16_t>(x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <typename T>
MAXRL_HOST_DEVICE inline T from_double(double x) {
  return static_cast<T>(x);
}

template <>
MAXRL_HOST_DEVICE inline BFloat16 from_double(double x) {
  return rounded(static_cast<float>(x));
}

}  // namespace maxrl
