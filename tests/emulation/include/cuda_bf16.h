// bfloat16 by the conversions of csrc/element_types.h.
#pragma once
#include "cuda_fp16.h"

using __nv_bfloat16 = maxrl::BFloat16;
using __nv_bfloat162 = emulation::Pair<maxrl::BFloat16>;
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return maxrl::from_double<maxrl::BFloat16>(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
