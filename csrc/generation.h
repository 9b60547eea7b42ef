// Inputs and outputs of sampling on a CPU: model sizes and weights, sampling options, prompts, responses.
#pragma once
#include <cstdint>
#include <vector>

namespace maxrl {

// Of the matrix multiplications: float32, or bfloat16 with float32 sums by these instructions.
enum class Arithmetic { kFloat32, kPlainBFloat16, kAvx512BFloat16, kAmx };
constexpr const char* kArithmeticNames[] = {"float32", "bfloat16, plain C++", "bfloat16, AVX512-BF16", "bfloat16, AMX"};

struct DecoderSizes {
  int64_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab;
  double norm_eps;
  Arithmetic arithmetic;

  template <typename Visit>
  void fields(Visit& at) {
    at("layers", layers), at("hidden", hidden), at("intermediate", intermediate), at("heads", heads);
    at("kv_heads", kv_heads), at("head_dim", head_dim), at("vocab", vocab), at("norm_eps", norm_eps);
    at("arithmetic", arithmetic, kArithmeticNames);
  }
};

// Matrices [out, in], row-major. Biases, and the norms of queries and keys, are null if the model has none.
struct LayerWeights {
  const float *input_norm, *q, *k, *v, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *o, *post_norm, *gate, *up, *down;

  template <typename Visit>
  void fields(Visit& at) {
    at("input_norm", input_norm), at("q", q), at("k", k), at("v", v), at("q_bias", q_bias), at("k_bias", k_bias);
    at("v_bias", v_bias), at("q_norm", q_norm), at("k_norm", k_norm), at("o", o), at("post_norm", post_norm);
    at("gate", gate), at("up", up), at("down", down);
  }
};
struct DecoderWeights {
  const float *embedding, *norm, *head;
  std::vector<LayerWeights> layers;

  template <typename Visit>
  void fields(Visit& at) {
    at("embedding", embedding), at("norm", norm), at("head", head), at("layers", layers);
  }
};

// Applied in this order: the temperature (0: greedy decoding), top-k (0: all tokens), nucleus (top-p) sampling over the
// remaining tokens, and min-p relative to the most probable token.
struct SamplingOptions {
  double temperature;
  int64_t top_k;
  double top_p, min_p;
  std::vector<int64_t> stop_ids;

  template <typename Visit>
  void fields(Visit& at) {
    at("temperature", temperature), at("top_k", top_k), at("top_p", top_p), at("min_p", min_p), at("stop_ids", stop_ids);
  }
};

// `num_samples` responses to each of `num_prompts` prompts; sample s answers prompt s / num_samples.
struct GenerationJob {
  int64_t num_prompts, num_samples, max_new_tokens;
  int64_t num_slots;  // maximum number of responses decoded at a time
  const int64_t *tokens, *cu_seqlens;  // packed prompts, none empty
  const int64_t* keys;                 // [S], select the random numbers
  SamplingOptions sampling;
  int64_t* responses;                         // [S, max_new_tokens]
  float* logprobs;                            // [S, max_new_tokens] as Sampled::logprob
  int64_t* lengths;                           // [S]
  bool* truncated;                            // [S]

  template <typename Visit>
  void fields(Visit& at) {
    at("num_prompts", num_prompts), at("num_samples", num_samples), at("max_new_tokens", max_new_tokens);
    at("num_slots", num_slots), at("tokens", tokens), at("cu_seqlens", cu_seqlens), at("keys", keys);
    sampling.fields(at);
    at("responses", responses), at("logprobs", logprobs), at("lengths", lengths), at("truncated", truncated);
  }
};

struct GenerationStatistics {
  double prefill_seconds, decode_seconds;
  int64_t steps, decoded_tokens;  // without the first tokens, which are sampled after the prefill
  int64_t prompt_tokens;
  int64_t peak_cache_bytes;
};

}  // namespace maxrl
