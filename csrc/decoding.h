// One decoding step on a GPU: attention of the newest token of each row, and sampling of the next token.
#pragma once
#include <cstdint>

namespace maxrl {

// A rows, Hq query heads, Hkv key/value heads, head size D. All arrays are 16-byte aligned, and contiguous except q, k, v and
// prompt_lse.
template <typename Element>
struct DecodeAttention {
  int64_t num_rows, limit;  // A; capacity of the caches in tokens
  int heads, kv_heads, head_dim;
  const Element *q, *k, *v;                // [A, Hq, D], [A, Hkv, D] of the newest token,
  int64_t q_stride, k_stride, v_stride;    // and the elements from one row to the next, a multiple of 16 bytes
  Element *k_cache, *v_cache;              // [A, limit, Hkv, D]; k and v are written at lengths - 1
  const int64_t* lengths;                  // [A] number of tokens including the newest, 1 to limit
  const Element* prompt_out;               // [A, Hq, D] attention to the prompt only,
  const float* prompt_lse;                 // and its log-sum-exp [A, Hq] with these strides
  int64_t lse_row_stride, lse_head_stride;
  int num_splits;                          // parts of a row's tokens that different blocks attend to
  float* partial;                          // [A, Hq, num_splits, D + 2], unused if num_splits is 1
  Element* out;                            // [A, Hq, D]

  template <typename Visit>
  void fields(Visit& at) {
    at("num_rows", num_rows), at("limit", limit), at("heads", heads), at("kv_heads", kv_heads), at("head_dim", head_dim);
    at("q", q), at("k", k), at("v", v), at("q_stride", q_stride), at("k_stride", k_stride), at("v_stride", v_stride);
    at("k_cache", k_cache), at("v_cache", v_cache), at("lengths", lengths), at("prompt_out", prompt_out);
    at("prompt_lse", prompt_lse), at("lse_row_stride", lse_row_stride), at("lse_head_stride", lse_head_stride);
    at("num_splits", num_splits), at("partial", partial), at("out", out);
  }
};

// R of A rows, each once, vocabulary V, at most `limit` tokens per row. Rows that are done do not change.
template <typename Element>
struct DecodeSample {
  int64_t num_rows, vocab_size, limit;  // R
  const Element* logits;       // [R / samples_per_logits, V]
  int64_t samples_per_logits;  // consecutive ones of the R rows that are sampled from the same logits
  const int64_t* rows;         // [R], null: 0 to R - 1
  double temperature;          // 0: greedy decoding
  const int64_t* keys;         // [A] select the random numbers (random.h)
  const bool* stops;           // [V] tokens that end a response
  int64_t *last, *length;      // [A] newest token, number of tokens: the next one is written at `length`
  bool* done;                  // [A]
  int64_t* tokens;             // [A, limit]
  float* logprobs;             // [A, limit] under the distribution at the temperature, 0 at temperature 0

  template <typename Visit>
  void fields(Visit& at) {
    at("num_rows", num_rows), at("vocab_size", vocab_size), at("limit", limit), at("logits", logits);
    at("samples_per_logits", samples_per_logits), at("rows", rows), at("temperature", temperature), at("keys", keys);
    at("stops", stops), at("last", last), at("length", length), at("done", done), at("tokens", tokens),
        at("logprobs", logprobs);
  }
};

}  // namespace maxrl
