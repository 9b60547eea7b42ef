// Samples the next token of every row from its logits, by inverting the CDF in the order of the
// vocabulary, and appends it to the row, in one launch. One block computes one row, and the result
// depends only on that row.
#include "../decoding.h"
#include "../random.h"
#include "elements.cuh"
#include "launch.h"
#include "reduce.cuh"

namespace maxrl::cuda {
namespace {

constexpr int kMaxWarps = 16;
constexpr int kNone = INT32_MAX;

// The logits of one row. A thread reads 16 bytes at a time; a row that does not start at a multiple
// of 16 bytes, one by one.
template <typename Element>
struct Logits {
  static constexpr int kSize = Chunk<Element>::kSize;
  const Element* data;
  const int size;
  const bool aligned;

  __device__ Logits(const Element* data, int size)
      : data(data), size(size), aligned(reinterpret_cast<uintptr_t>(data) % kAccess == 0) {}

  // Reads `values[i]` of tokens `first` + i; past the end they are -inf.
  __device__ void read(int first, float (&values)[kSize]) const {
    if (aligned && first + kSize <= size) {
      unpack(Chunk<Element>(data + first), values);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i)
        values[i] = first + i < size ? to_real(data[first + i]) : -INFINITY;
    }
  }
};

// The softmax of a row without its division: token i has the weight 2^((logits[i] - top) rate).
struct Softmax {
  float top, rate, total;
  int likeliest,
      last;  // the first token of logit `top`; the last one of a weight above 0, of this thread

  __device__ float weight(float logit) const { return exponential2((logit - top) * rate); }
};

// Every thread returns the same token, or kNone: by rounding, the sum in the vocabulary's order can
// stay below u total.
template <typename Element>
__device__ int invert_cdf(const Logits<Element>& logits, const Softmax& softmax, float wanted,
                          float* of_warps, int* indices) {
  constexpr int kSize = Chunk<Element>::kSize;
  const int thread = threadIdx.x, stride = blockDim.x * kSize;
  float below = 0.0f;
  for (int start = 0; start < logits.size;
       start += stride) {  // the same number of iterations for all threads
    const int first = start + thread * kSize;
    float weights[kSize], own = 0.0f;
    logits.read(first, weights);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      weights[i] = first + i < logits.size ? softmax.weight(weights[i]) : 0.0f;
      own += weights[i];
    }
    const PrefixSum<float> sums = block_prefix_sum(own, of_warps);
    if (below + sums.total > wanted) {
      int token = kNone;
      if (below + sums.with_own > wanted) {
        float before = below + sums.before;
#pragma unroll
        for (int i = 0; i < kSize; ++i) {  // the last token that starts at or below `wanted`; by
                                           // rounding, the thread's first
          if (weights[i] > 0.0f && (token == kNone || before <= wanted)) token = first + i;
          before += weights[i];
        }
      }
      token = block_reduce(token, indices, Least());
      if (token != kNone) return token;
    }
    below += sums.total;
  }
  return kNone;
}

template <typename Element>
__global__ void __launch_bounds__(kMaxWarps* kWarp)
    sample_rows(const __grid_constant__ DecodeSample<Element> in) {
  constexpr int kSize = Chunk<Element>::kSize;
  __shared__ float of_warps[kMaxWarps];
  __shared__ int indices[kMaxWarps];
  const int64_t row = in.rows ? in.rows[blockIdx.x] : blockIdx.x;
  if (in.done[row]) return;
  const int size = static_cast<int>(in.vocab_size), begin = threadIdx.x * kSize,
            stride = blockDim.x * kSize;
  const Logits<Element> logits(in.logits + blockIdx.x / in.samples_per_logits * in.vocab_size,
                               size);
  const bool is_greedy = in.temperature == 0.0;
  float values[kSize];

  Softmax softmax{-INFINITY, static_cast<float>(is_greedy ? kLog2E : kLog2E / in.temperature), 0.0f,
                  kNone, -1};
  for (int first = begin; first < size; first += stride) {
    logits.read(first, values);
#pragma unroll
    for (int i = 0; i < kSize; ++i) softmax.top = values[i] > softmax.top ? values[i] : softmax.top;
  }
  softmax.top = block_reduce(softmax.top, of_warps, Greatest());

  // A NaN makes the sum NaN, and with it the log-prob.
  for (int first = begin; first < size; first += stride) {
    logits.read(first, values);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (first + i >= size) continue;
      const float weight = softmax.weight(values[i]);
      softmax.total += weight;
      if (values[i] == softmax.top && softmax.likeliest == kNone) softmax.likeliest = first + i;
      if (weight > 0.0f) softmax.last = first + i;
    }
  }
  softmax.total = block_reduce(softmax.total, of_warps, Add());

  int token;
  if (is_greedy) {
    token = block_reduce(softmax.likeliest, indices, Least());
  } else {
    token = invert_cdf(logits, softmax, uniform(in.keys[row], in.length[row]) * softmax.total,
                       of_warps, indices);
    if (token == kNone) token = block_reduce(softmax.last, indices, Greatest());
  }
  if (token < 0 || token >= size) token = size - 1;  // NaN
  if (threadIdx.x != 0) return;

  const int64_t at = min(in.length[row], in.limit - 1), place = row * in.limit + at;
  const float scale = is_greedy ? 1.0f : static_cast<float>(1.0 / in.temperature);
  const float logprob = (to_real(logits.data[token]) - softmax.top) * scale - logf(softmax.total);
  in.tokens[place] = token;
  in.logprobs[place] = is_greedy && logprob - logprob == 0.0f ? 0.0f : logprob;
  in.last[row] = token;
  in.length[row] = at + 1;
  in.done[row] = in.stops[token] || at + 1 == in.limit;
}

}  // namespace

template <typename Element>
void decode_sample(const DecodeSample<Element>& in, cudaStream_t stream) {
  if (in.num_rows == 0) return;
  int warps = 1;
  while (warps < kMaxWarps && warps * kWarp * Chunk<Element>::kSize < in.vocab_size) warps *= 2;
  launch(sample_rows<Element>, in.num_rows, warps * kWarp, 0, 0, stream, in);
}

const bool defined = define_kernel("decode_sample", decode_sample<float>, decode_sample<BFloat16>,
                                   decode_sample<Float16>);

}  // namespace maxrl::cuda
