// Log-ratio reward proxies on a GPU, a warp for each sequence.
#include <algorithm>

#include "../log_ratio.h"
#include "launch.h"
#include "reduce.cuh"

namespace maxrl::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

template <typename Real>
__global__ void __launch_bounds__(kThreads)
    log_ratio_reward_kernel(const __grid_constant__ LogRatio<Real> in) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t s = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; s < in.num_sequences;
       s += int64_t{gridDim.x} * kWarps) {
    const int64_t begin = in.cu_seqlens[s] + lane, end = in.cu_seqlens[s + 1];
    const auto counts = [&](int64_t t) { return !in.mask || in.mask[t]; };
    if (in.grad_proxies) {
      const auto grad = static_cast<Real>(in.beta * in.grad_proxies[s]);
      for (int64_t t = begin; t < end; t += kWarp) in.gradient[t] = counts(t) ? grad : Real(0);
      continue;
    }
    double sum = 0.0;
#pragma unroll 4  // loads of a long response in flight at a time
    for (int64_t t = begin; t < end; t += kWarp)
      if (counts(t))
        sum += static_cast<double>(in.logprobs[t]) - static_cast<double>(in.ref_logprobs[t]);
    sum = warp_sum(sum);
    if (lane == 0) in.proxies[s] = static_cast<Real>(in.beta * sum);
  }
}

}  // namespace

template <typename Real>
void log_ratio_reward(const LogRatio<Real>& in, cudaStream_t stream) {
  if (in.num_sequences == 0) return;
  // A grid has at most 2^31 - 1 blocks; warps take further sequences in turn.
  const int64_t blocks = std::min<int64_t>((in.num_sequences + kWarps - 1) / kWarps, 1 << 16);
  launch(log_ratio_reward_kernel<Real>, blocks, kThreads, 0, 0, stream, in);
}

const bool defined =
    define_kernel("log_ratio_reward", log_ratio_reward<float>, log_ratio_reward<double>);

}  // namespace maxrl::cuda
