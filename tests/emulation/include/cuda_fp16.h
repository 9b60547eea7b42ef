// Half precision by the conversions of csrc/element_types.h.
#pragma once
#include "cuda_runtime.h"
#include "element_types.h"

using __half = maxrl::Float16;
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline float __half2float(__half x) { return static_cast<float>(maxrl::to_double(x)); }
inline __half __float2half_rn(float x) { return maxrl::from_double<maxrl::Float16>(x); }
