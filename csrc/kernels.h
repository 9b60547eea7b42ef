// The contract of every kernel: addresses, sizes, a stream. No torch header is included anywhere under csrc/.
#pragma once
#include <cstdint>

#ifdef MAXRL_FAST_CUDA
#include <cuda_runtime_api.h>
#endif

namespace maxrl {

// rank_transform: advantages[g, i] from rewards[g, :] as rank_transform.h defines it.
//   rewards, advantages  [num_groups, group_size], float or double
//   weights              [group_size - 1] double, omega_1 first; on the device of the rewards
namespace cpu {
template <typename Real>
void rank_transform(const Real* rewards, const double* weights, Real* advantages, int64_t num_groups, int64_t group_size,
                    bool centred);
}  // namespace cpu

#ifdef MAXRL_FAST_CUDA
namespace cuda {
constexpr int64_t kMaxGroupSize = 4096;  // a group is sorted in the shared memory of one block

template <typename Real>
void rank_transform(const Real* rewards, const double* weights, Real* advantages, int64_t num_groups, int64_t group_size,
                    bool centred, cudaStream_t stream);
}  // namespace cuda
#endif

}  // namespace maxrl
