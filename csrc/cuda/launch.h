// Starting a kernel, and the shared memory asked for with it.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "check.h"

namespace maxrl::cuda {

// cluster_size: blocks of a thread-block cluster, 0 on GPUs that have none.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes, int cluster_size,
            cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(cluster_size);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = cluster_size > 0 ? 1 : 0;
  MAXRL_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
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

// The `shared_bytes` of a launch, 16-byte aligned.
__device__ inline unsigned char* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char storage[];
  return storage;
}

}  // namespace maxrl::cuda
