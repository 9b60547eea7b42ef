// Group advantages of rewards [G, N], one definition for the CPU and for CUDA.
//
// A rollout that is not valid gets 0. For the n valid rewards of a group, ascending r_(1) <= ... <=
// r_(n) with gaps d_0 = r_(1), d_j = r_(j+1) - r_(j), and a rank table of offsets and slopes
//
//     A_(i) = sum_{j >= 0} offset_j d_j + sum_{1 <= j < i} slope_j d_j
//
// Gaps between equal rewards are exactly 0, so ties get equal values, and a group of equal rewards
// gets 0 if offset_0 = 0. Without a table
//
//     A_i = (r_i - b) m,  b = the mean, or 0;  m = 1, n/(n-1), 1/(std + eps) or 1/(mean + eps)
//
// where moments are taken of the distances to the smallest reward: they are exactly 0 for equal
// rewards, and a large offset costs no precision. A group with a reward that is not finite, or
// above kLargestReward in magnitude, becomes NaN.
#pragma once
#include <cmath>
#include <cstdint>

#include "kernel.h"

namespace maxrl {

constexpr double kLargestReward = 1e150;  // squares of differences are finite

enum class Scale { kOne, kLeaveOneOut, kStd, kMean };  // m
template <>
inline constexpr const char* kNamesOf<Scale>[4] = {"one", "leave_one_out", "std", "mean"};

template <typename Real>  // float or double
struct GroupAdvantage {
  int64_t num_groups, group_size;
  const Real* rewards;  // [G, N]
  const bool* valid;  // [G, N], or null: all are
  const double* tables;  // [2, N], with valid [G, 2, N]: offsets and slopes; null: moments
  bool centred;  // this and the next three are of moments
  Scale scale;
  double eps;
  int64_t ddof;
  Real* advantages;  // [G, N]

  MAXRL_FIELDS(num_groups, group_size, rewards, valid, tables, centred, scale, eps, ddof,
               advantages)

  MAXRL_HOST_DEVICE const double* offsets(int64_t group) const {
    return tables + (valid ? group * 2 * group_size : 0);
  }
  MAXRL_HOST_DEVICE bool exists(int64_t i) const { return !valid || valid[i]; }
  MAXRL_HOST_DEVICE static bool accepts(double reward) { return fabs(reward) <= kLargestReward; }

  // 0 for groups of one, of equal rewards, or without success.
  MAXRL_HOST_DEVICE double multiplier(double n, double mean, double squares) const {
    double divisor = 1.0;
    if (scale == Scale::kLeaveOneOut) divisor = (n - 1.0) / n;
    if (scale == Scale::kStd) divisor = n > ddof ? sqrt(squares / (n - ddof)) + eps : 0.0;
    if (scale == Scale::kMean) divisor = mean + eps;
    return divisor == 0.0 ? 0.0 : 1.0 / divisor;
  }
};

}  // namespace maxrl
