// bfloat16 by the conversions of csrc/element_types.h.
#pragma once
#include "cuda_runtime.h"
#include "element_types.h"

using __nv_bfloat16 = maxrl::BFloat16;
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return maxrl::from_double<maxrl::BFloat16>(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
// The elementwise maximum; of a NaN and a number, the number.
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
  const auto greater = [](__nv_bfloat16 p, __nv_bfloat16 q) {
    const double x = maxrl::to_double(p), y = maxrl::to_double(q);
    return x > y || y != y ? p : q;
  };
  return {greater(a.x, b.x), greater(a.y, b.y)};
}
