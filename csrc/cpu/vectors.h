// Vectors of a few numbers, conversions to and from the element types of tensors, and the
// exponential, for any instruction set: the compiler uses the instructions that are enabled for the
// enclosing function.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../element_types.h"

namespace maxrl::cpu {

template <typename To, typename From>
inline To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

template <typename Real, int lanes>
struct VectorTypes {
  typedef Real Reals __attribute__((vector_size(lanes * sizeof(Real))));
  typedef uint32_t Words __attribute__((vector_size(lanes * sizeof(uint32_t))));
};

template <typename Real_, int lanes>
struct Vectors : VectorTypes<Real_, lanes> {
  using Real = Real_;
  using typename VectorTypes<Real, lanes>::Reals;
  using typename VectorTypes<Real, lanes>::Words;
  static constexpr int kLanes = lanes;

  static Reals all(Real x) { return Reals{} + x; }
  static Reals greater(Reals a, Reals b) { return a > b ? a : b; }

  static Real sum(Reals x) {
    Real total = x[0];
    for (int lane = 1; lane < lanes; ++lane) total += x[lane];
    return total;
  }
  static Real greatest(Reals x) {
    Real result = x[0];
    for (int lane = 1; lane < lanes; ++lane) result = x[lane] > result ? x[lane] : result;
    return result;
  }

  static Reals read(const Real* from) {
    Reals x;
    memcpy(&x, from, sizeof x);
    return x;
  }
  static void write(Real* to, Reals x) { memcpy(to, &x, sizeof x); }

  // kStep elements of a row. Bfloat16 elements come as the even and the odd ones, which needs
  // no shuffling.
  struct Pair {
    Reals first, second;
  };
  static constexpr int64_t kStep = 2 * lanes;

  static Pair load(const Real* from) {
    return {read(from), read(from + lanes)};  // copying both at once would go through memory
  }
  static void store(Real* to, Pair x) {
    write(to, x.first);
    write(to + lanes, x.second);
  }

  static Pair load(const BFloat16* from) {
    Words words;
    memcpy(&words, from, sizeof words);
    return {bits_as<Reals>(words << 16), bits_as<Reals>(words & 0xffff0000)};
  }
  static void store(BFloat16* to,
                    Pair x) {  // round to nearest even; the lower half of NaNs must be 0
    const auto rounded = [](auto bits) { return bits + 0x7fff + ((bits >> 16) & 1); };
    const Words even = rounded(bits_as<Words>(x.first)), odd = rounded(bits_as<Words>(x.second)),
                both = (even >> 16) | (odd & 0xffff0000);
    memcpy(to, &both, sizeof both);
  }

  // The first `count` < kStep elements, the others `fill`.
  template <typename Element>
  static Pair load_some(const Element* from, int64_t count, Real fill) {
    Element elements[kStep];
    for (int64_t i = 0; i < kStep; ++i)
      elements[i] = i < count ? from[i] : from_double<Element>(fill);
    return load(elements);
  }
  template <typename Element>
  static void store_some(Element* to, int64_t count, Pair x) {
    Element elements[kStep];
    store(elements, x);
    for (int64_t i = 0; i < count; ++i) to[i] = elements[i];
  }

  static constexpr Real kLowestExponent = sizeof(Real) == 4 ? Real(-88) : Real(-745.5);

  // e^x for x <= 0, 0 at kLowestExponent; x must not be below it. float: within 1.5e-7 of its
  // value.
  static Reals exponential(Reals x) {
    if constexpr (sizeof(Real) == 4) {
      constexpr float kShift =
          0x1.8p23f + 127;  // adding it rounds to integers; the low bits are then the exponent
      const Reals shifted = x * 0x1.715476p+0f + kShift;
      const Reals n = shifted - kShift;
      const Reals r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;  // n ln 2 in two parts
      Reals p = r * 1.3888889e-3f + 8.3333333e-3f;
      p = p * r + 4.1666667e-2f;
      p = p * r + 1.6666667e-1f;
      p = p * r + 0.5f;
      p = p * r + 1.0f;
      p = p * r + 1.0f;
      return p * bits_as<Reals>(bits_as<Words>(shifted) << 23);
    } else {
      for (int lane = 0; lane < lanes; ++lane)
        x[lane] = x[lane] <= kLowestExponent ? 0.0 : std::exp(x[lane]);
      return x;
    }
  }
};

}  // namespace maxrl::cpu
