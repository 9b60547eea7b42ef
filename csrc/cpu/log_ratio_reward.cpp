// Log-ratio reward proxies, sums over packed sequences, and their backward pass, on a CPU.
#include <algorithm>

#include "../kernels.h"

namespace maxrl::cpu {
namespace {
constexpr int64_t kParallelThreshold = 1 << 15;  // tokens
}

template <typename Real>
void log_ratio_reward(const LogRatio<Real>& in, const Real* logprobs, const Real* ref_logprobs, Real* proxies,
                      int num_threads) {
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
    proxies[s] = static_cast<Real>(in.beta * sum);
  }
}

template <typename Real>
void log_ratio_reward_backward(const LogRatio<Real>& in, const Real* grad_proxies, Real* gradient, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 16) if (in.num_tokens >= kParallelThreshold)
  for (int64_t s = 0; s < in.num_sequences; ++s) {
    const auto grad = static_cast<Real>(in.beta * grad_proxies[s]);
    for (int64_t t = in.cu_seqlens[s]; t < in.cu_seqlens[s + 1]; ++t) gradient[t] = !in.mask || in.mask[t] ? grad : Real(0);
  }
}

#define MAXRL_INSTANTIATE(Real)                                                                \
  template void log_ratio_reward(const LogRatio<Real>&, const Real*, const Real*, Real*, int); \
  template void log_ratio_reward_backward(const LogRatio<Real>&, const Real*, Real*, int);
MAXRL_INSTANTIATE(float)
MAXRL_INSTANTIATE(double)
#undef MAXRL_INSTANTIATE

}  // namespace maxrl::cpu
