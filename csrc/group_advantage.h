// The scalar formulas of group advantages, one definition compiled for the CPU and for CUDA.
//
// Every estimator makes three choices for the rewards r of a group of n rollouts:
//
//     value       v_i = r_i; or the number of smaller rewards; or the rank transform of r; or, for rewards 0 or 1, an entry of
//                 a table indexed by the number of ones
//     baseline    b   = 0, the mean of v, or the mean of v weighted by response length
//     multiplier  m   = 1, 1/n, n/(n-1), 1/(std of v + eps), the same with v weighted by response length, or 1/(mean of v +
//     eps)
//
//     A_i = gain (v_i - b) m + bias
//
// The rank transform, for rewards in ascending order r_(1) <= ... <= r_(n), gaps d_0 = r_(1), d_j = r_(j+1) - r_(j) and the
// rank table of n, two rows of n weights, offset and slope:
//
//     v_(i) = sum_{j >= 0} offset_j d_j + sum_{1 <= j < i} slope_j d_j
//
// Gaps between equal rewards are exactly 0, so ties get equal values, and a group of equal rewards gets 0 if offset_0 = 0. The
// binary table of n has two rows of n + 1 values, for wrong and for correct rollouts, indexed by the number of correct ones.
#pragma once
#include <cmath>
#include <cstdint>

#include "element_types.h"

namespace maxrl {

enum class Value { kReward, kOrder, kRank, kBinary };
enum class Baseline { kZero, kMean, kLengthMean };
enum class Scale { kOne, kSize, kLeaveOneOut, kStd, kLengthStd, kMean };

struct Formula {
  Value value;
  Baseline baseline;
  Scale scale;
  double eps;
  int64_t ddof;
  double gain, bias;

  MAXRL_HOST_DEVICE bool needs_sorting() const { return value == Value::kOrder || value == Value::kRank; }
  MAXRL_HOST_DEVICE bool needs_table() const { return value == Value::kRank || value == Value::kBinary; }
  MAXRL_HOST_DEVICE bool needs_lengths() const { return baseline == Baseline::kLengthMean || scale == Scale::kLengthStd; }
  // Whether m is 1 over a moment of v, so that rewards times a constant have the same advantages, up to eps.
  MAXRL_HOST_DEVICE bool is_ratio() const {
    return scale == Scale::kStd || scale == Scale::kLengthStd || scale == Scale::kMean;
  }
  MAXRL_HOST_DEVICE bool needs_moments() const { return baseline != Baseline::kZero || is_ratio(); }
};

// Group g is a row of a [num_groups, group_size] array; or, with `offsets` [num_groups + 1], a run of a flat array, through
// `order` [S] if the flat array is not sorted by group. Rollouts that are not `valid` are left out.
struct Groups {
  int64_t num_groups, group_size, num_rewards;
  const int64_t* offsets;
  const int64_t* order;
  const bool* valid;

  MAXRL_HOST_DEVICE int64_t begin(int64_t g) const { return offsets ? offsets[g] : g * group_size; }
  MAXRL_HOST_DEVICE int64_t index(int64_t position) const { return order ? order[position] : position; }
  MAXRL_HOST_DEVICE bool exists(int64_t index) const { return !valid || valid[index]; }
};

// Tables of group sizes up to `largest`: the table of n is at values + starts[n], or at values if all groups have one size.
struct Tables {
  const double* values;
  const int64_t* starts;
  int64_t largest;

  MAXRL_HOST_DEVICE const double* of(int64_t n) const { return starts ? values + starts[n] : values; }
};

// A total order: ascending rewards, ties by index, so that the result does not depend on the sorting algorithm.
MAXRL_HOST_DEVICE inline bool sorts_before(double reward, int32_t index, double other_reward, int32_t other_index) {
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

// The number of n ascending values that are below x.
MAXRL_HOST_DEVICE inline int32_t count_below(const double* ascending, int32_t n, double x) {
  int32_t first = 0;
  while (n > 0) {
    const int32_t half = n / 2;
    const bool below = ascending[first + half] < x;
    first += below ? half + 1 : 0;
    n = below ? n - half - 1 : half;
  }
  return first;
}

// A sum that does not depend on the order of its terms. Each term is split into a multiple of a coarse unit and a multiple of
// a fine unit; the units are such that both sums are exact. So the result is the same for permuted rewards, any number of
// threads, and any device. The coarse part alone is exact to 50 - log2(terms) bits of the bound, enough for float results;
// with the fine part it is more precise than double. The compiler must keep (x + shift) - shift: no -ffast-math.
template <typename Real>  // double, or a vector of them
struct ExactSum {
  Real coarse_shift, fine_shift;

  // For at most margin / 2 terms of magnitude below `bound`; both are powers of two.
  MAXRL_HOST_DEVICE ExactSum(Real bound, Real margin)
      : coarse_shift(1.5 * bound * margin), fine_shift(coarse_shift * margin * 0x1p-53) {}
  MAXRL_HOST_DEVICE Real coarse(Real term) const { return (term + coarse_shift) - coarse_shift; }
  MAXRL_HOST_DEVICE Real fine(Real rest) const { return (rest + fine_shift) - fine_shift; }
};

// The power of two by which the rewards of a group are multiplied, so that no gap, square or divisor over- or underflows. It is
// 1 unless the largest magnitude is above 2^480 or below 2^-400, so only float64 rewards have another one. An eps of 1 or more
// needs none for small rewards, and might overflow with it.
MAXRL_HOST_DEVICE inline double safe_scale(const Formula& f, double largest) {
  if (f.value != Value::kRank && (f.value != Value::kReward || !f.needs_moments())) return 1.0;
  if (largest > 0x1p480) return 0x1p-544;
  return largest > 0.0 && largest < 0x1p-400 && f.eps < 1.0 ? 0x1p600 : 1.0;
}

// Whether values of this largest magnitude, from rewards that were multiplied by `scale`, need the scale no longer. The rank
// transform can leave out the largest reward, and the squares of what remains would underflow.
MAXRL_HOST_DEVICE inline bool is_ordinary_again(double scale, double largest) {
  return scale < 1.0 && largest < 0x1p480 * scale;
}

// m for rewards that were multiplied by `scale`. `count`: rollouts, or for kLengthStd their tokens.
MAXRL_HOST_DEVICE inline double multiplier(const Formula& f, double count, double mean, double sum_of_squares, double scale) {
  double divisor = 1.0;
  const double ddof = static_cast<double>(f.ddof), eps = f.eps * scale;
  if (f.scale == Scale::kSize) divisor = count;
  if (f.scale == Scale::kLeaveOneOut) divisor = (count - 1.0) / count;
  if (f.scale == Scale::kStd || f.scale == Scale::kLengthStd)
    divisor = count > ddof ? sqrt(sum_of_squares / (count - ddof)) + eps : 0.0;
  if (f.scale == Scale::kMean) divisor = mean + eps;
  return divisor == 0.0 ? 0.0 : 1.0 / divisor;  // groups of one, of equal rewards, or without success: no advantage
}

}  // namespace maxrl
