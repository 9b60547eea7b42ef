// The loss of PACS (one warp per group) and log-ratio reward proxies (one block per sequence) on a GPU.
#include <algorithm>

#include "../kernels.h"
#include "launch.h"
#include "reduce.cuh"

namespace maxrl::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kGroups = kThreads / kWarp;  // per block, at a time

template <typename Real>
__global__ void __launch_bounds__(kThreads) pacs_groups(Pacs<Real> in, double* workspace) {
  __shared__ double of_warps[kGroups][PacsSums::kSize];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const double divisor = in.divisor();
  double sums[PacsSums::kSize] = {};
  for (int64_t g = int64_t{blockIdx.x} * kGroups + warp; g < in.num_groups; g += int64_t{gridDim.x} * kGroups) {
    const int64_t begin = in.begin(g), end = in.begin(g + 1), n = end - begin;
    if (n <= 0) continue;
    // Distances from the first proxy, so that equal proxies have exactly the distance 0 from their mean; likewise for q.
    const double first = in.proxies[begin];
    double distance = 0.0, correct = 0.0, squares = 0.0;
    for (int64_t i = begin + lane; i < end; i += kWarp) {
      distance += in.proxies[i] - first;
      correct += in.labels[i] == Real(0) ? 0.0 : in.labels[i] == Real(1) ? 1.0 : NAN;
    }
    correct = warp_sum(correct);
    const double mean = first + warp_sum(distance) / n;
    for (int64_t i = begin + lane; i < end; i += kWarp) squares += (in.proxies[i] - mean) * (in.proxies[i] - mean);
    const GroupScore score = group_score(in.options.score, n, mean, warp_sum(squares));
    const auto num_correct = static_cast<int64_t>(correct == correct ? correct : 0.0);
    const double poison = correct * 0.0;  // NaN where a label is neither 0 nor 1
    const auto grad_at = [&](int64_t i) {
      const double psi = (in.proxies[i] - score.centre) * score.multiplier, label = in.labels[i];
      return class_weight(in.options.balanced, n, num_correct, label == 1.0) * cross_entropy_grad(psi, label) / divisor +
             poison;
    };
    const double first_q = grad_at(begin);
    double mean_q = 0.0, moment_q = 0.0;
    for (int64_t i = begin + lane; i < end; i += kWarp) {
      const double r = in.proxies[i], label = in.labels[i], psi = (r - score.centre) * score.multiplier;
      const double entropy = cross_entropy(psi, label) + poison;
      const double loss = class_weight(in.options.balanced, n, num_correct, label == 1.0) * entropy;
      const double q = grad_at(i);
      in.cross_entropy[i] = static_cast<Real>(entropy);
      mean_q += q - first_q;
      moment_q += q * (r - score.centre);
      sums[PacsSums::kLoss] += loss / divisor;
      sums[PacsSums::kAccurate] += (psi > 0.0) == (label == 1.0);
      sums[PacsSums::kProxy] += r;
      sums[PacsSums::kScoreCorrect] += label == 1.0 ? psi : 0.0;  // no computed index: it would move sums out of registers
      sums[PacsSums::kScoreWrong] += label == 1.0 ? 0.0 : psi;
      sums[PacsSums::kCorrect] += label == 1.0;
    }
    mean_q = first_q + warp_sum(mean_q) / n;
    moment_q = warp_sum(moment_q);
    for (int64_t i = begin + lane; i < end; i += kWarp)
      in.gradient[i] = static_cast<Real>(proxy_grad(in.options.score, score, n, in.proxies[i], grad_at(i), mean_q, moment_q));
  }
  for (int i = 0; i < PacsSums::kSize; ++i) {
    sums[i] = warp_sum(sums[i]);
    if (lane == 0) of_warps[warp][i] = sums[i];
  }
  __syncthreads();
  const auto sum_of = [&](int i) {
    double sum = 0.0;
    for (int w = 0; w < kGroups; ++w) sum += of_warps[w][i];
    return sum;
  };
  const bool is_last = add_over_blocks<PacsSums::kSize>(sum_of, workspace, blockIdx.x, gridDim.x);
  if (is_last && threadIdx.x == 0) write_results(in, workspace);
}

template <typename Real>
__global__ void __launch_bounds__(kThreads)
    sum_log_ratios(LogRatio<Real> in, const Real* logprobs, const Real* ref_logprobs, Real* proxies) {
  __shared__ double of_warps[kThreads / kWarp];
  for (int64_t s = blockIdx.x; s < in.num_sequences; s += gridDim.x) {
    double sum = 0.0;
    for (int64_t t = in.cu_seqlens[s] + threadIdx.x; t < in.cu_seqlens[s + 1]; t += kThreads)
      if (!in.mask || in.mask[t]) sum += static_cast<double>(logprobs[t]) - static_cast<double>(ref_logprobs[t]);
    sum = warp_sum(sum);
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int w = 1; w < kThreads / kWarp; ++w) sum += of_warps[w];
      proxies[s] = static_cast<Real>(in.beta * sum);
    }
    __syncthreads();  // of_warps is read
  }
}

template <typename Real>
__global__ void __launch_bounds__(kThreads) spread_grads(LogRatio<Real> in, const Real* grad_proxies, Real* gradient) {
  for (int64_t s = blockIdx.x; s < in.num_sequences; s += gridDim.x) {
    const auto grad = static_cast<Real>(in.beta * grad_proxies[s]);
    for (int64_t t = in.cu_seqlens[s] + threadIdx.x; t < in.cu_seqlens[s + 1]; t += kThreads)
      gradient[t] = !in.mask || in.mask[t] ? grad : Real(0);
  }
}

constexpr int64_t kMostBlocks = 1 << 16;

}  // namespace

template <typename Real>
void pacs_loss(const Pacs<Real>& in, double* workspace, cudaStream_t stream) {
  const int64_t blocks = std::clamp<int64_t>((in.num_groups + kGroups - 1) / kGroups, 1, kMaxSummingBlocks);
  launch(pacs_groups<Real>, blocks, kThreads, 0, 0, stream, in, workspace);
}

template <typename Real>
void log_ratio_reward(const LogRatio<Real>& in, const Real* logprobs, const Real* ref_logprobs, Real* proxies,
                      cudaStream_t stream) {
  if (in.num_sequences == 0) return;
  launch(sum_log_ratios<Real>, std::min(in.num_sequences, kMostBlocks), kThreads, 0, 0, stream, in, logprobs, ref_logprobs,
         proxies);
}

template <typename Real>
void log_ratio_reward_backward(const LogRatio<Real>& in, const Real* grad_proxies, Real* gradient, cudaStream_t stream) {
  if (in.num_sequences == 0) return;
  launch(spread_grads<Real>, std::min(in.num_sequences, kMostBlocks), kThreads, 0, 0, stream, in, grad_proxies, gradient);
}

#define MAXRL_INSTANTIATE(Real)                                                                         \
  template void pacs_loss(const Pacs<Real>&, double*, cudaStream_t);                                    \
  template void log_ratio_reward(const LogRatio<Real>&, const Real*, const Real*, Real*, cudaStream_t); \
  template void log_ratio_reward_backward(const LogRatio<Real>&, const Real*, Real*, cudaStream_t);
MAXRL_INSTANTIATE(float)
MAXRL_INSTANTIATE(double)
#undef MAXRL_INSTANTIATE

int64_t loss_workspace() { return workspace_size(LossSums::kSize); }
int64_t pacs_workspace() { return workspace_size(PacsSums::kSize); }

}  // namespace maxrl::cuda
