// The scalar formulas of group advantages, one definition compiled for the CPU and for CUDA.
//
// For the rewards r of a group of n rollouts, A_i is one of
//
//     moments     (r_i - b) m, with b = 0 or the mean, and m = 1, n/(n-1), 1/(std + eps) or 1/(mean
//     + eps) rank        the rank transform of r binary      for rewards 0 or 1, an entry of a
//     table indexed by the number of ones
//
// The rank transform, for rewards in ascending order r_(1) <= ... <= r_(n), gaps d_0 = r_(1), d_j =
// r_(j+1) - r_(j) and the rank table of n, two rows of n weights, offset and slope:
//
//     A_(i) = sum_{j >= 0} offset_j d_j + sum_{1 <= j < i} slope_j d_j
//
// Gaps between equal rewards are exactly 0, so ties get equal values, and a group of equal rewards
// gets 0 if offset_0 = 0. The binary table of n has two rows of n + 1 values, for wrong and for
// correct rollouts, indexed by the number of correct ones.
#pragma once
#include <cmath>
#include <cstdint>

#include "kernel.h"

namespace maxrl {

enum class Kind { kMoments, kRank, kBinary };
template <>
inline constexpr const char* kNamesOf<Kind>[3] = {"moments", "rank", "binary"};
enum class Scale { kOne, kLeaveOneOut, kStd, kMean };  // m
template <>
inline constexpr const char* kNamesOf<Scale>[4] = {"one", "leave_one_out", "std", "mean"};

struct Formula {
  Kind kind;
  bool centred;  // this and the next are of moments
  Scale scale;
  double eps;
  int64_t ddof;

  MAXRL_FIELDS(kind, centred, scale, eps, ddof)
  // Whether m is 1 over a moment of r, so that rewards times a constant have the same advantages,
  // up to eps.
  MAXRL_HOST_DEVICE bool is_ratio() const { return scale == Scale::kStd || scale == Scale::kMean; }
  MAXRL_HOST_DEVICE bool needs_moments() const { return centred || is_ratio(); }
  MAXRL_HOST_DEVICE bool accepts(double reward) const {
    return kind == Kind::kBinary ? reward == 0.0 || reward == 1.0 : reward * 0.0 == 0.0;
  }
};

// Group g is a row of a [num_groups, group_size] array; or, with `offsets` [num_groups + 1], a run
// of a flat array, through `order` [S] if the flat array is not sorted by group. Rollouts that are
// not `valid` are left out.
struct Groups {
  int64_t num_groups, group_size, num_rewards;
  const int64_t* offsets;
  const int64_t* order;
  const bool* valid;

  MAXRL_FIELDS(num_groups, group_size, num_rewards, offsets, order, valid)

  MAXRL_HOST_DEVICE int64_t begin(int64_t g) const { return offsets ? offsets[g] : g * group_size; }
  MAXRL_HOST_DEVICE int64_t index(int64_t position) const {
    return order ? order[position] : position;
  }
  MAXRL_HOST_DEVICE bool exists(int64_t index) const { return !valid || valid[index]; }
};

// Tables of group sizes up to `largest_table`: the table of n is at tables + table_starts[n], or at
// tables if all groups have one size.
struct Tables {
  const double* tables;
  const int64_t* table_starts;
  int64_t largest_table;
  MAXRL_FIELDS(tables, table_starts, largest_table)

  MAXRL_HOST_DEVICE const double* of(int64_t n) const {
    return table_starts ? tables + table_starts[n] : tables;
  }
};

// Rewards and advantages are [num_groups, group_size] or [num_rewards]; rollouts that are not valid
// get 0. The pairs of types are (float, float), (double, double), (BFloat16, BFloat16) and (int32_t
// | int64_t | bool, float).
template <typename Reward_, typename Advantage_>
struct GroupAdvantage {
  using Reward = Reward_;
  using Advantage = Advantage_;
  const Reward* rewards;
  Groups groups;
  Tables tables;
  Formula formula;
  Advantage* advantages;

  MAXRL_FIELDS(rewards, groups, tables, formula, advantages)
};

// A total order: ascending rewards, ties by index, so that the result does not depend on the
// sorting algorithm.
MAXRL_HOST_DEVICE inline bool sorts_before(double reward, int32_t index, double other_reward,
                                           int32_t other_index) {
  return reward < other_reward || (reward == other_reward && index < other_index);
}

// The smallest power of two above x >= 0, from the bits of its exponent.
MAXRL_HOST_DEVICE inline double power_of_two_above(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  bits = (bits & 0x7ff0000000000000u) + 0x0010000000000000u;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// A sum that does not depend on the order of its terms. Each term is split into a multiple of a
// coarse unit and a multiple of a fine unit; the units are such that both sums are exact. So the
// result is the same for permuted rewards, any number of threads, and any device. The coarse part
// alone is exact to 50 - log2(terms) bits of the bound, enough for float results; with the fine
// part it is more precise than double. The compiler must keep (x + shift) - shift: no -ffast-math.
template <typename Real>  // double, or a vector of them
struct ExactSum {
  Real coarse_shift, fine_shift;

  // For at most margin / 2 terms of magnitude below `bound`; both are powers of two.
  MAXRL_HOST_DEVICE ExactSum(Real bound, Real margin)
      : coarse_shift(1.5 * bound * margin), fine_shift(coarse_shift * margin * 0x1p-53) {}
  MAXRL_HOST_DEVICE Real coarse(Real term) const { return (term + coarse_shift) - coarse_shift; }
  MAXRL_HOST_DEVICE Real fine(Real rest) const { return (rest + fine_shift) - fine_shift; }
};

// The power of two by which the rewards of a group are multiplied, so that no gap, square or
// divisor over- or underflows. It is 1 unless the largest magnitude is above 2^480 or below 2^-400,
// so only float64 rewards have another one. An eps of 1 or more needs none for small rewards, and
// might overflow with it.
MAXRL_HOST_DEVICE inline double safe_scale(const Formula& f, double largest) {
  if (f.kind == Kind::kBinary || (f.kind == Kind::kMoments && !f.needs_moments())) return 1.0;
  if (largest > 0x1p480) return 0x1p-544;
  return largest > 0.0 && largest < 0x1p-400 && f.eps < 1.0 ? 0x1p600 : 1.0;
}

// m for n rewards that were multiplied by `scale`.
MAXRL_HOST_DEVICE inline double multiplier(const Formula& f, double n, double mean,
                                           double sum_of_squares, double scale) {
  double divisor = 1.0;
  const double ddof = static_cast<double>(f.ddof), eps = f.eps * scale;
  if (f.scale == Scale::kLeaveOneOut) divisor = (n - 1.0) / n;
  if (f.scale == Scale::kStd) divisor = n > ddof ? sqrt(sum_of_squares / (n - ddof)) + eps : 0.0;
  if (f.scale == Scale::kMean) divisor = mean + eps;
  return divisor == 0.0
             ? 0.0
             : 1.0 / divisor;  // groups of one, of equal rewards, or without success: no advantage
}

}  // namespace maxrl
