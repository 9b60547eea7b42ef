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

struct Float16 {
  uint16_t bits;  // IEEE half precision
};

// The type of the arithmetic on these elements.
template <typename Element>
using RealOf = std::conditional_t<std::is_same_v<Element, double>, double, float>;

// Of a tensor's elements, as Python names it.
template <typename T>
constexpr const char* kDtype = std::is_same_v<T, float>      ? "float32"
                               : std::is_same_v<T, double>   ? "float64"
                               : std::is_same_v<T, BFloat16> ? "bfloat16"
                               : std::is_same_v<T, Float16>  ? "float16"
                               : std::is_same_v<T, int32_t>  ? "int32"
                               : std::is_same_v<T, int64_t>  ? "int64"
                               : std::is_same_v<T, bool>     ? "bool"
                                                             : nullptr;

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

template <>
MAXRL_HOST_DEVICE inline double to_double(Float16 x) {
  const int exponent = x.bits >> 10 & 31;
  const double fraction = x.bits & 1023, sign = x.bits >> 15 ? -1.0 : 1.0;
  if (exponent == 31) return fraction == 0.0 ? sign * INFINITY : NAN;
  return sign * (exponent == 0 ? ldexp(fraction, -24) : ldexp(1024.0 + fraction, exponent - 25));
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

template <>
MAXRL_HOST_DEVICE inline Float16 from_double(double x) {
  const uint16_t sign = copysign(1.0, x) < 0.0 ? 0x8000 : 0;
  const double magnitude = fabs(x);
  if (!(magnitude < 65520.0))
    return Float16{static_cast<uint16_t>(sign | (magnitude == magnitude ? 0x7c00 : 0x7e00))};
  const bool is_subnormal = magnitude < ldexp(1.0, -14);  // 0 too
  int exponent = 0;  // magnitude = fraction 2^exponent, fraction in [0.5, 1)
  if (!is_subnormal) frexp(magnitude, &exponent);
  const auto units = static_cast<uint16_t>(
      rint(ldexp(magnitude, is_subnormal ? 24 : 11 - exponent)));  // ties to even
  // Adding the exponent to the units is correct: a carry out of the fraction gives the next
  // exponent.
  return Float16{
      static_cast<uint16_t>(sign | (is_subnormal ? units : units + ((exponent + 13) << 10)))};
}

}  // namespace maxrl
