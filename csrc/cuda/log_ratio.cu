// Log-ratio reward proxies on a GPU, a warp for each sequence.
#include <algorithm>

#include "../log_ratio.h"
#include "launch.h"
#include "reduce.cuh"

namespace maxrl::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// use(sequence, its first token, the token after its last) with a warp for each sequence.
template <typename Use>
__device__ void for_sequences(const Sequences& in, const Use& use) {
  for (int64_t s = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; s < in.num_sequences;
       s += int64_t{gridDim.x} * kWarps)
    use(s, in.cu_seqlens[s], in.cu_seqlens[s + 1]);
}

template <typename Real>
__global__ void __launch_bounds__(kThreads)
    sum_log_ratios(const __grid_constant__ LogRatio<Real> ratio) {
  const Sequences& in = ratio.sequences;
  const int lane = threadIdx.x % kWarp;
  for_sequences(in, [&](int64_t s, int64_t begin, int64_t end) {
    double sum = 0.0;
#pragma unroll 4  // loads of a long response in flight at a time
    for (int64_t t = begin + lane; t < end; t += kWarp)
      if (!in.mask || in.mask[t])
        sum += static_cast<double>(ratio.logprobs[t]) - static_cast<double>(ratio.ref_logprobs[t]);
    sum = warp_sum(sum);
    if (lane == 0) ratio.proxies[s] = static_cast<Real>(in.beta * sum);
  });
}

template <typename Real>
__global__ void __launch_bounds__(kThreads)
    spread_grads(const __grid_constant__ LogRatioBackward<Real> ratio) {
  const Sequences& in = ratio.sequences;
  for_sequences(in, [&](int64_t s, int64_t begin, int64_t end) {
    const auto grad = static_cast<Real>(in.beta * ratio.grad_proxies[s]);
    for (int64_t t = begin + threadIdx.x % kWarp; t < end; t += kWarp)
      ratio.gradient[t] = !in.mask || in.mask[t] ? grad : Real(0);
  });
}

// A grid has at most 2^31 - 1 blocks; warps take further sequences in turn.
int64_t blocks_for(int64_t sequences) {
  return std::clamp<int64_t>((sequences + kWarps - 1) / kWarps, 1, 1 << 16);
}

}  // namespace

template <typename Real>
void log_ratio_reward(const LogRatio<Real>& in, cudaStream_t stream) {
  const int64_t count = in.sequences.num_sequences;
  if (count > 0) launch(sum_log_ratios<Real>, blocks_for(count), kThreads, 0, 0, stream, in);
}

template <typename Real>
void log_ratio_reward_backward(const LogRatioBackward<Real>& in, cudaStream_t stream) {
  const int64_t count = in.sequences.num_sequences;
  if (count > 0) launch(spread_grads<Real>, blocks_for(count), kThreads, 0, 0, stream, in);
}

const bool defined =
    define_kernel("log_ratio_reward", log_ratio_reward<float>, log_ratio_reward<double>) &&
    define_kernel("log_ratio_reward_backward", log_ratio_reward_backward<float>,
                  log_ratio_reward_backward<double>);

}  // namespace maxrl::cuda
