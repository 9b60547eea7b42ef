// A token sampled from a row of logits.
#pragma once
#include <cstdint>
#include <vector>

#include "../generation.h"

namespace maxrl::cpu {

struct Sampled {
  int64_t token;
  float logprob;  // under the distribution it was sampled from
};

// Inverse-CDF sampling by u in [0, 1), in the order of the vocabulary. `probabilities` [vocab] and `order` [vocab] are working
// memory. Logits that are not finite give log-probabilities that are not.
Sampled sample(const float* logits, int64_t vocab, const SamplingOptions& options, float u, float* probabilities, int64_t* order);

}  // namespace maxrl::cpu
