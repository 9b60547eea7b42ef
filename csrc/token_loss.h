// The scalar formulas of the token losses, used by the CPU and the CUDA kernels. A loss needs two
// numbers of a row of logits, the target's log-probability and the entropy, and returns its
// gradients in them.
#pragma once
#include <cmath>
#include <cstdint>

#include "kernel.h"
#include "softmax.h"

namespace maxrl {

// Log-ratios to the sampling and the reference policy are limited to +-20, probabilities 5e8 apart,
// so that one wrong log-prob cannot make the loss infinite. Beyond the limits the gradient is 0.
// verl and SkyRL limit ratios in the same way.
constexpr double kMaxLogRatio = 20.0;

// The losses that almost every run uses; all others are functions in maxrl_fast/algorithms/losses.
enum class Loss { kReinforce, kPpo, kCispo, kGspo, kCount };
template <>
inline constexpr const char* kNamesOf<Loss>[4] = {"reinforce", "ppo", "cispo", "gspo"};
static_assert(std::size(kNamesOf<Loss>) == static_cast<size_t>(Loss::kCount));
enum class Divergence { kK1, kK2, kK3, kK3Plus };
template <>
inline constexpr const char* kNamesOf<Divergence>[4] = {"k1", "k2", "k3", "k3+"};

struct LossTerms {
  Loss loss;
  double clip_low, clip_high;  // the ratio is clipped to [1 - clip_low, 1 + clip_high]
  double dual_clip;            // for A < 0 the loss is at most -A dual_clip; infinite: no limit
  Divergence kl;
  double kl_coef, entropy_coef;
  MAXRL_FIELDS(loss, clip_low, clip_high, dual_clip, kl, kl_coef, entropy_coef)

  MAXRL_HOST_DEVICE bool has_gradient(double advantage) const {
    return advantage != 0.0 || kl_coef != 0.0 || entropy_coef != 0.0;
  }
};

// Sums over the rows: the weighted loss, the tokens that are not masked, and how many of these have
// no gradient. The other sums are over the tokens that have a gradient.
struct LossSums {
  enum Name {
    kLoss,
    kTokens,
    kDropped,
    kRatio,
    kRatioClamped,
    kClippedLow,
    kClippedHigh,
    kKl,
    kEntropy,
    kLogprobDiff,
    kSize
  };
  // The fields of LossSums in maxrl_fast/ops/token_loss_kernel.py, which compares them when it is
  // imported.
  static constexpr const char* kNames[kSize] = {
      "loss",         "tokens", "dropped_tokens", "ratio",       "ratio_clamped", "clipped_low",
      "clipped_high", "kl",     "entropy",        "logprob_diff"};
  static_assert(kNames[kSize - 1] != nullptr);
  double values[kSize];
  MAXRL_HOST_DEVICE void add(const LossSums& other) {
    for (int i = 0; i < kSize; ++i) values[i] += other.values[i];
  }
};

// A matrix with contiguous rows, or null.
template <typename Element>
struct Rows {
  Element* data;
  int64_t stride;  // elements from row to row
  static constexpr bool kIsTuple = true;

  MAXRL_FIELDS(data, stride)
  MAXRL_HOST_DEVICE Element* of(int64_t row) const { return data ? data + row * stride : nullptr; }
};

// The target and the temperature of each row of logits.
struct TokenRows {
  int64_t num_tokens, vocab_size;
  const int64_t* targets;     // [T]
  const double* temperature;  // [T]
  static constexpr bool kIsTuple = true;

  MAXRL_FIELDS(num_tokens, vocab_size, targets, temperature)

  // NaN if it is not above 0: the exponential only takes exponents up to 0.
  MAXRL_HOST_DEVICE double temperature_of(int64_t t) const {
    return temperature[t] > 0.0 ? temperature[t] : static_cast<double>(NAN);
  }
  MAXRL_HOST_DEVICE bool is_target_valid(int64_t t) const {
    return targets[t] >= 0 && targets[t] < vocab_size;
  }
  // The first token whose target is not in the vocabulary, -1 if there is none.
  int64_t first_invalid_target() const {
    for (int64_t t = 0; t < num_tokens; ++t)
      if (!is_target_valid(t)) return t;
    return -1;
  }
};

// The inputs of the loss, numbers of each token [T]: what belongs to a response, a mask or an
// average is part of them. Absent inputs are null.
struct TokenLossInputs {
  TokenRows tokens;
  const double* advantages;          // times the importance weights
  const double* weights;             // of the token's loss in the total; 0: masked
  const double* old_logprobs;        // of the sampling policy
  const double* ref_logprobs;        // of the reference policy
  const double* sequence_log_ratio;  // mean log-ratio of the token's sequence, for gspo

