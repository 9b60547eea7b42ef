// The rank transform of one group, as scalar formulas shared by the CPU and the CUDA kernel: one definition, compiled twice.
//
// For rewards in ascending order r_(1) <= ... <= r_(N) and weights omega_1 .. omega_{N-1},
//
//     T_(1) = 0,   T_(i) = sum_{j < i} omega_j (r_(j+1) - r_(j)),   A = T - mean(T) if centred, else T.
//
// Gaps between equal rewards are exactly 0, so ties get equal advantages and a group of equal rewards gets exactly 0.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define MAXRL_HOST_DEVICE __host__ __device__
#else
#define MAXRL_HOST_DEVICE
#endif

namespace maxrl {

// A total order: ascending rewards, ties by index, so that the result never depends on the sort's algorithm.
template <typename Real>
MAXRL_HOST_DEVICE inline bool sorts_before(Real reward, int32_t index, Real other_reward, int32_t other_index) {
  return reward < other_reward || (reward == other_reward && index < other_index);
}

// omega_j (r_(j+1) - r_(j)). The gap is taken in double: exact for float rewards of like size, however large their offset.
template <typename Real>
MAXRL_HOST_DEVICE inline double weighted_gap(double omega, Real lower, Real upper) {
  return omega * (static_cast<double>(upper) - static_cast<double>(lower));
}

}  // namespace maxrl
