// The elementwise parts of a decoder layer: residual addition with RMS norm, rotary embedding, SwiGLU, chosen rows.
#pragma once
#include <cstdint>

namespace maxrl {

// Strides are in elements. On a GPU all addresses and strides are multiples of 16 bytes. U rows. Real is the type of sums.

// Rows of `size` elements H: sum = x + delta, normed = sum / sqrt(mean(sum^2) + eps) * weight. All arrays are contiguous.
template <typename Element, typename Real = float>
struct AddRmsNorm {
  int64_t num_rows;
  int size;
  Real eps;
  const Element *x, *delta;  // [U, H]; delta may be null: sum is x then, and not written
  const Element* weight;     // [H]
  Element *sum, *normed;     // [U, H]

  template <typename Visit>
  void fields(Visit& at) {
    at("num_rows", num_rows), at("size", size), at("eps", eps), at("x", x), at("delta", delta), at("weight", weight);
    at("sum", sum), at("normed", normed);
  }
};

template <typename Element, typename Real = float>
struct AddRmsNormBackward {
  int64_t num_rows;
  int size;
  Real eps;
  const Element *sum, *weight;
  const Element *grad_sum, *grad_normed;  // [U, H]; grad_sum may be null
  Element* grad_x;                        // [U, H], also the gradient in delta
  int64_t num_partials;                   // P
  Real* grad_weight;                      // [P, H]: partial p has the rows p, p + P, ...; one on a CPU

  template <typename Visit>
  void fields(Visit& at) {
    at("num_rows", num_rows), at("size", size), at("eps", eps), at("sum", sum), at("weight", weight);
    at("grad_sum", grad_sum), at("grad_normed", grad_normed), at("grad_x", grad_x);
    at("num_partials", num_partials), at("grad_weight", grad_weight);
  }
};

// Rows of heads of size D: [U, heads, D], with this stride between rows.
template <typename Element>
struct Heads {
  const Element* data;
  int64_t stride;
  int count;

  template <typename Visit>
  void fields(Visit& at) {
    at("data", data), at("stride", stride), at("count", count);
  }
};

// Query and key heads with their RMS norm, if they have one, and the rotary embedding, which rotates dimension i with i + D/2;
// value heads are copied.
template <typename Element, typename Real = float>
struct RotateHeads {
  int64_t num_rows;
  int head_dim;
  Real eps, direction;          // direction -1: by the negative angles
  Heads<Element> from[3];       // queries, keys, values, of which there may be 0
  const Element* norm[2];       // [D] of queries and of keys, or null
  Element* to[3];               // [U, count, D], rows of contiguous heads
  int64_t to_stride[3];         // between these rows
  const float *cos, *sin;       // [num_positions, D/2]
  const int64_t* positions;     // [U] rows of the tables; null: row u for row u
  int64_t num_positions;        // heads at other positions become NaN

  template <typename Visit>
  void fields(Visit& at) {
    at("num_rows", num_rows), at("head_dim", head_dim), at("eps", eps), at("direction", direction);
    at("q", from[0]), at("k", from[1]), at("v", from[2]), at("q_norm", norm[0]), at("k_norm", norm[1]);
    at("to", to), at("to_stride", to_stride), at("cos", cos), at("sin", sin);
    at("positions", positions), at("num_positions", num_positions);
  }
};

// The gradients in queries and keys that have norms. On a CPU `from` and `to` may have the values' gradients, which are copied,
// and grad_norm is [2, D]: of queries and of keys. `direction` is the forward one.
template <typename Element, typename Real = float>
struct RotateHeadsBackward {
  RotateHeads<Element, Real> forward;  // `to`: the gradients in the queries and keys
  const Element* grad[2];              // [U, count, D] in the rotated queries and keys
  int64_t num_partials;                // P
  Real* grad_norm;                     // [P, all heads, D]: partial p has the rows p, p + P, ...

  template <typename Visit>
  void fields(Visit& at) {
    forward.fields(at);
    at("grad", grad), at("num_partials", num_partials), at("grad_norm", grad_norm);
  }
};

// out = gate sigmoid(gate) up, in rows of `size` elements F.
template <typename Element, typename Real = float>
struct SwiGlu {
  int64_t num_rows;
  int size;
  const Element *gate, *up;
  int64_t gate_stride, up_stride;
  Element* out;  // [U, F]

  template <typename Visit>
  void fields(Visit& at) {
    at("num_rows", num_rows), at("size", size), at("gate", gate), at("up", up);
    at("gate_stride", gate_stride), at("up_stride", up_stride), at("out", out);
  }
};

template <typename Element, typename Real = float>
struct SwiGluBackward {
  SwiGlu<Element, Real> forward;  // `out` is not used
  const Element* grad;            // [U, F]
  Element *grad_gate, *grad_up;   // [U, F]
  int64_t grad_stride;            // of both

  template <typename Visit>
  void fields(Visit& at) {
    forward.fields(at);
    at("grad", grad), at("grad_gate", grad_gate), at("grad_up", grad_up), at("grad_stride", grad_stride);
  }
};

// The gradient of choosing rows, any number of times: row u of `to` is the sum of the rows i of `grad` with rows[i] = u.
template <typename Element, typename Real = float>
struct ChosenRows {
  int64_t num_rows, num_chosen;  // U, R
  int size;
  const int64_t* rows;  // [R]
  const Element* grad;  // [R, H]
  Element* to;          // [U, H]

  template <typename Visit>
  void fields(Visit& at) {
    at("num_rows", num_rows), at("num_chosen", num_chosen), at("size", size), at("rows", rows), at("grad", grad), at("to", to);
  }
};

}  // namespace maxrl
