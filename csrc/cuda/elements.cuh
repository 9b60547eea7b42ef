// The element types in registers, and 16 bytes of them at a time.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

#include "../element_types.h"

namespace maxrl::cuda {

constexpr int kAccess = 16;  // bytes a thread reads or writes at once

__device__ inline float to_real(float x) { return x; }
__device__ inline double to_real(double x) { return x; }
__device__ inline float to_real(BFloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
__device__ inline float to_real(Float16 x) { return __half2float(__ushort_as_half(x.bits)); }

template <typename Element, typename Real>
__device__ inline Element from_real(Real x) {
  return x;
}
template <>
__device__ inline BFloat16 from_real<BFloat16, float>(float x) {
  const unsigned bits = __float_as_uint(x);
  if (x != x) return BFloat16{0x7fc0};
  return BFloat16{static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};  // to nearest, ties to even
}
template <>
__device__ inline Float16 from_real<Float16, float>(float x) {
  return Float16{__half_as_ushort(__float2half_rn(x))};
}

__device__ inline float exponential(float x) { return __expf(x); }
__device__ inline double exponential(double x) { return exp(x); }

template <typename Element>
union Chunk {
  static constexpr int kSize = kAccess / sizeof(Element);
  uint4 bits;
  Element elements[kSize];
  __device__ Chunk() {}
};

}  // namespace maxrl::cuda
