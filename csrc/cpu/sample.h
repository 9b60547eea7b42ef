// Sampling of one token from a row of logits.
#pragma once
#include <cstdint>
#include <vector>

#include "../generation.h"

namespace maxrl::cpu {

struct Sampled {
  int64_t token;
  float logprob;  // under the whole distribution at the temperature: before top-k, top-p and min-p; 0 at temperature 0
};

// Samples by inverting the CDF in the order of the vocabulary, at u in [0, 1). `probabilities` [vocab] and `order` [vocab] are
// scratch memory. Logits that are not finite give log-probs that are not finite.
Sampled sample(const float* logits, int64_t vocab, const SamplingOptions& options, float u, float* probabilities,
               int64_t* order);

}  // namespace maxrl::cpu
