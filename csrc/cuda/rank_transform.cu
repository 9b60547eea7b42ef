// One block per group: bitonic sort in shared memory, then a prefix sum over the sorted gaps.
#include "../rank_transform.h"

#include "../kernels.h"
#include "check.h"

namespace maxrl::cuda {
namespace {

constexpr int kWarpSize = 32;
constexpr int kMaxThreads = 512;

struct SumPair {
  double before;  // over the threads before this one
  double total;   // over the block
};

// Exclusive prefix sum over the block, the same order of additions in every run. `warp_sums` [kMaxThreads / kWarpSize].
__device__ SumPair block_prefix_sum(double value, double* warp_sums) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  double inclusive = value;
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const double other = __shfl_up_sync(0xffffffff, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  __syncthreads();  // warp_sums may still be read from an earlier call
  if (lane == kWarpSize - 1) warp_sums[warp] = inclusive;
  __syncthreads();
  SumPair result{inclusive - value, 0.0};
  for (int w = 0; w < blockDim.x / kWarpSize; ++w) {
    if (w == warp) result.before += result.total;
    result.total += warp_sums[w];
  }
  return result;
}

// padded_size: group_size rounded up to a power of two, at least 2. Shared memory: keys [padded_size] Real, then
// order [padded_size] int32; the places from group_size on hold index -1 and sort last.
template <typename Real>
__global__ void rank_transform_kernel(const Real* rewards, const double* weights, Real* advantages, int group_size,
                                      int padded_size, bool centred) {
  extern __shared__ __align__(sizeof(double)) unsigned char shared[];
  __shared__ double warp_sums[kMaxThreads / kWarpSize];
  Real* keys = reinterpret_cast<Real*>(shared);
  int32_t* order = reinterpret_cast<int32_t*>(keys + padded_size);
  const int64_t group_start = static_cast<int64_t>(blockIdx.x) * group_size;

  for (int i = threadIdx.x; i < padded_size; i += blockDim.x) {
    keys[i] = i < group_size ? rewards[group_start + i] : Real(0);
    order[i] = i < group_size ? i : -1;
  }
  __syncthreads();

  for (int run = 2; run <= padded_size; run *= 2) {
    for (int stride = run / 2; stride > 0; stride /= 2) {
      for (int pair = threadIdx.x; pair < padded_size / 2; pair += blockDim.x) {
        const int low = 2 * pair - pair % stride, high = low + stride;  // pair % stride + 2 * stride * (pair / stride)
        const bool swapped = order[low] < 0 || (order[high] >= 0 && sorts_before(keys[high], order[high], keys[low], order[low]));
        const bool ascending = (low & run) == 0;
        if (swapped == ascending && !(order[low] < 0 && order[high] < 0)) {
          const Real key = keys[low];
          keys[low] = keys[high];
          keys[high] = key;
          const int32_t index = order[low];
          order[low] = order[high];
          order[high] = index;
        }
      }
      __syncthreads();
    }
  }

  // Each thread owns a run of consecutive ranks.
  const int per_thread = (group_size + blockDim.x - 1) / blockDim.x;
  const int begin = min(static_cast<int>(threadIdx.x) * per_thread, group_size);
  const int end = min(begin + per_thread, group_size);
  double sum = 0.0;
  for (int i = begin; i < end; ++i) sum += i == 0 ? 0.0 : weighted_gap(weights[i - 1], keys[i - 1], keys[i]);
  const double start = block_prefix_sum(sum, warp_sums).before;

  double mean = 0.0;
  if (centred) {
    double prefix = start, prefix_sum = 0.0;
    for (int i = begin; i < end; ++i) {
      prefix += i == 0 ? 0.0 : weighted_gap(weights[i - 1], keys[i - 1], keys[i]);
      prefix_sum += prefix;
    }
    mean = block_prefix_sum(prefix_sum, warp_sums).total / group_size;
  }
  double prefix = start;
  for (int i = begin; i < end; ++i) {
    prefix += i == 0 ? 0.0 : weighted_gap(weights[i - 1], keys[i - 1], keys[i]);
    advantages[group_start + order[i]] = static_cast<Real>(prefix - mean);
  }
}

}  // namespace

template <typename Real>
void rank_transform(const Real* rewards, const double* weights, Real* advantages, int64_t num_groups, int64_t group_size,
                    bool centred, cudaStream_t stream) {
  if (num_groups == 0 || group_size == 0) return;  // a zero-sized grid is a launch error
  if (group_size > kMaxGroupSize)
    throw std::invalid_argument("rank_transform on CUDA takes groups of at most " + std::to_string(kMaxGroupSize) +
                                " rollouts, got " + std::to_string(group_size));
  int padded_size = 2;
  while (padded_size < group_size) padded_size *= 2;
  int threads = kWarpSize;
  while (threads < padded_size / 2 && threads < kMaxThreads) threads *= 2;
  // At most 4096 * (8 + 4) bytes = 48 KiB, what a block has without asking, less the static warp_sums: so ask.
  const size_t shared_bytes = padded_size * (sizeof(Real) + sizeof(int32_t));
  if (shared_bytes > 40 * 1024)
    MAXRL_CUDA_CHECK(cudaFuncSetAttribute(rank_transform_kernel<Real>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(shared_bytes)));
  rank_transform_kernel<Real><<<static_cast<unsigned>(num_groups), threads, shared_bytes, stream>>>(
      rewards, weights, advantages, static_cast<int>(group_size), padded_size, centred);
  MAXRL_CUDA_CHECK(cudaGetLastError());
}

template void rank_transform(const float*, const double*, float*, int64_t, int64_t, bool, cudaStream_t);
template void rank_transform(const double*, const double*, double*, int64_t, int64_t, bool, cudaStream_t);

}  // namespace maxrl::cuda
