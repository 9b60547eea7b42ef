// Log-ratio reward proxies on a CPU, one sequence at a time.
#include "../log_ratio.h"

namespace maxrl::cpu {
namespace {

constexpr int64_t kManyTokens = 1 << 15;  // for several threads

template <typename Real>
void log_ratio_reward(const LogRatio<Real>& in, int num_threads) {
  const Real *const logprobs = in.logprobs, *const ref_logprobs = in.ref_logprobs;
  const bool* const mask = in.mask;
#pragma omp parallel for num_threads(num_threads) \
    schedule(dynamic, 16) if (in.cu_seqlens[in.num_sequences] >= kManyTokens)
  for (int64_t s = 0; s < in.num_sequences; ++s) {
    const int64_t begin = in.cu_seqlens[s], end = in.cu_seqlens[s + 1];
    if (in.grad_proxies) {
      const auto grad = static_cast<Real>(in.beta * in.grad_proxies[s]);
      for (int64_t t = begin; t < end; ++t) in.gradient[t] = !mask || mask[t] ? grad : Real(0);
      continue;
    }
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (int64_t t = begin; t < end; ++t)
      sum += mask && !mask[t] ? 0.0 : static_cast<double>(logprobs[t]) - ref_logprobs[t];
    in.proxies[s] = static_cast<Real>(in.beta * sum);
  }
}

const bool defined =
    define_kernel("log_ratio_reward", log_ratio_reward<float>, log_ratio_reward<double>);

}  // namespace
}  // namespace maxrl::cpu
