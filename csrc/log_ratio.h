// Log-ratios of packed responses, summed: r_s = beta sum_t (logp_t - ref_t) over the tokens that
// are not masked, and the gradient of logp.
#pragma once
#include "kernel.h"

namespace maxrl {

struct Sequences {
  int64_t num_tokens, num_sequences;
  const int64_t* cu_seqlens;  // [S+1]
  const bool* mask;  // [T], or null
  double beta;

  MAXRL_FIELDS(num_tokens, num_sequences, cu_seqlens, mask, beta)
};

template <typename Real>
struct LogRatio {
  Sequences sequences;
  const Real *logprobs, *ref_logprobs;  // [T]
  Real* proxies;  // [S]

  MAXRL_FIELDS(sequences, logprobs, ref_logprobs, proxies)
};

template <typename Real>
struct LogRatioBackward {
  Sequences sequences;
  const Real* grad_proxies;  // [S]
  Real* gradient;  // [T]

  MAXRL_FIELDS(sequences, grad_proxies, gradient)
};

}  // namespace maxrl
