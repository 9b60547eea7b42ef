// Attention of responses that share a prompt: the record of its kernel.
#pragma once
#include <cstdint>

namespace maxrl {

// A packed stream of `num_sequences` sequences, each causal on itself, and then of `num_responses` responses. A token of a
// response attends to all of the sequence that it answers and, causally, to its own response.
struct SharedPromptStream {
  int64_t num_tokens, num_sequences, num_responses;
  const int64_t *lengths, *response_lengths;
  const int64_t* answers;  // [num_responses], ascending: the sequence that each response answers

  template <typename Visit>
  void fields(Visit& at) {
    at("num_tokens", num_tokens), at("num_sequences", num_sequences), at("num_responses", num_responses);
    at("lengths", lengths), at("response_lengths", response_lengths), at("answers", answers);
  }
};

// Real: float, or double for double elements. Query head h attends to key head h / (heads / key_heads).
template <typename Element, typename Real>
struct SharedPromptAttention {
  SharedPromptStream stream;
  int64_t heads, key_heads, head_dim;  // head_dim: 1 to 256
  const Element *q, *k, *v;            // [num_tokens, heads, head_dim], and for k and v [num_tokens, key_heads, head_dim]
  Element* o;                          // [num_tokens, heads, head_dim]
  Real* lse;                           // [num_tokens, heads]: log2 of the sum of exp(score)
  const Element* grad;                 // dL/do; the rest is null in a forward pass
  Element *grad_q, *grad_k, *grad_v;

  template <typename Visit>
  void fields(Visit& at) {
    stream.fields(at);
    at("heads", heads), at("key_heads", key_heads), at("head_dim", head_dim), at("q", q), at("k", k), at("v", v);
    at("o", o), at("lse", lse);
  }
};

template <typename Element, typename Real>
struct SharedPromptAttentionBackward : SharedPromptAttention<Element, Real> {
  template <typename Visit>
  void fields(Visit& at) {
    SharedPromptAttention<Element, Real>::fields(at);
    at("grad", this->grad), at("grad_q", this->grad_q), at("grad_k", this->grad_k), at("grad_v", this->grad_v);
  }
};

}  // namespace maxrl
