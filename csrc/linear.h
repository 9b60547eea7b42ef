// A linear layer in training: the records of its products.
#pragma once
#include <cstdint>

#include "kernel.h"

namespace maxrl {

// y = x W^T + bias + added. U rows; in_size K and out_size N are multiples of 16. All arrays are
// contiguous.
struct Linear {
  int64_t num_rows, in_size, out_size;
  const float *x, *weight;     // [U, K], [N, K]
  const float *bias, *added;   // [N], [U, N]; may be null
  float* y;                    // [U, N]

  MAXRL_FIELDS(num_rows, in_size, out_size, x, weight, bias, added, y)
};

// The gradients in x, W and bias. Each may be null; that in bias is written only together with that
// in W.
struct LinearBackward {
  int64_t num_rows, in_size, out_size;
  const float *grad, *x, *weight;             // [U, N], [U, K], [N, K]
  float *grad_x, *grad_weight, *grad_bias;    // [U, K], [N, K], [N]

  MAXRL_FIELDS(num_rows, in_size, out_size, grad, x, weight, grad_x, grad_weight, grad_bias)
};

}  // namespace maxrl
