// The loss of PACS, a warp for each group, and log-ratio reward proxies, a warp for each sequence,
// on a GPU.
#include <algorithm>

#include "../pacs.h"
#include "launch.h"
#include "reduce.cuh"

namespace maxrl::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

template <typename Real>
__global__ void __launch_bounds__(kThreads) pacs_groups(Pacs<Real> in) {
  __shared__ double of_warps[kWarps][PacsSums::kSize];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  double sums[PacsSums::kSize] = {};
  for (int64_t g = int64_t{blockIdx.x} * kWarps + warp; g < in.num_groups;
       g += int64_t{gridDim.x} * kWarps)
    pacs_group(
        in, in.begin(g), in.begin(g + 1), lane, kWarp, [](double x) { return warp_sum(x); }, sums);
  for (int i = 0; i < PacsSums::kSize; ++i) {
    sums[i] = warp_sum(sums[i]);
    if (lane == 0) of_warps[warp][i] = sums[i];
  }
  __syncthreads();
  const auto sum_of = [&](int i) {
    double sum = 0.0;
    for (int w = 0; w < kWarps; ++w) sum += of_warps[w][i];
    return sum;
  };
  const bool is_last =
      add_over_blocks<PacsSums::kSize>(sum_of, in.workspace, blockIdx.x, gridDim.x);
  if (is_last && threadIdx.x == 0) write_results(in, in.workspace);
}

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
int64_t blocks_for(int64_t warps, int64_t most) {
  return std::clamp<int64_t>((warps + kWarps - 1) / kWarps, 1, most);
}

constexpr int64_t kMostBlocks = 1 << 16;

}  // namespace

template <typename Real>
void pacs_loss(const Pacs<Real>& in, cudaStream_t stream) {
  launch(pacs_groups<Real>, blocks_for(in.num_groups, kMaxSummingBlocks), kThreads, 0, 0, stream,
         in);
}

template <typename Real>
void log_ratio_reward(const LogRatio<Real>& in, cudaStream_t stream) {
  if (in.sequences.num_sequences == 0) return;
  launch(sum_log_ratios<Real>, blocks_for(in.sequences.num_sequences, kMostBlocks), kThreads, 0, 0,
         stream, in);
}

template <typename Real>
void log_ratio_reward_backward(const LogRatioBackward<Real>& in, cudaStream_t stream) {
  if (in.sequences.num_sequences == 0) return;
  launch(spread_grads<Real>, blocks_for(in.sequences.num_sequences, kMostBlocks), kThreads, 0, 0,
         stream, in);
}

namespace {

template <typename Real>
bool define() {
  return define_kernel("pacs_loss", pacs_loss<Real>) &&
         define_kernel("log_ratio_reward", log_ratio_reward<Real>) &&
         define_kernel("log_ratio_reward_backward", log_ratio_reward_backward<Real>);
}
const bool defined = define<float>() && define<double>();

}  // namespace
}  // namespace maxrl::cuda
