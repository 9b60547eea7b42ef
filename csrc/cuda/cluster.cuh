// Thread-block clusters, where the GPU has them (Hopper and later): the blocks of a cluster share
// one row of logits.
#pragma once
#include <cooperative_groups.h>

namespace maxrl::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
struct Cluster {
  __device__ static unsigned rank() { return cooperative_groups::this_cluster().block_rank(); }
  __device__ static unsigned size() { return cooperative_groups::this_cluster().num_blocks(); }
  __device__ static void sync() { cooperative_groups::this_cluster().sync(); }
  // The same shared variable of another block of the cluster.
  template <typename T>
  __device__ static const T* of_rank(const T* mine, unsigned rank) {
    return cooperative_groups::this_cluster().map_shared_rank(const_cast<T*>(mine), rank);
  }
};
#else
struct Cluster {  // a block by itself
  __device__ static unsigned rank() { return 0; }
  __device__ static unsigned size() { return 1; }
  __device__ static void sync() { __syncthreads(); }
  template <typename T>
  __device__ static const T* of_rank(const T* mine, unsigned) {
    return mine;
  }
};
#endif

}  // namespace maxrl::cuda
