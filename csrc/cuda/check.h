#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace maxrl::cuda {

// Of rows, those of the second one show the distance.
inline void check_alignment(const char* kernel, std::initializer_list<const void*> addresses) {
  for (const void* const address : addresses)
    if (reinterpret_cast<uintptr_t>(address) % 16)
      throw std::invalid_argument(std::string(kernel) + " needs tensors and rows aligned to 16 bytes");
}

}  // namespace maxrl::cuda

#define MAXRL_CUDA_CHECK(call)                                                                                   \
  do {                                                                                                           \
    const cudaError_t error_ = (call);                                                                           \
    if (error_ != cudaSuccess)                                                                                   \
      throw std::runtime_error(std::string(#call " failed at " __FILE__ ":") + std::to_string(__LINE__) + ": " + \
                               cudaGetErrorString(error_));                                                      \
  } while (0)
