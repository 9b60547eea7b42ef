// Attention of responses that share a prompt: the record of its kernel.
#pragma once
#include <cstdint>

#include "kernel.h"

namespace maxrl {

// A packed stream of `num_sequences` sequences, each causal on itself, and then of `num_responses`
// responses. A token of a response attends to all of the sequence that it answers and, causally, to
// its own response.
struct SharedPromptStream {
  int64_t num_tokens, num_sequences, num_responses;
  const int64_t *lengths, *response_lengths;
  const int64_t* answers;  // [num_responses], ascending: the sequence that each response answers

  MAXRL_FIELDS(num_tokens, num_sequences, num_responses, lengths, response_lengths, answers)
};

// Real: float, or double for double elements. Query head h attends to key head h / (heads /
// key_heads). The backward kernel computes all gradients from o and lse.
template <typename Element, typename Real>
struct SharedPromptAttention {
  SharedPromptStream stream;
  int64_t heads, key_heads, head_dim;  // head_dim: 1 to 256
  const Element *q, *k,
      *v;  // [num_tokens, heads, head_dim], and for k and v [num_tokens, key_heads, head_dim]
  Element* o;  // [num_tokens, heads, head_dim]
  Real* lse;  // [num_tokens, heads]: log2 of the sum of exp(score)
  const Element* grad;  // dL/do; the rest is null in a forward pass
  Element *grad_q, *grad_k, *grad_v;

  MAXRL_FIELDS(stream, heads, key_heads, head_dim, q, k, v, o, lse, grad, grad_q, grad_k, grad_v)
};

}  // namespace maxrl
