// Sums over all blocks of a launch, in an order that depends on the launch's shape alone.
#pragma once
#include <cstdint>

namespace maxrl::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffff;

__device__ inline double warp_sum(double value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// Numbers of zeroed memory that add_over_blocks needs for `size` sums: the result, a counter, one row of each block.
constexpr int64_t kMaxSummingBlocks = 1024;
constexpr int64_t workspace_size(int64_t size) { return size + 1 + kMaxSummingBlocks * size; }

// Every thread of every block calls this once, at its end, with thread 0 holding the block's sums. The last block to come
// adds all of them up into workspace[0 .. size).
template <int size>
__device__ void add_over_blocks(const double (&sums)[size], double* workspace, int block, int num_blocks) {
  auto* counter = reinterpret_cast<unsigned long long*>(workspace + size);
  double* rows = workspace + size + 1;
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    for (int i = 0; i < size; ++i) rows[block * size + i] = sums[i];
    __threadfence();  // the row before the count
    is_last = atomicAdd(counter, 1ull) == static_cast<unsigned long long>(num_blocks - 1);
    __threadfence();  // the count before the other blocks' rows
  }
  __syncthreads();
  if (!is_last) return;
  const int lane = threadIdx.x % kWarp, num_warps = blockDim.x / kWarp;
  for (int i = threadIdx.x / kWarp; i < size; i += num_warps) {
    double sum = 0.0;
    for (int b = lane; b < num_blocks; b += kWarp) sum += __ldcg(&rows[b * size + i]);
    sum = warp_sum(sum);
    if (lane == 0) workspace[i] = sum;
  }
}

}  // namespace maxrl::cuda
