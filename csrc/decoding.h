// One decoding step on a GPU: attention of the newest token of each row, and sampling of the next
// token.
#pragma once
#include <cstdint>

#include "kernel.h"

namespace maxrl {

// A rows, Hq query heads, Hkv key/value heads, head size D. All arrays are 16-byte aligned, and
// contiguous except q, k, v and prompt_lse.
template <typename Element>
struct DecodeAttention {
  int64_t num_rows, limit;  // A; capacity of the caches in tokens
  int heads, kv_heads, head_dim;
  const Element *q, *k, *v;  // [A, Hq, D], [A, Hkv, D] of the newest token,
  int64_t q_stride, k_stride,
      v_stride;  // and the elements from one row to the next, a multiple of 16 bytes
  Element *k_cache, *v_cache;  // [A, limit, Hkv, D]; k and v are written at lengths - 1
  const int64_t* lengths;  // [A] number of tokens including the newest, 1 to limit
  const Element* prompt_out;  // [A, Hq, D] attention to the prompt only,
  const float* prompt_lse;  // and its log-sum-exp [A, Hq] with these strides
  int64_t lse_row_stride, lse_head_stride;
  int num_splits;  // parts of a row's tokens that different blocks attend to
  float* partial;  // [A, Hq, num_splits, D + 2], unused if num_splits is 1
  Element* out;  // [A, Hq, D]

  MAXRL_FIELDS(num_rows, limit, heads, kv_heads, head_dim, q, k, v, q_stride, k_stride, v_stride,
               k_cache, v_cache, lengths, prompt_out, prompt_lse, lse_row_stride, lse_head_stride,
               num_splits, partial, out)
};

// R of A rows, each once, vocabulary V, at most `limit` tokens per row. Rows that are done do not
// change.
struct DecodeSample {
  int64_t num_rows, vocab_size, limit;  // R
  const float* logits;  // [R / samples_per_logits, V]
  int64_t
      samples_per_logits;  // consecutive ones of the R rows that are sampled from the same logits
  const int64_t* rows;  // [R], null: 0 to R - 1
  double temperature;  // 0: greedy decoding
  const int64_t* keys;  // [A] select the random numbers (random.h)
  const bool* stops;  // [V] tokens that end a response
  int64_t *last,
      *length;  // [A] newest token, number of tokens: the next one is written at `length`
  bool* done;  // [A]
  int64_t* tokens;  // [A, limit]
  float* logprobs;  // [A, limit] under the distribution at the temperature, 0 at temperature 0

  MAXRL_FIELDS(num_rows, vocab_size, limit, logits, samples_per_logits, rows, temperature, keys,
               stops, last, length, done, tokens, logprobs)
};

}  // namespace maxrl
