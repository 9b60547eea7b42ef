// What attention_tile.h needs of vectors beyond vectors.h: base-2 exponential and logarithm,
// comparisons, transposition, and loads and stores of one vector of elements, or a part of it.
#pragma once
#include <cmath>
#include <type_traits>
#include <utility>

#include "vectors.h"

namespace maxrl::cpu {

// The nearest integer, of floats up to 2^22; greater ones stay as they are.
template <typename Vectors>
inline typename Vectors::Reals nearest_integer(const typename Vectors::Reals& x) {
  using Reals = typename Vectors::Reals;
  if constexpr (sizeof(typename Vectors::Real) == 4) {
    const Reals shift = x * x < Vectors::all(0x1p44f) ? Vectors::all(0x1.8p23f) : Reals{};
    return (x + shift) - shift;
  } else {
    Reals n = x;
    for (int lane = 0; lane < Vectors::kLanes; ++lane) n[lane] = std::rint(x[lane]);
    return n;
  }
}

// x -> 2^(x - base) for x < base + 127, 0 from base - 127 (double: base - 1022) down. x = n + r
// with an integer n and r from -1/2 to 1/2, and 2^r is multiplied by 2^(n - base): another integer
// base changes the exponent alone. float: within 1e-7 of its value.
template <typename Vectors>
struct PowerOfTwo {
  using Reals = typename Vectors::Reals;
  Reals base, lowest, shift;  // adding the shift rounds to integers, of a base up to 2^22

  void set_base(const Reals& x) {
    base = x;
    if constexpr (sizeof(typename Vectors::Real) == 4) {
      lowest = x - 127.0f;
      shift = x * x < Vectors::all(0x1p44f) ? Vectors::all(0x1.8p23f) : Reals{};
    }
  }
  Reals operator()(Reals x) const {
    if constexpr (sizeof(typename Vectors::Real) == 4) {
      using Words = typename Vectors::Words;
      x = Vectors::greater(lowest, x);
      const Reals n = (x + shift) - shift, r = x - n;
      // the low bits of the sum are the exponent
      const Reals shifted = (n - base) + (0x1.8p23f + 127);
      Reals p = r * 0x1.41fbbcp-13f + 0x1.5f3e54p-10f;
      p = p * r + 0x1.3b2d4cp-7f;
      p = p * r + 0x1.c6aee8p-5f;
      p = p * r + 0x1.ebfbdcp-3f;
      p = p * r + 0x1.62e430p-1f;
      p = p * r + 1.0f;
      return p * bits_as<Reals>(bits_as<Words>(shifted) << 23);
    } else {
      for (int lane = 0; lane < Vectors::kLanes; ++lane) {
        const double n = std::rint(x[lane]), by = n - base[lane];
        x[lane] = by <= -1022 ? 0.0 : std::exp2(x[lane] - n) * std::exp2(by);
      }
      return x;
    }
  }
};

// log2 of normal x > 0, plus an integer base: the same for x 2^i and base - i.
template <typename Vectors>
inline typename Vectors::Reals log_of_two(typename Vectors::Reals x, typename Vectors::Reals base) {
  if constexpr (sizeof(typename Vectors::Real) == 4) {
    using Reals = typename Vectors::Reals;
    using Integers = decltype(x > x);
    const Integers bits = bits_as<Integers>(x),
                   n = (bits - 0x3f3504f3) >> 23;  // x = m 2^n, m from sqrt(1/2) to sqrt(2)
    const Reals m = bits_as<Reals>(bits - (n << 23)), t = (m - 1.0f) / (m + 1.0f), u = t * t;
    const Reals series = (((u * (2.0f / 9) + 2.0f / 7) * u + 2.0f / 5) * u + 2.0f / 3) * u + 2.0f;
    return t * series * 0x1.715476p+0f + (__builtin_convertvector(n, Reals) + base);
  } else {
    for (int lane = 0; lane < Vectors::kLanes; ++lane) {
      int n;
      const double m = std::frexp(x[lane], &n);
      x[lane] = std::log2(m) + (n + base[lane]);
    }
    return x;
  }
}

// Comparisons by the bits of signs: others of 64 bytes would become scalars when they are inlined.
// Arguments are references, for callers may be compiled for other instructions until then.

// x where `sign` is negative, otherwise y.
template <typename Reals>
inline Reals where_negative(const Reals& sign, const Reals& x, const Reals& y) {
  using Integers = decltype(x > x);
  const Integers is_negative = bits_as<Integers>(sign) >> (8 * sizeof(x[0]) - 1),
                 of_x = bits_as<Integers>(x), of_y = bits_as<Integers>(y);
  return bits_as<Reals>(of_y ^ ((of_x ^ of_y) & is_negative));
}
// x where low <= at <= high, integers up to 2^24, otherwise `hidden`.
template <typename Reals>
inline Reals where_between(const Reals& low, const Reals& at, const Reals& high, const Reals& x,
                           const Reals& hidden) {
  return where_negative(at - low, hidden, where_negative(high - at, hidden, x));
}
// Whether a lane of a is greater than that of b; perhaps also where one is not a number.
template <typename Reals>
inline bool any_greater(const Reals& a, const Reals& b) {
  const Reals left = b - a;
  uint64_t words[sizeof left / sizeof(uint64_t)], any = 0;
  memcpy(words, &left, sizeof left);
  for (const uint64_t word : words) any |= word;
  return any & (sizeof(a[0]) == 4 ? 0x8000000080000000 : 0x8000000000000000);
}

template <int distance, typename Reals, int... lane>
inline void exchange(Reals& a, Reals& b, std::integer_sequence<int, lane...>) {
  constexpr int kLanes = sizeof...(lane);
#ifdef __clang__
  const Reals low =
      __builtin_shufflevector(a, b, ((lane & distance) ? kLanes + lane - distance : lane)...);
  b = __builtin_shufflevector(a, b, ((lane & distance) ? kLanes + lane : lane + distance)...);
#else
  using Places = decltype(a > b);
  const Reals low =
      __builtin_shuffle(a, b, Places{((lane & distance) ? kLanes + lane - distance : lane)...});
  b = __builtin_shuffle(a, b, Places{((lane & distance) ? kLanes + lane : lane + distance)...});
#endif
  a = low;
}
template <int distance, typename Reals, int lanes>
inline void transpose(Reals (&x)[lanes]) {
  if constexpr (distance > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i)
      if (!(i & distance))
        exchange<distance>(x[i], x[i + distance], std::make_integer_sequence<int, lanes>{});
    transpose<distance / 2>(x);
  }
}

