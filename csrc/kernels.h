// The contract of every kernel: addresses, sizes, a stream. No torch header is included anywhere under csrc/.
#pragma once
#include <cstdint>
#include <vector>

#ifdef MAXRL_FAST_CUDA
#include <cuda_runtime_api.h>
#endif

#include "group_advantage.h"

namespace maxrl {

// group_advantage: advantages of rewards by a formula of group_advantage.h; rollouts that are not valid get 0.
//   rewards, advantages  [num_groups, group_size] or [num_rewards]: pairs (float, float), (double, double),
//                        (BFloat16, BFloat16), (int32_t | int64_t | bool, float)
//   lengths              [num_rewards] int64, for Baseline::kLengthMean, else null
namespace cpu {

// Returns the first position (in the order of groups) of a reward that is not finite, or for Value::kBinary neither 0 nor 1;
// -1 where all can be used. Else what was written is not the advantages.
template <typename Reward, typename Advantage>
int64_t group_advantage(const Reward* rewards, const Groups& groups, const int64_t* lengths, const Tables& tables,
                        const Formula& formula, Advantage* advantages, int num_threads);

// The different group sizes, ascending, counting only valid rollouts.
// Throws std::invalid_argument where offsets do not run from 0 to num_rewards without falling.
std::vector<int64_t> distinct_group_sizes(const Groups& groups);

}  // namespace cpu

#ifdef MAXRL_FAST_CUDA
namespace cuda {
constexpr int64_t kMaxRankedGroupSize = 4096;  // a group is sorted in the shared memory of one block

// Uneven groups that hold an unusable reward, or more rollouts than kMaxRankedGroupSize or the tables take, become NaN: to
// report them the host would have to wait. So do even groups with an unusable reward.
template <typename Reward, typename Advantage>
void group_advantage(const Reward* rewards, const Groups& groups, const int64_t* lengths, const Tables& tables,
                     const Formula& formula, Advantage* advantages, cudaStream_t stream);
}  // namespace cuda
#endif

}  // namespace maxrl
