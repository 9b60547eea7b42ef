// Emulates the parts of CUDA that csrc/cuda/ uses on a CPU, so that the kernels can be tested on
// any machine.
//
// Every thread of a block is a fiber that runs until a barrier or an exchange within its warp; then
// the next fiber runs. With MAXRL_EMULATED_ORDER=reverse the last fiber runs first: a result that
// depends on the order shows a missing barrier. The blocks of a cluster are threads of the
// operating system, each with its own shared memory; clusters run one after the other. If not all
// threads reach a barrier, a thread writes past the requested shared memory, or 16 bytes at another
// address than a multiple of 16 are accessed, the process ends with a message. Not emulated: the
// memory model (other threads see every write at once), speed, and the rounding of 2^x on the
// hardware. Under ThreadSanitizer (test_races.py) accesses that no barrier orders are reported, in
// whatever order they happened.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>

#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __shared__ thread_local  // one thread of the operating system per block
#define __forceinline__ inline
#define __noinline__  // as part of __attribute__((__noinline__)) too
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__
#define __CUDA_ARCH__ 900
// On compute capability 9; with 10, clusters run the other kernel.
#define MAXRL_PIPELINED 1

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
extern thread_local dim3 threadIdx, blockIdx;  // of the running fiber
extern dim3 blockDim, gridDim;  // of the launch

namespace emulation {

constexpr int kWarp = 32;

extern unsigned cluster_size;  // of the launch
extern const int fault;  // the number of the planted fault that happens (test_races.py), or none

unsigned cluster_rank();
void sync_block();
void sync_warp();
void sync_cluster();
void fence();
void wait_for_predecessor();
void ignore_reads(bool are_ignored);  // by ThreadSanitizer
unsigned long long add_atomically(unsigned long long* to, unsigned long long value);
uint64_t exchange(
    uint64_t value,
    int from_lane);  // returns the value of a lane of the same warp; the whole warp must call it
void* of_rank(void* mine,
              unsigned rank);  // the same shared variable of another block of the cluster
// starts_early: what came before is not ordered before the kernel, but before what follows
// wait_for_predecessor, which all of its threads must call.
void run(dim3 grid, dim3 block, unsigned cluster_size, size_t shared_bytes, bool starts_early,
         const std::function<void()>& kernel);

// A barrier in shared memory: threads that arrive, and bytes that come, end its phase.
struct alignas(8) Barrier {
  int16_t expected, left, bytes, phase;  // bytes: announced, less those that have come
};
inline void init_barrier(Barrier& barrier, unsigned threads) {
  const auto count = static_cast<int16_t>(threads);
  barrier = {count, count, 0, 0};
}
void arrive(Barrier& barrier, int threads = 1, int bytes = 0);
void wait(Barrier& barrier, unsigned parity);

template <typename T>
T exchange_any(T value, int from_lane) {
  uint64_t bits = 0;
  static_assert(sizeof value <= sizeof bits);
  std::memcpy(&bits, &value, sizeof value);
  bits = exchange(bits, from_lane);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

}  // namespace emulation

// Called by kernels.
using std::max;
using std::min;
inline void __syncthreads() { emulation::sync_block(); }
inline void __syncwarp(unsigned = 0) { emulation::sync_warp(); }
inline void __threadfence() { emulation::fence(); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::exchange_any(value, emulation::lane() ^ mask);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int delta) {
  return emulation::exchange_any(
      value,
      std::max(emulation::lane() - delta, emulation::lane() < delta ? emulation::lane() : 0));
}
template <typename T>
T __shfl_down_sync(unsigned, T value, int delta) {
  const int from = emulation::lane() + delta;
  return emulation::exchange_any(value, from < emulation::kWarp ? from : emulation::lane());
}
template <typename T>
T __shfl_sync(unsigned, T value, int from) {
  return emulation::exchange_any(value, from % emulation::kWarp);
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
void __stwb(T* to, T value) {
  *to = value;
}
inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long value) {
  return emulation::add_atomically(to, value);
}
using std::fma;
using std::fmax;
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Called by launches.

enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidValue,
  cudaErrorInvalidConfiguration,
  cudaErrorInvalidClusterSize
};
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMultiProcessorCount,
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout,
  cudaFuncAttributeNonPortableClusterSizeAllowed,
};
enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeProgrammaticStreamSerialization,
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    dim3 clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

struct cudaFuncAttributes {
  int ptxVersion;  // ten times the compute capability
};

const char* cudaGetErrorString(cudaError_t error);
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
namespace emulation {
cudaError_t allow_shared(const void* kernel, int bytes);
cudaError_t allow_large_clusters(const void* kernel);
cudaError_t check(const cudaLaunchConfig_t& config, const void* kernel);
unsigned largest_cluster();  // that the device holds
}  // namespace emulation
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int bytes) {
  const auto* of = reinterpret_cast<const void*>(kernel);
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed)
    return emulation::allow_large_clusters(of);
  return emulation::allow_shared(of, bytes);
}
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
  cudaDeviceGetAttribute(&attributes->ptxVersion, cudaDevAttrComputeCapabilityMajor, 0);
  attributes->ptxVersion *= 10;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel*,
                                           const cudaLaunchConfig_t* config) {
  const bool fits = config->attrs[0].val.clusterDim.x <= emulation::largest_cluster();
  *clusters = 2;
  return fits ? cudaSuccess : cudaErrorInvalidClusterSize;
}
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  const cudaError_t error = emulation::check(*config, reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) return error;
  const unsigned cluster_size = config->numAttrs > 0 ? config->attrs[0].val.clusterDim.x : 1;
  const bool starts_early =
      config->numAttrs > 0 && config->attrs[0].val.programmaticStreamSerializationAllowed;
  emulation::run(config->gridDim, config->blockDim, cluster_size, config->dynamicSmemBytes,
                 starts_early, [&] {
                   const std::tuple<Parameters...> own(arguments...);
                   auto* const function = kernel;
                   emulation::ignore_reads(false);
                   std::apply(function, own);
                 });
  return cudaSuccess;
}
