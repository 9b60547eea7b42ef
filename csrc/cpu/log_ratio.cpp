// Log-ratio reward proxies on a CPU, one sequence at a time.
#include "../log_ratio.h"

namespace maxrl::cpu {
namespace {

constexpr int64_t kManyTokens = 1 << 15;  // for several threads

template <typename Real>
void log_ratio_reward(const LogRatio<Real>& ratio, int num_threads) {
  const Sequences& in = ratio.sequences;
  const Real *const logprobs = ratio.logprobs, *const ref_logprobs = ratio.ref_logprobs;
  const bool* const mask = in.mask;
#pragma omp parallel for num_threads(num_threads) \
    schedule(dynamic, 16) if (in.num_tokens >= kManyTokens)
  for (int64_t s = 0; s < in.num_sequences; ++s) {
    double sum = 0.0;
    const int64_t begin = in.cu_seqlens[s], end = in.cu_seqlens[s + 1];
#pragma omp simd reduction(+ : sum)
    for (int64_t t = begin; t < end; ++t)
      sum += mask && !mask[t] ? 0.0 : static_cast<double>(logprobs[t]) - ref_logprobs[t];
    ratio.proxies[s] = static_cast<Real>(in.beta * sum);
  }
}

template <typename Real>
void log_ratio_reward_backward(const LogRatioBackward<Real>& ratio, int num_threads) {
  const Sequences& in = ratio.sequences;
#pragma omp parallel for num_threads(num_threads) \
    schedule(dynamic, 16) if (in.num_tokens >= kManyTokens)
  for (int64_t s = 0; s < in.num_sequences; ++s) {
    const auto grad = static_cast<Real>(in.beta * ratio.grad_proxies[s]);
    for (int64_t t = in.cu_seqlens[s]; t < in.cu_seqlens[s + 1]; ++t)
      ratio.gradient[t] = !in.mask || in.mask[t] ? grad : Real(0);
  }
}

const bool defined =
    define_kernel("log_ratio_reward", log_ratio_reward<float>, log_ratio_reward<double>) &&
    define_kernel("log_ratio_reward_backward", log_ratio_reward_backward<float>,
                  log_ratio_reward_backward<double>);

}  // namespace
}  // namespace maxrl::cpu
