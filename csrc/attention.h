// Attention over a forest of prefixes: the record of its kernel.
#pragma once
#include <cstdint>

#include "kernel.h"

namespace maxrl {

// Segments of tokens in depth-first order. A token attends to the earlier ones of its segment, to
// itself, and to all of the segments above.
struct Forest {
  int64_t num_tokens, num_segments;
  const int64_t* lengths;  // [num_segments], at least 1
  const int64_t* parents;  // [num_segments], the segment above, -1: none

  MAXRL_FIELDS(num_tokens, num_segments, lengths, parents)
};

// Real: float, or double for double elements. Query head h attends to key head h / (heads /
// key_heads). The backward kernel computes all gradients from o and lse.
template <typename Element, typename Real>
struct TreeAttention {
  Forest forest;
  int64_t heads, key_heads, head_dim;  // head_dim: 1 to 256
  const Element *q, *k,
      *v;  // [num_tokens, heads, head_dim], and for k and v [num_tokens, key_heads, head_dim]
  Element* o;  // [num_tokens, heads, head_dim]
  Real* lse;  // [num_tokens, heads]: log2 of the sum of exp(score)
  const Element* grad;  // dL/do; the rest is null in a forward pass
  Element *grad_q, *grad_k, *grad_v;

  MAXRL_FIELDS(forest, heads, key_heads, head_dim, q, k, v, o, lse, grad, grad_q, grad_k, grad_v)
};

}  // namespace maxrl
