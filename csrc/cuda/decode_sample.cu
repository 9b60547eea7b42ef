// Samples the next token of every row from its logits, by inverting the CDF in the order of the vocabulary, and appends it to
// the row, in one launch. One block computes one row, and the result depends only on that row.
#include "../kernels.h"
#include "../random.h"
#include "elements.cuh"
#include "launch.h"
#include "reduce.cuh"

namespace maxrl::cuda {
namespace {

constexpr int kMaxWarps = 8;
constexpr int kNone = INT32_MAX;

__global__ void __launch_bounds__(kMaxWarps* kWarp) sample_rows(const __grid_constant__ DecodeSample in) {
  __shared__ float of_warps[kMaxWarps];
  __shared__ int of_warps_index[kMaxWarps];
  const int64_t row = blockIdx.x;
  if (in.done[row]) return;
  const float* logits = in.logits + row * in.vocab_size;
  const int thread = threadIdx.x, size = static_cast<int>(in.vocab_size), num_threads = blockDim.x;
  const auto least = [](int a, int b) { return a < b ? a : b; };

  float top = -INFINITY;
  for (int i = thread; i < size; i += num_threads) top = logits[i] > top ? logits[i] : top;
  top = block_reduce(top, of_warps, [](float a, float b) { return a > b ? a : b; });

  // A NaN makes the sum NaN, and with it the log-prob.
  const bool is_greedy = in.temperature == 0.0;
  const float rate = is_greedy ? kLog2E : static_cast<float>(kLog2E / in.temperature);
  float total = 0.0f;
  int likeliest = kNone, last = -1;  // last: of a weight above 0
  for (int i = thread; i < size; i += num_threads) {
    const float e = exponential2((logits[i] - top) * rate);
    total += e;
    if (logits[i] == top) likeliest = least(likeliest, i);
    if (e > 0.0f) last = i;
  }
  total = block_reduce(total, of_warps, Add());

  int token = kNone;
  if (is_greedy) {
    token = block_reduce(likeliest, of_warps_index, least);
  } else {
    const float wanted = uniform(in.keys[row], in.length[row]) * total;
    float below = 0.0f;
    for (int start = 0; start < size; start += num_threads) {  // the same number of iterations for all threads
      const int i = start + thread;
      const float e = i < size ? exponential2((logits[i] - top) * rate) : 0.0f;
      const PrefixSum<float> sums = block_prefix_sum(e, of_warps);
      const float up_to = below + sums.with_own;
      token = block_reduce(i < size && up_to > wanted ? i : kNone, of_warps_index, least);
      below += sums.total;
      if (token != kNone) break;
    }
  }
  if (token == kNone && !is_greedy)  // by rounding, the sum in the vocabulary's order can stay below u total
    token = block_reduce(last, of_warps_index, [](int a, int b) { return a > b ? a : b; });
  if (token < 0 || token >= size) token = size - 1;  // NaN
  if (thread != 0) return;

  const int64_t at = min(in.length[row], in.limit - 1), place = row * in.limit + at;
  const float scale = is_greedy ? 1.0f : static_cast<float>(1.0 / in.temperature);
  const float logprob = (logits[token] - top) * scale - logf(total);
  in.tokens[place] = token;
  in.logprobs[place] = is_greedy && logprob - logprob == 0.0f ? 0.0f : logprob;
  in.last[row] = token;
  in.length[row] = at + 1;
  in.done[row] = in.stops[token] || at + 1 == in.limit;
}

}  // namespace

void decode_sample(const DecodeSample& in, cudaStream_t stream) {
  if (in.num_rows == 0) return;
  int warps = 1;
  while (warps < kMaxWarps && warps * kWarp < in.vocab_size) warps *= 2;
  launch(sample_rows, in.num_rows, warps * kWarp, 0, 0, stream, in);
}

}  // namespace maxrl::cuda
