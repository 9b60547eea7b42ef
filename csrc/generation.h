// What sampling responses needs besides the weights: sizes, options, and where prompts come from and responses go.
#pragma once
#include <cstdint>
#include <vector>

namespace maxrl {

struct DecoderSizes {
  int64_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab;
  double norm_eps;
};

// Matrices [out, in] row by row. Biases, and the norms of queries and keys, are null where the model has none.
struct LayerWeights {
  const float *input_norm, *q, *k, *v, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *o, *post_norm, *gate, *up, *down;
};
struct DecoderWeights {
  const float *embedding, *norm, *head;
  std::vector<LayerWeights> layers;
};

// Applied in this order: the temperature (0: the likeliest token), the top_k likeliest (0: all), the fewest likeliest that have
// at least top_p of what is left, and those with at least min_p of the likeliest's probability.
struct SamplingOptions {
  double temperature;
  int64_t top_k;
  double top_p, min_p;
  std::vector<int64_t> stop_ids;
};

// `num_samples` responses to each of `num_prompts` prompts; sample s answers prompt s / num_samples.
struct GenerationJob {
  int64_t num_prompts, num_samples, max_new_tokens;
  int64_t num_slots;  // responses at work side by side, at most
  const int64_t *tokens, *cu_seqlens;  // packed prompts, none of them empty
  const int64_t* keys;                 // [S], of the random numbers
  SamplingOptions sampling;
  int64_t* responses;                         // [S, max_new_tokens]
  float* logprobs;                            // [S, max_new_tokens] under the distribution sampled from
  int64_t* lengths;                           // [S]
  bool* truncated;                            // [S]
};

struct GenerationStatistics {
  double prefill_seconds, decode_seconds;
  int64_t steps, decoded_tokens;  // of decoding; first tokens come with the prefill
  int64_t prompt_tokens;
  int64_t most_cache_bytes;
};

}  // namespace maxrl