// The first `count` of the lanes, the others 0.
template <typename Vectors, typename Element>
inline typename Vectors::Reals load_lanes(const Element* from, int64_t count) {
  using Number = std::conditional_t<std::is_same_v<Element, BFloat16>, uint16_t, Element>;
  typedef Number Numbers __attribute__((vector_size(Vectors::kLanes * sizeof(Number))));
  Numbers x{};
  if (count >= Vectors::kLanes)
    memcpy(&x, from, sizeof x);
  else if (count > 0)
    memcpy(&x, from, count * sizeof(Number));
  if constexpr (std::is_same_v<Element, BFloat16>)
    return bits_as<typename Vectors::Reals>(__builtin_convertvector(x, typename Vectors::Words)
                                            << 16);
  else
    return x;
}

template <typename Vectors, typename Element>
inline void store_lanes(Element* to, int64_t count, typename Vectors::Reals x) {
  typedef uint16_t Halves __attribute__((vector_size(Vectors::kLanes * 2)));
  const auto copy = [&](const auto& numbers) {
    if (count >= Vectors::kLanes)
      memcpy(to, &numbers, sizeof numbers);
    else if (count > 0)
      memcpy(to, &numbers, count * sizeof(Element));
  };
  if constexpr (std::is_same_v<Element, BFloat16>) {  // to nearest even; NaNs of bfloat16 inputs
                                                      // have lower halves of 0
    const auto bits = bits_as<typename Vectors::Words>(x);
    copy(__builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Halves));
  } else {
    copy(x);
  }
}

}  // namespace maxrl::cpu
