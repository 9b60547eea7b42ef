// The parts of a decoder layer in training: residual addition with RMS norm, rotary embedding,
// SwiGLU, chosen rows, linear layers, attention over a forest of prefixes.
#pragma once
#include <cstdint>

#include "kernel.h"

namespace maxrl {

// Strides are in elements. On a GPU all addresses and strides are multiples of 16 bytes. U rows.

// Rows of `size` elements H: sum = x + delta, normed = sum / sqrt(mean(sum^2) + eps) * weight. All
// arrays are contiguous.
template <typename Element>
struct AddRmsNorm {
  int64_t num_rows;
  int size;
  RealOf<Element> eps;
  const Element *x, *delta;  // [U, H]; delta may be null: sum is x then, and not written
  const Element* weight;  // [H]
  Element *sum, *normed;  // [U, H]

  MAXRL_FIELDS(num_rows, size, eps, x, delta, weight, sum, normed)
};

template <typename Element>
struct AddRmsNormBackward {
  int64_t num_rows;
  int size;
  RealOf<Element> eps;
  const Element *sum, *weight;
  const Element *grad_sum, *grad_normed;  // [U, H]; grad_sum may be null
  Element* grad_x;  // [U, H], also the gradient in delta
  int64_t num_partials;  // P
  RealOf<Element>* grad_weight;  // [P, H]: partial p has the rows p, p + P, ...; one on a CPU

  MAXRL_FIELDS(num_rows, size, eps, sum, weight, grad_sum, grad_normed, grad_x, num_partials,
               grad_weight)
};

// Rows of heads of size D: [U, heads, D], with this stride between rows.
template <typename Element>
struct Heads {
  const Element* data;
  int64_t stride;
  int count;

  MAXRL_TUPLE(data, stride, count)
};

// Query and key heads with their RMS norm, if they have one, and the rotary embedding, which
// rotates dimension i with i + D/2; value heads are copied.
template <typename Element>
struct RotateHeads {
  int64_t num_rows;
  int head_dim;
  RealOf<Element> eps, direction;  // direction -1: by the negative angles
  Heads<Element> from[3];  // queries, keys, values, of which there may be 0
  const Element* norm[2];  // [D] of queries and of keys, or null
  Element* to[3];  // [U, count, D], rows of contiguous heads
  int64_t to_stride[3];  // between these rows
  const float *cos, *sin;  // [num_positions, D/2]
  const int64_t* positions;  // [U] rows of the tables; null: row u for row u
  int64_t num_positions;  // heads at other positions become NaN

  MAXRL_FIELDS(num_rows, head_dim, eps, direction, from, norm, to, to_stride, cos, sin, positions,
               num_positions)

  // Head `head` of the queries, keys or values of row u.
  MAXRL_HOST_DEVICE const Element* source(int which, int64_t u, int head) const {
    return from[which].data + u * from[which].stride + head * head_dim;
  }
  MAXRL_HOST_DEVICE Element* target(int which, int64_t u, int head) const {
    return to[which] + u * to_stride[which] + head * head_dim;
  }
  // Where the angles of row u are in the tables; -1 if its position is not there.
  MAXRL_HOST_DEVICE int64_t angles_of(int64_t u) const {
    const int64_t position = positions ? positions[u] : u;
    return position >= 0 && position < num_positions ? position * (head_dim / 2) : -1;
  }
};

// The gradients in queries and keys that have norms. On a CPU `from` and `to` may have the values'
// gradients, which are copied, and grad_norm is [2, D]: of queries and of keys. `direction` is the
// forward one.
template <typename Element>
struct RotateHeadsBackward {
  RotateHeads<Element> forward;  // `to`: the gradients in the queries and keys
  const Element* grad[2];  // [U, count, D] in the rotated queries and keys
  int64_t num_partials;  // P
  RealOf<Element>* grad_norm;  // [P, all heads, D]: partial p has the rows p, p + P, ...

  MAXRL_FIELDS(forward, grad, num_partials, grad_norm)
};

// out = gate sigmoid(gate) up, in rows of `size` elements F.
template <typename Element>
struct SwiGlu {
  int64_t num_rows;
  int size;
  const Element *gate, *up;
  int64_t gate_stride, up_stride;
  Element* out;  // [U, F]

  MAXRL_FIELDS(num_rows, size, gate, up, gate_stride, up_stride, out)
};

template <typename Element>
struct SwiGluBackward {
  SwiGlu<Element> forward;  // `out` is not used
  const Element* grad;  // [U, F]
  Element *grad_gate, *grad_up;  // [U, F]
  int64_t grad_stride;  // of both

  MAXRL_FIELDS(forward, grad, grad_gate, grad_up, grad_stride)
};

// The gradient of choosing rows, any number of times: row u of `to` is the sum of the rows i of
// `grad` with rows[i] = u. A GPU gets these i sorted: those of row u are order[starts[u]] to
// order[starts[u + 1] - 1].
template <typename Element>
struct ChosenRows {
  int64_t num_rows, num_chosen;  // U, R
  int size;
  const int64_t* rows;  // [R], on a CPU
  const int64_t *order, *starts;  // [R], [U + 1], on a GPU
  const Element* grad;  // [R, H]
  Element* to;  // [U, H]

  MAXRL_FIELDS(num_rows, num_chosen, size, rows, order, starts, grad, to)
};

// y = x W^T + bias + added. U rows; in_size K and out_size N are multiples of 16. All arrays are
// contiguous.
struct Linear {
  int64_t num_rows, in_size, out_size;
  const float *x, *weight;  // [U, K], [N, K]
  const float *bias, *added;  // [N], [U, N]; may be null
  float* y;  // [U, N]

  MAXRL_FIELDS(num_rows, in_size, out_size, x, weight, bias, added, y)
};

// The gradients in x, W and bias. Each may be null; that in bias is written only together with that
// in W.
struct LinearBackward {
  int64_t num_rows, in_size, out_size;
  const float *grad, *x, *weight;  // [U, N], [U, K], [N, K]
  float *grad_x, *grad_weight, *grad_bias;  // [U, K], [N, K], [N]

  MAXRL_FIELDS(num_rows, in_size, out_size, grad, x, weight, grad_x, grad_weight, grad_bias)
};

// Segments of tokens in depth-first order. A token attends to the earlier ones of its segment, to
// itself, and to all of the segments above.
struct Forest {
  int64_t num_tokens, num_segments;
  const int64_t* lengths;  // [num_segments], at least 1
  const int64_t* parents;  // [num_segments], the segment above, -1: none

  MAXRL_FIELDS(num_tokens, num_segments, lengths, parents)
};

// Query head h attends to key head h / (heads / key_heads). The backward kernel computes all
// gradients from o and lse.
template <typename Element>
struct TreeAttention {
  Forest forest;
  int64_t heads, key_heads, head_dim;  // head_dim: 1 to 256
  const Element *q, *k,
      *v;  // [num_tokens, heads, head_dim], and for k and v [num_tokens, key_heads, head_dim]
  Element* o;  // [num_tokens, heads, head_dim]
  RealOf<Element>* lse;  // [num_tokens, heads]: log2 of the sum of exp(score)
  const Element* grad;  // dL/do; the rest is null in a forward pass
  Element *grad_q, *grad_k, *grad_v;

  MAXRL_FIELDS(forest, heads, key_heads, head_dim, q, k, v, o, lse, grad, grad_q, grad_k, grad_v)
};

}  // namespace maxrl
