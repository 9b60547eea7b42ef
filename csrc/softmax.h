// The softmax of a row of logits from sums over its parts, and its gradient, for the CPU and the
// CUDA kernels.
//
// The target is kept separate from the other tokens: 1 - p(y) is their sum, without cancellation
// where p(y) is near 1. Exponents are x = (z - top) / tau, with top the greatest logit.
#pragma once
#include <cmath>

#include "element_types.h"

namespace maxrl {

// The sums over a row, or a part of it, without the target.
struct PartialSoftmax {
  double top;  // greatest logit, -inf if there is none
  double others, moment;  // sums of e^x and of x e^x

  MAXRL_HOST_DEVICE static PartialSoftmax empty() {
    return {-static_cast<double>(INFINITY), 0.0, 0.0};
  }

  // The number subtracted in exponents: -inf would give NaN.
  MAXRL_HOST_DEVICE double base() const {
    return top == -static_cast<double>(INFINITY) ? 0.0 : top;
  }

  MAXRL_HOST_DEVICE void raise(double new_top, double inverse_temperature) {
    if (others > 0.0) {
      const double shift = (top - new_top) * inverse_temperature, factor = exp(shift);
      moment = factor > 0.0 ? factor * (moment + others * shift) : 0.0;
      others *= factor;
    }
    top = new_top;
  }

  MAXRL_HOST_DEVICE void add(PartialSoftmax other, double inverse_temperature) {
    if (other.top > top)
      raise(other.top, inverse_temperature);
    else if (other.top < top)
      other.raise(top, inverse_temperature);
    others += other.others;
    moment += other.moment;
  }
};

// dL/dlogp and dL/dH of a row of logits, H its entropy.
struct RowGrads {
  double grad_logp, grad_entropy;
};

// dL/dz: at_target at the target, e^x (constant + slope x) elsewhere.
struct RowGradient {
  double at_target, constant, slope;
};

struct Softmax {
  double top, inverse_temperature;
  double others;  // e^x over all tokens but the target
  double p;  // of the target
  double log_total, inverse_total;
  double logp;  // of the target
  double entropy;  // nats

  Softmax() = default;
  MAXRL_HOST_DEVICE Softmax(PartialSoftmax part, double at_target, double inverse_temperature)
      : inverse_temperature(inverse_temperature) {
    if (!(at_target <= part.top)) part.raise(at_target, inverse_temperature);
    top = part.top;
    others = part.others;
    const double x = (at_target - top) * inverse_temperature, target = exp(x),
                 total = others + target;
    // log1p is precise where p(y) is near 1.
    log_total = others < target ? x + log1p(others / target) : log(total);
    inverse_total = 1.0 / total;
    p = target * inverse_total;
    logp = x - log_total;
    entropy = log_total - part.moment * inverse_total - (p > 0.0 ? p * x : 0.0);
  }

  // dL/dz = (g / tau) (onehot(y) - p) - (h / tau) p (log p + H).
  MAXRL_HOST_DEVICE RowGradient gradient(const RowGrads& grads) const {
    const double g = grads.grad_logp * inverse_temperature,
                 h = grads.grad_entropy * inverse_temperature;
    const double of_entropy = p > 0.0 ? p * (logp + entropy) : 0.0;
    return {g * others * inverse_total - h * of_entropy,
            (-g - h * (entropy - log_total)) * inverse_total, -h * inverse_total};
  }
};

}  // namespace maxrl
