// Log-ratios of packed responses, summed: r_s = beta sum_t (logp_t - ref_t) over the tokens that
// are not masked, and the gradient of logp.
#pragma once
#include "kernel.h"

namespace maxrl {

template <typename Real>
struct LogRatio {
  int64_t num_sequences;
  const int64_t* cu_seqlens;  // [S+1]
  const bool* mask;  // [T], or null
  double beta;
  const Real *logprobs, *ref_logprobs;  // [T]
  Real* proxies;  // [S]: r
  const Real* grad_proxies;  // [S]; null in a forward pass, as the above are in a backward one
  Real* gradient;  // [T]

  MAXRL_FIELDS(num_sequences, cu_seqlens, mask, beta, logprobs, ref_logprobs, proxies, grad_proxies,
               gradient)
};

}  // namespace maxrl
