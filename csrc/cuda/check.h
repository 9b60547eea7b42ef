#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#define MAXRL_CUDA_CHECK(call)                                                                                   \
  do {                                                                                                           \
    const cudaError_t error_ = (call);                                                                           \
    if (error_ != cudaSuccess)                                                                                   \
      throw std::runtime_error(std::string(#call " failed at " __FILE__ ":") + std::to_string(__LINE__) + ": " + \
                               cudaGetErrorString(error_));                                                      \
  } while (0)
