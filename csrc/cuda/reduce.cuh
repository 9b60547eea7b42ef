// Reductions over a warp, a block, and all blocks of a launch, in an order that depends on the
// launch's shape alone.
#pragma once
#include <cstdint>

namespace maxrl::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffff;

// The sum over `lanes` neighbouring lanes, a power of two, in each of them. The whole warp must
// call it.
template <typename Value>
__device__ inline Value sum_over_lanes(Value value, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2)
    value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}
__device__ inline double warp_sum(double value) { return sum_over_lanes(value, kWarp); }

template <typename Value>
__device__ inline Value warp_max(Value value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const Value other = __shfl_xor_sync(kAllLanes, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

struct Add {
  template <typename Value>
  __device__ Value operator()(Value a, Value b) const {
    return a + b;
  }
};

// Combines one value of each thread; every thread gets the result. `of_warps` is shared memory, one
// value a warp. Every thread of the block must call it.
template <typename Value, typename Combine>
__device__ Value block_reduce(Value value, Value* of_warps, const Combine& combine) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    value = combine(value, __shfl_xor_sync(kAllLanes, value, offset));
  __syncthreads();  // of_warps may still be read from an earlier call
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = of_warps[0];
  for (int w = 1; w < static_cast<int>(blockDim.x / kWarp); ++w)
    value = combine(value, of_warps[w]);
  return value;
}

// The sum over the lanes up to this one.
template <typename Value>
__device__ Value warp_prefix_sum(Value value) {
  for (int lanes = 1; lanes < kWarp; lanes *= 2) {
    const Value other = __shfl_up_sync(kAllLanes, value, lanes);
    if (static_cast<int>(threadIdx.x % kWarp) >= lanes) value += other;
  }
  return value;
}

// Every thread of every block calls this once, at its end. sum_of(i) returns the block's sum i, for
// any thread. `workspace` has workspace_size(size) zeros. The last block to come adds all sums up
// into workspace[0 .. size), and calls use(i, sum i) on one thread.
template <int size, typename SumOf, typename Use>
__device__ void add_over_blocks(const SumOf& sum_of, double* workspace, int block, int num_blocks,
                                const Use& use) {
  auto* counter = reinterpret_cast<unsigned long long*>(workspace + size);
  double* rows = workspace + size + 1;
  __shared__ bool is_last;
  if (threadIdx.x < size) rows[block * size + threadIdx.x] = sum_of(threadIdx.x);
  __syncthreads();
  if (threadIdx.x == 0) {
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
    if (lane == 0) {
      workspace[i] = sum;
      use(i, sum);
    }
  }
}

}  // namespace maxrl::cuda
