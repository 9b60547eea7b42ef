// A decoding step on a GPU: attention of the newest token of each row, and sampling of the next token.
#pragma once
#include <cstdint>

namespace maxrl {

// A rows, Hq query heads, Hkv key/value heads, head size D. All arrays but prompt_lse are contiguous and 16-byte aligned.
template <typename Element>
struct DecodeAttention {
  int64_t num_rows, limit;  // A; positions in the caches
  int heads, kv_heads, head_dim;
  const Element *q, *k, *v;                // [A, Hq, D], [A, Hkv, D] of the newest token
  Element *k_cache, *v_cache;              // [A, limit, Hkv, D]; the newest key and value are written at lengths - 1
  const int64_t* lengths;                  // [A] tokens of each row including the newest, 1 to limit
  const Element* prompt_out;               // [A, Hq, D] attention to the prompt alone
  const float* prompt_lse;                 // [A, Hq] its log-sum-exp, with these strides
  int64_t lse_row_stride, lse_head_stride;
  Element* out;                            // [A, Hq, D]
};

// A rows, vocabulary V, at most `limit` tokens per row. Finished rows do not change.
struct DecodeSample {
  int64_t num_rows, vocab_size, limit;
  const float* logits;    // [A, V]
  double temperature;     // 0: greedy decoding
  const int64_t* keys;    // [A] keys of random.h
  const bool* stops;      // [V] tokens that end a row
  int64_t *last, *length; // [A] newest token; number of tokens so far, the position of the new one
  bool* done;             // [A]
  int64_t* tokens;        // [A, limit]
  float* logprobs;        // [A, limit] under the sampling distribution, 0 at temperature 0
  float* raw_logprobs;    // [A, limit] under softmax(logits)
};

}  // namespace maxrl
