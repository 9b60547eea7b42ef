// Inputs and outputs of sampling on a CPU: model sizes and weights, sampling options, prompts,
// responses.
#pragma once
#include <cstdint>
#include <vector>

#include "kernel.h"

namespace maxrl {

// Of the matrix multiplications: float32, or bfloat16 with float32 sums by these instructions.
enum class Arithmetic { kFloat32, kPlainBFloat16, kAvx512BFloat16, kAmx };
template <>
inline constexpr const char* kNamesOf<Arithmetic>[4] = {"float32", "bfloat16, plain C++",
                                                        "bfloat16, AVX512-BF16", "bfloat16, AMX"};

struct DecoderSizes {
  int64_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab;
  double norm_eps;
  Arithmetic arithmetic;

  MAXRL_FIELDS(layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, norm_eps, arithmetic)
};

struct DecoderOptions {
  DecoderSizes sizes;
  int64_t positions;
  const float *cos, *sin;  // [positions, head_dim / 2], the tables of the rotary embedding

  MAXRL_FIELDS(sizes, positions, cos, sin)
};

// Matrices [out, in], row-major. Biases, and the norms of queries and keys, are null if the model
// has none.
struct LayerWeights {
  const float *input_norm, *q, *k, *v, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *o, *post_norm,
      *gate, *up, *down;

  MAXRL_FIELDS(input_norm, q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm, o, post_norm, gate, up,
               down)
};
struct DecoderWeights {
  const float *embedding, *norm, *head;
  int num_threads;
  std::vector<LayerWeights> layers = {};  // packed one by one

  MAXRL_FIELDS(embedding, norm, head, num_threads)
};

// Applied in this order: the temperature (0: greedy decoding), top-k (0: all tokens), nucleus
// (top-p) sampling over the remaining tokens, and min-p relative to the most probable token.
struct SamplingOptions {
  double temperature;
  int64_t top_k;
  double top_p, min_p;
  std::vector<int64_t> stop_ids = {};  // not packed

  MAXRL_FIELDS(temperature, top_k, top_p, min_p)
};

// `num_samples` responses to each of `num_prompts` prompts; sample s answers prompt s /
// num_samples.
struct GenerationJob {
  int64_t num_prompts, num_samples, max_new_tokens;
  int64_t num_slots;  // maximum number of samples decoded at a time
  int64_t max_kept_bytes;  // of the caches of prompts that the decoder keeps afterwards
  int64_t max_turns;  // of an episode, with environments; 0: a stop token ends the response
  const int64_t *tokens, *cu_seqlens;  // packed prompts, none empty
  const int64_t* keys;  // [S], select the random numbers
  SamplingOptions sampling;
  int64_t* responses;  // [S, max_new_tokens]
  float* logprobs;  // [S, max_new_tokens] as Sampled::logprob
  int64_t* lengths;  // [S], also of episodes that wait
  bool* truncated;  // [S]
  int num_threads;

  MAXRL_FIELDS(num_prompts, num_samples, max_new_tokens, num_slots, max_kept_bytes, max_turns,
               tokens, cu_seqlens, keys, sampling, responses, logprobs, lengths, truncated,
               num_threads)
};

struct GenerationStatistics {
  double prefill_seconds, decode_seconds;
  int64_t steps;  // without the first tokens, which are sampled after the prefill
  int64_t decoded_rows;  // in all steps; samples of a prompt with the same tokens are one row
  int64_t peak_cache_bytes;

  MAXRL_FIELDS(prefill_seconds, decode_seconds, steps, decoded_rows, peak_cache_bytes)
};

}  // namespace maxrl
