// Half precision by the conversions of csrc/element_types.h.
#pragma once
#include "cuda_runtime.h"
#include "element_types.h"

using __half = maxrl::Float16;
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline float __half2float(__half x) { return static_cast<float>(maxrl::to_double(x)); }
inline __half __float2half_rn(float x) { return maxrl::from_double<maxrl::Float16>(x); }

namespace emulation {
template <typename Element>
struct Pair {
  Element x, y;
};
// The elementwise maximum; of a NaN and a number, the number.
template <typename Element>
Element greater(Element a, Element b) {
  const double x = maxrl::to_double(a), y = maxrl::to_double(b);
  return x > y || y != y ? a : b;
}
}  // namespace emulation
using __half2 = emulation::Pair<maxrl::Float16>;
inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
template <typename Element>
emulation::Pair<Element> __hmax2(emulation::Pair<Element> a, emulation::Pair<Element> b) {
  return {emulation::greater(a.x, b.x), emulation::greater(a.y, b.y)};
}
