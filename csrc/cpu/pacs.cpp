// The loss of PACS, one group at a time, and log-ratio reward proxies, one sequence at a time, on a
// CPU.
#include "../pacs.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace maxrl::cpu {
namespace {

constexpr int64_t kManyRollouts = 1 << 13, kManyTokens = 1 << 15;  // for several threads
constexpr int64_t kGroupsPerPiece = 64;  // whose sums are added in order, for any number of threads
constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

template <typename Real>
int64_t first_unusable(const Pacs<Real>& in, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i)
    if (in.labels[i] != Real(0) && in.labels[i] != Real(1)) return i;
  return kNone;
}

template <typename Real>
int64_t pacs_loss(const Pacs<Real>& in, int num_threads) {
  const int64_t pieces = (in.num_groups + kGroupsPerPiece - 1) / kGroupsPerPiece;
  std::vector<double> partial(pieces * PacsSums::kSize, 0.0);
  int64_t unusable = kNone;
#pragma omp parallel for num_threads(num_threads) if (in.begin(in.num_groups) >= kManyRollouts) \
    reduction(min : unusable)
  for (int64_t piece = 0; piece < pieces; ++piece)
    for (int64_t g = piece * kGroupsPerPiece;
         g < std::min((piece + 1) * kGroupsPerPiece, in.num_groups); ++g) {
      unusable = std::min(unusable, first_unusable(in, in.begin(g), in.begin(g + 1)));
      pacs_group(
          in, in.begin(g), in.begin(g + 1), 0, 1, [](double x) { return x; },
          &partial[piece * PacsSums::kSize]);
    }
  if (unusable != kNone) return unusable;
  double sums[PacsSums::kSize] = {};
  for (size_t i = 0; i < partial.size(); ++i) sums[i % PacsSums::kSize] += partial[i];
  write_results(in, sums);
  return -1;
}

template <typename Real>
void log_ratio_reward(const LogRatio<Real>& ratio, int num_threads) {
  const Sequences& in = ratio.sequences;
  const Real *const logprobs = ratio.logprobs, *const ref_logprobs = ratio.ref_logprobs;
#pragma omp parallel for num_threads(num_threads) \
    schedule(dynamic, 16) if (in.num_tokens >= kManyTokens)
  for (int64_t s = 0; s < in.num_sequences; ++s) {
    double sum = 0.0;
    const int64_t begin = in.cu_seqlens[s], end = in.cu_seqlens[s + 1];
    if (in.mask) {
#pragma omp simd reduction(+ : sum)
      for (int64_t t = begin; t < end; ++t)
        sum += in.mask[t] ? static_cast<double>(logprobs[t]) - static_cast<double>(ref_logprobs[t])
                          : 0.0;
    } else {
#pragma omp simd reduction(+ : sum)
      for (int64_t t = begin; t < end; ++t)
        sum += static_cast<double>(logprobs[t]) - static_cast<double>(ref_logprobs[t]);
    }
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

template <typename Real>
bool define() {
  return define_kernel("pacs_loss", pacs_loss<Real>) &&
         define_kernel("log_ratio_reward", log_ratio_reward<Real>) &&
         define_kernel("log_ratio_reward_backward", log_ratio_reward_backward<Real>);
}
const bool defined = define<float>() && define<double>();

}  // namespace
}  // namespace maxrl::cpu
