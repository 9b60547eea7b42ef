// Starting a kernel, and the shared memory asked for with it.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "check.h"

namespace maxrl::cuda {

// The shape of a launch. cluster_size: blocks of a thread-block cluster, 0 on GPUs that have none.
struct LaunchShape {
  cudaLaunchAttribute cluster{};
  cudaLaunchConfig_t config{};

  LaunchShape(int64_t blocks, int threads, int64_t shared_bytes, int cluster_size, cudaStream_t stream) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(cluster_size);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = cluster_size > 0 ? 1 : 0;
  }
  LaunchShape(const LaunchShape&) = delete;  // it points into itself
};

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes, int cluster_size,
            cudaStream_t stream, const Arguments&... arguments) {
  const LaunchShape shape(blocks, threads, shared_bytes, cluster_size, stream);
  MAXRL_CUDA_CHECK(cudaLaunchKernelEx(&shape.config, kernel, arguments...));
}

// More than the 48 KiB that a block has without asking.
template <typename... Parameters>
void allow_shared(void (*kernel)(Parameters...), int64_t bytes) {
  MAXRL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int device, value;
  MAXRL_CUDA_CHECK(cudaGetDevice(&device));
  MAXRL_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

// Clusters that the present device holds at once: each lies within one of its groups of multiprocessors, so that they may be
// fewer than its blocks by the size. cluster_size 0 and 1: blocks.
template <typename... Parameters>
int64_t resident_clusters(void (*kernel)(Parameters...), int threads, int64_t shared_bytes, int cluster_size) {
  int count = 0;
  if (cluster_size > 1) {
    const LaunchShape shape(cluster_size, threads, shared_bytes, cluster_size, nullptr);
    MAXRL_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&count, kernel, &shape.config));
    return count;
  }
  MAXRL_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, threads, shared_bytes));
  return int64_t{count} * device_attribute(cudaDevAttrMultiProcessorCount);
}

// The `shared_bytes` of a launch, 16-byte aligned.
__device__ inline unsigned char* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char storage[];
  return storage;
}

}  // namespace maxrl::cuda
