// A step of decoding on a GPU: attention of one new token a row, and the sampling of the next.
#pragma once
#include <cstdint>

namespace maxrl {

// Rows A, query heads Hq, key/value heads Hkv, head size D; all contiguous, at 16-byte boundaries, but prompt_lse.
template <typename Element>
struct DecodeAttention {
  int64_t num_rows, limit;  // A; positions of the caches
  int heads, kv_heads, head_dim;
  const Element *q, *k, *v;                // [A, Hq, D], [A, Hkv, D] of the newest tokens
  Element *k_cache, *v_cache;              // [A, limit, Hkv, D]; the newest token's are written at lengths - 1
  const int64_t* lengths;                  // [A] tokens of each row with the newest, 1 to limit
  const Element* prompt_out;               // [A, Hq, D] attention to the prompt alone,
  const float* prompt_lse;                 // and its log-sum-exp, [A, Hq] by these strides
  int64_t lse_row_stride, lse_head_stride;
  Element* out;                            // [A, Hq, D]
};

// Rows A, vocabulary V, at most `limit` tokens a row. A row that is done is left as it is.
struct DecodeSample {
  int64_t num_rows, vocab_size, limit;
  const float* logits;    // [A, V]
  double temperature;     // 0: the likeliest token
  const int64_t* keys;    // [A] of random.h
  const bool* stops;      // [V] tokens that end a row
  int64_t *last, *length; // [A] newest token, tokens so far: this one becomes number `length`, from 0
  bool* done;             // [A]
  int64_t* tokens;        // [A, limit]
  float* logprobs;        // [A, limit] under what was sampled from, 0 at temperature 0
};

}  // namespace maxrl
