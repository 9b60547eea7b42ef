// Group advantages on a GPU, one block per group. A thread counts the rewards below its own; then
// one warp sums over the gaps of the sorted rewards, so that the result does not depend on the
// number of threads. A group's rewards and their ranks lie in shared memory.
#include "../group_advantage.h"
#include "launch.h"
#include "reduce.cuh"

namespace maxrl::cuda {
namespace {

constexpr int kMostThreads = 512;
constexpr int64_t kMostRankedRewards = 4096;  // of a group: what fits into shared memory
constexpr int64_t kBytesOfReward = 2 * sizeof(double) + sizeof(int32_t);

// Returns the rank transform of `rewards` [size], of which n are finite and the others infinite. It
// lies in shared memory after the rewards, which are overwritten.
__device__ const double* rank_transform(double* rewards, int size, int n, const double* offset,
                                        const double* slope) {
  double* sorted = rewards + size;
  int32_t* below = reinterpret_cast<int32_t*>(sorted + size);  // how many are smaller
  for (int i = threadIdx.x; i < size; i += blockDim.x) {
    const double reward = rewards[i];
    int smaller = 0, equal_before = 0;
    for (int j = 0; j < size; ++j) {
      smaller += rewards[j] < reward;
      equal_before += rewards[j] == reward && j < i;
    }
    sorted[smaller + equal_before] = reward;
    below[i] = smaller;
  }
  __syncthreads();
  double* sums = rewards;  // by rank
  if (threadIdx.x < kWarp) {
    double base = 0.0, before = 0.0;
    for (int start = 0; start < n; start += kWarp) {
      const int j = start + threadIdx.x;
      const double gap = j >= n ? 0.0 : j > 0 ? sorted[j] - sorted[j - 1] : sorted[0];
      base += j < n ? offset[j] * gap : 0.0;
      const double sum = warp_prefix_sum(j > 0 && j < n ? slope[j] * gap : 0.0);
      if (j < n) sums[j] = before + sum;
      before += __shfl_sync(kAllLanes, sum, kWarp - 1);
    }
    base = warp_sum(base);
    for (int j = threadIdx.x; j < n; j += kWarp) sums[j] += base;
  }
  __syncthreads();
  double* result = sorted;  // of the rollouts of this thread
  for (int i = threadIdx.x; i < size; i += blockDim.x)
    if (below[i] < n) result[i] = sums[below[i]];
  return result;
}

template <typename Real>
__global__ void __launch_bounds__(kMostThreads, 1)
    group_advantage_kernel(const __grid_constant__ GroupAdvantage<Real> in) {
  __shared__ double warps[kMostThreads / kWarp];
  const int size = static_cast<int>(in.group_size);
  const int64_t begin = int64_t{blockIdx.x} * size;
  double* const values = reinterpret_cast<double*>(dynamic_shared());  // [size], for ranks
  // use(i, place) for the valid rollouts of this thread.
  const auto each = [&](const auto& use) {
    for (int i = threadIdx.x; i < size; i += blockDim.x)
      if (in.exists(begin + i)) use(i, begin + i);
  };
  double num_valid = 0.0, num_unusable = 0.0, low = INFINITY;
  each([&](int, int64_t place) {
    const double reward = in.rewards[place];
    num_valid += 1.0;
    num_unusable += !in.accepts(reward);
    low = fmin(low, reward);
  });
  const double n = block_reduce(num_valid, warps, Add());
  const double poison =
      block_reduce(num_unusable, warps, Add()) > 0.0 ? NAN : 0.0;  // x + 0.0 is never -0.0
  for (int i = threadIdx.x; i < size; i += blockDim.x)
    if (!in.exists(begin + i)) in.advantages[begin + i] = Real(0);
  if (in.tables) {
    for (int i = threadIdx.x; i < size; i += blockDim.x)
      values[i] = in.exists(begin + i) ? in.rewards[begin + i] : Real(INFINITY);
    __syncthreads();
    const double* const offset = in.offsets(blockIdx.x);
    const double* const result =
        rank_transform(values, size, static_cast<int>(n), offset, offset + size);
    each([&](int i, int64_t place) {
      in.advantages[place] = static_cast<Real>(result[i] + poison);
    });
    return;
  }
  low = block_reduce(low, warps, [](double a, double b) { return a < b ? a : b; });
  double mean = 0.0, squares = 0.0;  // of the distances to the smallest
  each([&](int, int64_t place) { mean += in.rewards[place] - low; });
  mean = block_reduce(mean, warps, Add()) / n;
  if (in.scale == Scale::kStd) {
    each([&](int, int64_t place) {
      const double distance = in.rewards[place] - low - mean;
      squares += distance * distance;
    });
    squares = block_reduce(squares, warps, Add());
  }
  const double factor = in.multiplier(n, low + mean, squares);
  each([&](int, int64_t place) {
    const double reward = in.rewards[place];
    in.advantages[place] =
        static_cast<Real>((in.centred ? reward - low - mean : reward) * factor + poison);
  });
}

}  // namespace

// To report an unusable reward the host would have to wait: the group is NaN.
template <typename Real>
void group_advantage(const GroupAdvantage<Real>& in, cudaStream_t stream) {
  if (in.num_groups == 0 || in.group_size == 0) return;  // a zero-sized grid is a launch error
  if (in.tables && in.group_size > kMostRankedRewards)
    throw std::invalid_argument("ranks on a GPU take groups of at most " +
                                std::to_string(kMostRankedRewards) + " rollouts, got " +
                                std::to_string(in.group_size));
  const auto kernel = group_advantage_kernel<Real>;
  const int64_t shared = in.tables ? in.group_size * kBytesOfReward : 0;
  if (shared > kUnaskedShared) allow_shared(kernel);
  // One warp for moments: their sums, too, do not depend on the number of threads.
  int threads = kWarp;
  while (in.tables && 2 * threads <= in.group_size && threads < kMostThreads) threads *= 2;
  launch(kernel, in.num_groups, threads, shared, 0, stream, in);
}

const bool defined =
    define_kernel("group_advantage", group_advantage<float>, group_advantage<double>);

}  // namespace maxrl::cuda
