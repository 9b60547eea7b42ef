// Log-ratio reward proxies, sums over packed sequences, and their backward pass, on a CPU.
#include <algorithm>

#include "../kernels.h"

namespace maxrl::cpu {
namespace {
constexpr int64_t kParallelThreshold = 1 << 15;  // tokens
}

template <typename Real>
void log_ratio_reward(const LogRatio<Real>& in, int num_threads) {
  const Real *const logprobs = in.logprobs, *const ref_logprobs = in.ref_logprobs;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 16) if (in.num_tokens >= kParallelThreshold)
  for (int64_t s = 0; s < in.num_sequences; ++s) {
    double sum = 0.0;
    const int64_t begin = in.cu_seqlens[s], end = in.cu_seqlens[s + 1];
    if (in.mask) {
#pragma omp simd reduction(+ : sum)
      for (int64_t t = begin; t < end; ++t)
        sum += in.mask[t] ? static_cast<double>(logprobs[t]) - static_cast<double>(ref_logprobs[t]) : 0.0;
    } else {
#pragma omp simd reduction(+ : sum)
      for (int64_t t = begin; t < end; ++t) sum += static_cast<double>(logprobs[t]) - static_cast<double>(ref_logprobs[t]);
    }
    in.proxies[s] = static_cast<Real>(in.beta * sum);
  }
}

template <typename Real>
void log_ratio_reward_backward(const LogRatioBackward<Real>& backward, int num_threads) {
  const auto& in = backward.forward;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 16) if (in.num_tokens >= kParallelThreshold)
  for (int64_t s = 0; s < in.num_sequences; ++s) {
    const auto grad = static_cast<Real>(in.beta * backward.grad_proxies[s]);
    for (int64_t t = in.cu_seqlens[s]; t < in.cu_seqlens[s + 1]; ++t)
      backward.gradient[t] = !in.mask || in.mask[t] ? grad : Real(0);
  }
}

template void log_ratio_reward(const LogRatio<float>&, int);
template void log_ratio_reward(const LogRatio<double>&, int);
template void log_ratio_reward_backward(const LogRatioBackward<float>&, int);
template void log_ratio_reward_backward(const LogRatioBackward<double>&, int);

}  // namespace maxrl::cpu
