// Samples a token from a row of logits.
#pragma once
#include <cstdint>
#include <vector>

#include "../generation.h"

namespace maxrl::cpu {

struct Sampled {
  int64_t token;
  float logprob;           // under the sampling distribution
  float raw_logprob;  // under softmax(logits)
};

// Inverse-CDF sampling with u in [0, 1), in the order of the vocabulary. `probabilities` [vocab] and `order` [vocab] are
// working memory. If logits are not finite, the log-probabilities are not finite either.
Sampled sample(const float* logits, int64_t vocab, const SamplingOptions& options, float u, float* probabilities, int64_t* order);

}  // namespace maxrl::cpu
