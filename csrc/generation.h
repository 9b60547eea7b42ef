// The input and output of sampling responses: sizes, weights, options, prompts and responses.
#pragma once
#include <cstdint>
#include <vector>

namespace maxrl {

struct DecoderSizes {
  int64_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab;
  double norm_eps;
};

// Matrices are [out, in], row-major. Biases, and the norms of queries and keys, are null if the model has none.
struct LayerWeights {
  const float *input_norm, *q, *k, *v, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *o, *post_norm, *gate, *up, *down;
};
struct DecoderWeights {
  const float *embedding, *norm, *head;
  std::vector<LayerWeights> layers;
};

// Applied in this order: temperature (0: greedy decoding), top-k (0: all tokens), nucleus (top-p) sampling, and min-p: tokens
// with at least min_p times the greatest probability.
struct SamplingOptions {
  double temperature;
  int64_t top_k;
  double top_p, min_p;
  std::vector<int64_t> stop_ids;
};

// `num_samples` responses to each of `num_prompts` prompts; sample s answers prompt s / num_samples.
struct GenerationJob {
  int64_t num_prompts, num_samples, max_new_tokens;
  int64_t num_slots;  // most responses at a time
  const int64_t *tokens, *cu_seqlens;  // packed prompts, none empty
  const int64_t* keys;                 // [S] keys of random.h
  SamplingOptions sampling;
  int64_t* responses;                         // [S, max_new_tokens]
  float *logprobs, *raw_logprobs;        // [S, max_new_tokens], under the sampling distribution, and at temperature 1
  int64_t* lengths;                           // [S]
  bool* truncated;                            // [S]
};

struct GenerationStatistics {
  double prefill_seconds, decode_seconds;
  int64_t steps, decoded_tokens;  // of decoding; the prefill gives the first tokens
  int64_t prompt_tokens;
  int64_t most_cache_bytes;
};

}  // namespace maxrl