  MAXRL_FIELDS(tokens, advantages, weights, old_logprobs, ref_logprobs, sequence_log_ratio)
};

// Counts token t, and returns whether its logits must be read. Otherwise its gradient and loss are
// 0.
MAXRL_HOST_DEVICE inline bool count_token(const TokenLossInputs& in, const LossTerms& terms,
                                          int64_t t, LossSums& sums) {
  const bool counts = in.weights[t] != 0.0;
  const bool must_read = counts && terms.has_gradient(in.advantages[t]);
  sums.values[LossSums::kTokens] += counts;
  sums.values[LossSums::kDropped] += counts && !must_read;
  return must_read;
}

struct ClampedLogRatio {
  double value;
  bool is_clamped;
};

MAXRL_HOST_DEVICE inline ClampedLogRatio clamp_log_ratio(double x) {
  if (x > kMaxLogRatio) return {kMaxLogRatio, true};
  if (x < -kMaxLogRatio) return {-kMaxLogRatio, true};
  return {x, false};  // NaN too
}

// What the policy-gradient term of a token is computed from.
struct Token {
  double advantage;  // times the importance weight
  double logp;  // of the target
  ClampedLogRatio log_ratio;  // logp - old of the token, or of its sequence for gspo
  double ratio;  // e^log_ratio
};

// The loss of a token and its gradient in the log-probability, without the token's weight.
struct TokenLoss {
  double value, grad_logp;
  bool clipped_low = false, clipped_high = false;  // whether the loss has limited the ratio
};

// Unlike fmin and fmax this keeps NaN.
MAXRL_HOST_DEVICE inline double clip(double x, double low, double high) {
  const double raised = x < low ? low : x;
  return raised > high ? high : raised;
}

// Estimates of KL(policy || reference) of one token (Schulman 2020), d = logp - ref.
MAXRL_HOST_DEVICE inline TokenLoss divergence(Divergence kind, double d) {
  if (kind == Divergence::kK1) return {d, 1.0};
  if (kind == Divergence::kK2) return {d * d / 2, d};
  const double k3 = expm1(-d) + d;
  return {k3, kind == Divergence::kK3 ? -expm1(-d) : d};
}

// The policy-gradient terms: value and gradient. maxrl_fast/algorithms/losses has formulas,
// sources and the same in torch.

// With the ratio of the sequence also gspo.
MAXRL_HOST_DEVICE inline TokenLoss ppo(const LossTerms& terms, const Token& x) {
  const double low = 1.0 - terms.clip_low, high = 1.0 + terms.clip_high;
  const double free = -x.advantage * x.ratio, bound = -x.advantage * clip(x.ratio, low, high);
  TokenLoss token =
      free >= bound ? TokenLoss{free, x.log_ratio.is_clamped ? 0.0 : free} : TokenLoss{bound, 0.0};
  if (x.advantage < 0.0 && token.value > -x.advantage * terms.dual_clip)
    token = {-x.advantage * terms.dual_clip, 0.0};
  if (free != free) token = {free, free};  // comparisons would hide a NaN
  token.clipped_low = x.ratio < low && x.advantage < 0.0;
  token.clipped_high = x.ratio > high && x.advantage > 0.0;
  return token;
}

MAXRL_HOST_DEVICE inline TokenLoss cispo(const LossTerms& terms, const Token& x) {
  const double low = 1.0 - terms.clip_low, high = 1.0 + terms.clip_high,
               weight = clip(x.ratio, low, high);
  return {-weight * x.advantage * x.logp, -weight * x.advantage, x.ratio<low, x.ratio> high};
}

// One thread of a row comes here, so that the switch costs nothing next to reading the row.
MAXRL_HOST_DEVICE inline TokenLoss policy_gradient_term(const LossTerms& terms, const Token& x) {
  switch (terms.loss) {
    case Loss::kPpo:
    case Loss::kGspo: return ppo(terms, x);
    case Loss::kCispo: return cispo(terms, x);
    default: return {-x.advantage * x.logp, -x.advantage};
  }
}

// Adds the row to the sums and returns its gradients. Each number is added as soon as it is known,
// which frees its registers.
MAXRL_HOST_DEVICE inline RowGrads evaluate_row(const TokenLossInputs& in, const LossTerms& terms,
                                               int64_t t, const Softmax& softmax, LossSums& sums) {
  const double advantage = in.advantages[t], weight = in.weights[t];
  const double log_ratio = in.old_logprobs ? softmax.logp - in.old_logprobs[t] : 0.0;
  const ClampedLogRatio to_old =
      clamp_log_ratio(in.sequence_log_ratio ? in.sequence_log_ratio[t] : log_ratio);
  const double ratio = exp(to_old.value);
  sums.values[LossSums::kRatio] += ratio;
  sums.values[LossSums::kLogprobDiff] += fabs(log_ratio);
  TokenLoss token = policy_gradient_term(terms, {advantage, softmax.logp, to_old, ratio});
  if (advantage == 0.0) token.value = token.grad_logp = 0.0;  // even if the ratio is NaN
  sums.values[LossSums::kClippedLow] += token.clipped_low;
  sums.values[LossSums::kClippedHigh] += token.clipped_high;
  bool is_clamped = to_old.is_clamped;
  if (in.ref_logprobs) {
    const ClampedLogRatio to_ref = clamp_log_ratio(softmax.logp - in.ref_logprobs[t]);
    const TokenLoss kl = divergence(terms.kl, to_ref.value);
    is_clamped |= to_ref.is_clamped;
    sums.values[LossSums::kKl] += kl.value;
    if (terms.kl_coef != 0.0) {
      token.value += terms.kl_coef * kl.value;
      if (!to_ref.is_clamped) token.grad_logp += terms.kl_coef * kl.grad_logp;
    }
  }
  sums.values[LossSums::kRatioClamped] += is_clamped;
  sums.values[LossSums::kEntropy] += softmax.entropy;
  if (terms.entropy_coef != 0.0) token.value -= terms.entropy_coef * softmax.entropy;
  sums.values[LossSums::kLoss] += weight * token.value;
  return {weight * token.grad_logp, -weight * terms.entropy_coef};
}

// The arguments of the kernels. On a CPU token_loss and token_logprobs return the first token whose
// target is not in the vocabulary, and write nothing then; -1 if there is none. On a GPU such a
// target makes the results NaN.
// On a GPU the gradient of float32 logits may have half precision, and be the first half of each of
// their rows.
template <typename Element, typename Gradient = Element>
struct TokenLossCall {
  Rows<const Element> logits;
  TokenLossInputs inputs;
  LossTerms terms;
  Rows<Gradient> gradient;  // null, or the logits themselves
  double* sums;  // [LossSums::kSize]; on a GPU zeros, [workspace_size(LossSums::kSize)]

  MAXRL_FIELDS(logits, inputs, terms, gradient, sums)
};

template <typename Element>
struct TokenLogprobs {
  Rows<const Element> logits;
  TokenRows tokens;
  RealOf<Element>*logprobs, *entropy;  // [T]

  MAXRL_FIELDS(logits, tokens, logprobs, entropy)
};

// Rows whose gradients are 0 are not read.
template <typename Element, typename Gradient = Element>
struct TokenLogprobsBackward {
  Rows<const Element> logits;
  TokenRows tokens;
  const RealOf<Element>*grad_logprobs, *grad_entropy;  // [T]
  Rows<Gradient> gradient;  // may be the logits themselves

  MAXRL_FIELDS(logits, tokens, grad_logprobs, grad_entropy, gradient)
};

// Multiplies a matrix by a number on the device. If the number is 1, the matrix is neither read nor
// written.
template <typename Element>
struct ScaleCall {
  Rows<Element> matrix;
  int64_t num_rows, row_size;
  const double* scale;  // [1]

  MAXRL_FIELDS(matrix, num_rows, row_size, scale)
};

}  // namespace maxrl
