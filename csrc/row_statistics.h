// What the losses of later updates need of a row of logits beside the log-probability of its target: its most probable tokens,
// and the mass of the tokens that are not improbable. For the CPU and the CUDA kernels.
#pragma once
#include <climits>
#include <cstdint>

#include "softmax.h"

namespace maxrl {

constexpr int kMaxTopTokens = 8;

// The results for rows [T]. Real is float, or double for double logits.
template <typename Real>
struct RowStatistics {
  int top_k;     // at most kMaxTopTokens and V
  double min_p;  // in (0, 1]
  Real *logprobs, *entropy;
  int64_t* top_tokens;  // [T, K], by falling probability; of equal logits the lower token comes first
  Real* top_logprobs;   // [T, K]
  Real* log_mass;       // log of the probability of the tokens that have at least min_p times the greatest probability

  MAXRL_HOST_DEVICE void write_softmax(int64_t t, const Softmax& softmax) const {
    logprobs[t] = static_cast<Real>(softmax.logp);
    entropy[t] = static_cast<Real>(softmax.entropy);
  }
  MAXRL_HOST_DEVICE void write_top(int64_t t, int k, int64_t token, double logit, const Softmax& softmax) const {
    top_tokens[t * top_k + k] = token;
    top_logprobs[t * top_k + k] = static_cast<Real>((logit - softmax.top) * softmax.inverse_temperature - softmax.log_total);
  }
  // log_kept: log of the sum of e^x over these tokens.
  MAXRL_HOST_DEVICE void write_mass(int64_t t, double log_kept, const Softmax& softmax) const {
    const double result = log_kept - softmax.log_total;
    log_mass[t] = static_cast<Real>(result > 0.0 ? 0.0 : result);  // by rounding; NaN stays
  }
};

// The greatest logits met so far, in the order of RowStatistics. NaN is never among them.
template <typename Real, typename Token>
struct TopTokens {
  static constexpr Token kNone = sizeof(Token) == 4 ? INT32_MAX : static_cast<Token>(INT64_MAX);
  Real logits[kMaxTopTokens];
  Token tokens[kMaxTopTokens];

  MAXRL_HOST_DEVICE TopTokens() {
    for (int i = 0; i < kMaxTopTokens; ++i) clear(i);
  }
  MAXRL_HOST_DEVICE void clear(int i) {
    logits[i] = -static_cast<Real>(INFINITY);
    tokens[i] = kNone;
  }
  MAXRL_HOST_DEVICE bool belongs_before(int i, Real logit, Token token) const {
    return logit > logits[i] || (logit == logits[i] && token < tokens[i]);
  }
  MAXRL_HOST_DEVICE void insert(Real logit, Token token) {
    if (!belongs_before(kMaxTopTokens - 1, logit, token)) return;
    for (int i = 0; i < kMaxTopTokens; ++i) {  // constant indices once unrolled, so that a GPU keeps all in registers
      const bool is_before = belongs_before(i, logit, token);
      const Real next_logit = is_before ? logits[i] : logit;
      const Token next_token = is_before ? tokens[i] : token;
      logits[i] = is_before ? logit : logits[i];
      tokens[i] = is_before ? token : tokens[i];
      logit = next_logit;
      token = next_token;
    }
  }
  MAXRL_HOST_DEVICE void drop_first() {
    for (int i = 0; i + 1 < kMaxTopTokens; ++i) {
      logits[i] = logits[i + 1];
      tokens[i] = tokens[i + 1];
    }
    clear(kMaxTopTokens - 1);
  }
};

}  // namespace maxrl
