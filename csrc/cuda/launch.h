// Launches of kernels, and their shared memory.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#define MAXRL_CUDA_CHECK(call)                                                                \
  do {                                                                                        \
    const cudaError_t error_ = (call);                                                        \
    if (error_ != cudaSuccess)                                                                \
      throw std::runtime_error(std::string(#call " failed at " __FILE__ ":") +                \
                               std::to_string(__LINE__) + ": " + cudaGetErrorString(error_)); \
  } while (0)

namespace maxrl::cuda {

// Of rows, those of the second one show the distance.
inline void check_alignment(const char* kernel, std::initializer_list<const void*> addresses) {
  for (const void* const address : addresses)
    if (reinterpret_cast<uintptr_t>(address) % 16)
      throw std::invalid_argument(std::string(kernel) +
                                  " needs tensors and rows aligned to 16 bytes");
}

inline void check_size(const char* name, int size, int multiple, int most) {
  if (size < multiple || size % multiple || size > most)
    throw std::invalid_argument(std::string(name) + " must be a multiple of " +
                                std::to_string(multiple) + " up to " + std::to_string(most) +
                                ", got " + std::to_string(size));
}

// The shape of a launch. cluster_size: blocks of a thread-block cluster, 0 on GPUs that have none,
// and for a launch without one.
struct LaunchShape {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};

  LaunchShape(int64_t blocks, int threads, int64_t shared_bytes, int cluster_size,
              cudaStream_t stream) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(cluster_size);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = cluster_size > 0 ? 1 : 0;
  }
  LaunchShape(const LaunchShape&) = delete;  // it has a pointer to its own member
};

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes,
            int cluster_size, cudaStream_t stream, const Arguments&... arguments) {
  const LaunchShape shape(blocks, threads, shared_bytes, cluster_size, stream);
  MAXRL_CUDA_CHECK(cudaLaunchKernelEx(&shape.config, kernel, arguments...));
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int device, value;
  MAXRL_CUDA_CHECK(cudaGetDevice(&device));
  MAXRL_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

// A number for each key and device, made at its first use: the driver's answers take longer than a
// launch.
class OncePerDevice {
 public:
  template <typename Make>
  int64_t get(int64_t key, const Make& make) {
    int device;
    MAXRL_CUDA_CHECK(cudaGetDevice(&device));
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = numbers_.find({device, key});
    if (found != numbers_.end()) return found->second;
    return numbers_[{device, key}] = make();
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, int64_t>, int64_t> numbers_;
};

// The compute capability that a kernel was compiled for: the device's may be greater.
template <typename... Parameters>
int64_t compiled_capability(void (*kernel)(Parameters...)) {
  static OncePerDevice capabilities;
  const int of_device =
      device_attribute(cudaDevAttrComputeCapabilityMajor);  // emulated ones change
  return capabilities.get(reinterpret_cast<int64_t>(kernel) + of_device, [&] {
    cudaFuncAttributes compiled;
    MAXRL_CUDA_CHECK(cudaFuncGetAttributes(&compiled, kernel));
    return compiled.ptxVersion / 10;
  });
}

// A launch of a kernel that begins with wait_for_predecessor: its blocks may start while the kernel
// before it ends.
template <typename... Parameters, typename... Arguments>
void launch_early(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes,
                  cudaStream_t stream, const Arguments&... arguments) {
  LaunchShape shape(blocks, threads, shared_bytes, 0, stream);
  if (compiled_capability(kernel) >= 9) {
    shape.attribute = {};
    shape.attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    shape.attribute.val.programmaticStreamSerializationAllowed = 1;
    shape.config.numAttrs = 1;
  }
  MAXRL_CUDA_CHECK(cudaLaunchKernelEx(&shape.config, kernel, arguments...));
}

// Lets the next kernel's blocks start, and waits until the kernels before this one have ended.
// Every block must call it before it reads or writes anything, and before it ends: the next kernel
// waits for this one only.
__device__ inline void wait_for_predecessor() {
#ifndef __CUDACC__
  emulation::wait_for_predecessor();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
}

// Bytes of dynamic shared memory that a block may have; kernels have some of their own.
constexpr int64_t kOwnShared = 4096, kUnaskedShared = (48 << 10) - kOwnShared;
inline int64_t most_shared() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kOwnShared;
}

constexpr int kPortableCluster = 8;  // every GPU with clusters has this size

// Allows a kernel more than kUnaskedShared: once, and always the same, because another thread may
// be about to launch it.
template <typename... Parameters>
void allow_shared(void (*kernel)(Parameters...)) {
  static OncePerDevice allowed;
  allowed.get(reinterpret_cast<int64_t>(kernel), [&] {
    const int64_t bytes = most_shared();
    MAXRL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(bytes)));
    MAXRL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                          100));  // percent of what is that or cache
    return bytes;
  });
}

// The number of clusters that the current device holds at once. A cluster lies within one group of
// multiprocessors, so there may be fewer than the number of blocks divided by the cluster size, and
// none of more than kPortableCluster blocks. For cluster_size 0 and 1, the number of blocks.
template <typename... Parameters>
int64_t resident_clusters(void (*kernel)(Parameters...), int threads, int64_t shared_bytes,
                          int cluster_size) {
  int count = 0;
  if (cluster_size > 1) {
    if (cluster_size > kPortableCluster)
      MAXRL_CUDA_CHECK(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    const LaunchShape shape(cluster_size, threads, shared_bytes, cluster_size, nullptr);
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&count, kernel, &shape.config);
    if (error == cudaErrorInvalidClusterSize) {
      cudaGetLastError();  // a launch would report it
      return 0;
    }
    MAXRL_CUDA_CHECK(error);
    return count;
  }
  MAXRL_CUDA_CHECK(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, threads, shared_bytes));
  return int64_t{count} * device_attribute(cudaDevAttrMultiProcessorCount);
}

// The `shared_bytes` of a launch, 16-byte aligned.
__device__ inline unsigned char* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char storage[];
  return storage;
}

}  // namespace maxrl::cuda
