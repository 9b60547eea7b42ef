// The scalar formulas of the token losses, used by the CPU and the CUDA kernels. A loss needs two
// numbers of a row of logits, the target's log-probability and the entropy, and returns its
// gradients in them.
#pragma once
#include <cfloat>
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
enum class Loss { kReinforce, kPpo, kCispo, kCount };
template <>
inline constexpr const char* kNamesOf<Loss>[3] = {"reinforce", "ppo", "cispo"};
static_assert(std::size(kNamesOf<Loss>) == static_cast<size_t>(Loss::kCount));
enum class Divergence { kK1, kK2, kK3, kK3Plus };
template <>
inline constexpr const char* kNamesOf<Divergence>[4] = {"k1", "k2", "k3", "k3+"};

struct LossTerms {
  Loss loss;
  double clip_low, clip_high;  // the ratio is clipped to [1 - clip_low, 1 + clip_high]
  double dual_clip;  // for A < 0 the loss is at most -A dual_clip; infinite: no limit
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
  double loss, tokens, dropped_tokens, ratio, ratio_clamped, clipped_low, clipped_high, kl, entropy,
      logprob_diff;
  static constexpr int kSize = 10;

  // compared with LossSums in maxrl_fast/ops/loss_kernel.py when it is imported
  MAXRL_FIELDS(loss, tokens, dropped_tokens, ratio, ratio_clamped, clipped_low, clipped_high, kl,
               entropy, logprob_diff)
  MAXRL_HOST_DEVICE const double* values() const { return &loss; }
};
static_assert(sizeof(LossSums) == LossSums::kSize * sizeof(double));

// A matrix with contiguous rows, or null.
template <typename Element>
struct Rows {
  Element* data;
  int64_t stride;  // elements from row to row

  MAXRL_TUPLE(data, stride)
  MAXRL_HOST_DEVICE Element* of(int64_t row) const { return data ? data + row * stride : nullptr; }
};

// Numbers in the caller's memory, float32 or float64, or the same number everywhere.
struct Numbers {
  const void* data;  // null: `constant`
  bool is_double;
  double constant;

  MAXRL_TUPLE(data, is_double, constant)
  MAXRL_HOST_DEVICE double at(int64_t i) const {
    if (!data) return constant;
    return is_double ? static_cast<const double*>(data)[i] : static_cast<const float*>(data)[i];
  }
};

// Which tokens the rows of logits belong to, among all T tokens: row r to index[first + r], or
// without an index to first + r.
struct TokenRows {
  int64_t num_rows, vocab_size, num_tokens, first;
  const int64_t* index;
  const int64_t* targets;  // [T]
  Numbers temperature;  // of all tokens, or [T]
  const bool* mask;  // [T], or null. Of a token that is left out nothing is read

  MAXRL_FIELDS(num_rows, first, index, vocab_size, num_tokens, targets, mask, temperature)

  MAXRL_HOST_DEVICE int64_t token_of(int64_t row) const {
    return index ? index[first + row] : first + row;
  }
  MAXRL_HOST_DEVICE bool counts(int64_t t) const { return !mask || mask[t]; }
  // NaN if it is not above 0: the exponential only takes exponents up to 0.
  MAXRL_HOST_DEVICE double temperature_of(int64_t t) const {
    const double tau = temperature.at(t);
    return tau > 0.0 ? tau : static_cast<double>(NAN);
  }
  MAXRL_HOST_DEVICE bool is_target_valid(int64_t t) const {
    return targets[t] >= 0 && targets[t] < vocab_size;
  }
  // The first row whose token has a target outside the vocabulary or a temperature that is not
  // finite and above 0; -1 if there is none.
  int64_t first_unusable() const {
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t t = token_of(row);
      const double tau = temperature.at(t);
      if (counts(t) && !(is_target_valid(t) && tau > 0.0 && tau <= DBL_MAX)) return row;
    }
    return -1;
  }
};

// The inputs of the loss as the caller has them. Of S responses, T tokens in all, response s has
// the tokens from cu_seqlens[s] to cu_seqlens[s + 1].
struct TokenLossInputs {
  TokenRows tokens;
  int64_t num_sequences;
  const int64_t* cu_seqlens;  // [S+1]
  Numbers advantages, importance_weights;  // [S], or [T] where `..._by_token`; weights: or 1
  bool advantages_by_token, weights_by_token;
  Numbers old_logprobs, ref_logprobs;  // [T] of the sampling and the reference policy, or absent
  Numbers denominator;  // [1]: what the sum over tokens is divided by
  bool divides_responses;  // and the tokens of a response by their number,
  Numbers counts;  // [S], or without it the response's length

  MAXRL_FIELDS(tokens, advantages, importance_weights, old_logprobs, ref_logprobs, denominator,
               counts, num_sequences, cu_seqlens, advantages_by_token, weights_by_token,
               divides_responses)

  // The last response that starts at or before token t: its own.
  MAXRL_HOST_DEVICE int64_t sequence_of(int64_t t) const {
    int64_t first = 0, last = num_sequences - 1;
    while (first < last) {
      const int64_t middle = first + (last - first + 1) / 2;
      if (cu_seqlens[middle] <= t)
        first = middle;
      else
        last = middle - 1;
    }
    return first;
  }
  MAXRL_HOST_DEVICE double importance_of(int64_t t, int64_t sequence) const {
    return importance_weights.at(weights_by_token ? t : sequence);
  }
  // What each row of the loss is divided by.
  MAXRL_HOST_DEVICE double weight_of(int64_t sequence) const {
    const double weight = 1.0 / denominator.at(0);
    if (!divides_responses) return weight;
    const double length = static_cast<double>(cu_seqlens[sequence + 1] - cu_seqlens[sequence]),
                 count = counts.data ? counts.at(sequence) : length;
    return weight / (count > 1.0 ? count : 1.0);
  }
  // Whether bounds, importance weights and the denominator are allowed, on a CPU.
  bool are_usable() const {
    const int64_t last = num_sequences;
    if (cu_seqlens[0] != 0 || cu_seqlens[last] != tokens.num_tokens) return false;
    if (const double divisor = denominator.at(0); !(divisor > 0.0 && divisor <= DBL_MAX))
      return false;
    for (int64_t s = 0; s < last; ++s)
      if (cu_seqlens[s + 1] < cu_seqlens[s]) return false;
    const int64_t num_weights = weights_by_token ? tokens.num_tokens : last;
    for (int64_t i = 0; importance_weights.data && i < num_weights; ++i)
      if (importance_weights.at(i) < 0.0 && !(weights_by_token && !tokens.counts(i))) return false;
    return true;
  }
};

// What is known of the token of a row before its logits are read.
struct PlannedToken {
  int64_t t;
  double advantage;  // times the importance weight
  double weight;  // of the token's loss in the total
};

// Counts the token of a row, and returns whether its logits must be read. Otherwise its gradient
// and loss are 0.
MAXRL_HOST_DEVICE inline bool plan_token(const TokenLossInputs& in, const LossTerms& terms,
                                         int64_t row, LossSums& sums, PlannedToken& token) {
  token.t = in.tokens.token_of(row);
  if (!in.tokens.counts(token.t)) return false;
  const int64_t sequence = in.sequence_of(token.t);
  token.advantage = in.advantages.at(in.advantages_by_token ? token.t : sequence) *
                    in.importance_of(token.t, sequence);
  token.weight = in.weight_of(sequence);
  const bool must_read = terms.has_gradient(token.advantage);
  sums.tokens += 1.0;
  sums.dropped_tokens += !must_read;
  return must_read;
}

// Unlike fmin and fmax this keeps NaN.
MAXRL_HOST_DEVICE inline double clip(double x, double low, double high) {
  const double raised = x < low ? low : x;
  return raised > high ? high : raised;
}

struct ClampedLogRatio {
  double value;
  bool is_clamped;
};

MAXRL_HOST_DEVICE inline ClampedLogRatio clamp_log_ratio(double x) {
  return {clip(x, -kMaxLogRatio, kMaxLogRatio), fabs(x) > kMaxLogRatio};
}

// What the policy-gradient term of a token is computed from.
struct Token {
  double advantage;  // times the importance weight
  double logp;  // of the target
  ClampedLogRatio log_ratio;  // logp - old
  double ratio;  // e^log_ratio
};

// The loss of a token and its gradient in the log-probability, without the token's weight.
struct TokenLoss {
  double value, grad_logp;
  bool clipped_low = false, clipped_high = false;  // whether the loss has limited the ratio
};

// Estimates of KL(policy || reference) of one token (Schulman 2020), d = logp - ref.
MAXRL_HOST_DEVICE inline TokenLoss divergence(Divergence kind, double d) {
  if (kind == Divergence::kK1) return {d, 1.0};
  if (kind == Divergence::kK2) return {d * d / 2, d};
  const double k3 = expm1(-d) + d;
  return {k3, kind == Divergence::kK3 ? -expm1(-d) : d};
}

// The policy-gradient terms: value and gradient. maxrl_fast/algorithms/losses has formulas,
// sources and the same in torch.
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
    case Loss::kPpo: return ppo(terms, x);
    case Loss::kCispo: return cispo(terms, x);
    default: return {-x.advantage * x.logp, -x.advantage};
  }
}

// Adds the row to the sums and returns its gradients. Each number is added as soon as it is known,
// which frees its registers.
MAXRL_HOST_DEVICE inline RowGrads evaluate_row(const TokenLossInputs& in, const LossTerms& terms,
                                               const PlannedToken& planned, const Softmax& softmax,
                                               LossSums& sums) {
  const double advantage = planned.advantage, weight = planned.weight;
  const double log_ratio =
      in.old_logprobs.data ? softmax.logp - in.old_logprobs.at(planned.t) : 0.0;
  const ClampedLogRatio to_old = clamp_log_ratio(log_ratio);
  const double ratio = exp(to_old.value);
  sums.ratio += ratio;
  sums.logprob_diff += fabs(log_ratio);
  TokenLoss token = policy_gradient_term(terms, {advantage, softmax.logp, to_old, ratio});
  if (advantage == 0.0) token.value = token.grad_logp = 0.0;  // even if the ratio is NaN
  sums.clipped_low += token.clipped_low;
  sums.clipped_high += token.clipped_high;
  bool is_clamped = to_old.is_clamped;
  if (in.ref_logprobs.data) {
    const ClampedLogRatio to_ref = clamp_log_ratio(softmax.logp - in.ref_logprobs.at(planned.t));
    const TokenLoss kl = divergence(terms.kl, to_ref.value);
    is_clamped |= to_ref.is_clamped;
    sums.kl += kl.value;
    if (terms.kl_coef != 0.0) {
      token.value += terms.kl_coef * kl.value;
      if (!to_ref.is_clamped) token.grad_logp += terms.kl_coef * kl.grad_logp;
    }
  }
  sums.ratio_clamped += is_clamped;
  sums.entropy += softmax.entropy;
  if (terms.entropy_coef != 0.0) token.value -= terms.entropy_coef * softmax.entropy;
  sums.loss += weight * token.value;
  return {weight * token.grad_logp, -weight * terms.entropy_coef};
}

// The arguments of the kernels. On a CPU token_loss and token_logprobs return -1, or, writing
// nothing, another number if values are not allowed, which the caller then finds and names. On a
// GPU such values make the results NaN.
// On a GPU the gradient of float32 logits may be bfloat16, and be the first half of each of their
// rows.
template <typename Element, typename Gradient = Element>
struct TokenLossCall {
  Rows<const Element> logits;
  TokenLossInputs inputs;
  LossTerms terms;
  Rows<Gradient> gradient;  // null, or the logits themselves
  double* sums;  // [LossSums::kSize]; on a GPU zeros, [workspace_size(LossSums::kSize)]
  RealOf<Element>* total;  // [1]: the first of the sums, or null

  MAXRL_FIELDS(logits, inputs, terms, gradient, sums, total)
};

template <typename Element>
struct TokenLogprobs {
  Rows<const Element> logits;
  TokenRows tokens;
  RealOf<Element>*logprobs, *entropy;  // [num_rows], not written for tokens that are left out

  MAXRL_FIELDS(logits, tokens, logprobs, entropy)
};

// Rows whose gradients are 0 are not read.
template <typename Element, typename Gradient = Element>
struct TokenLogprobsBackward {
  Rows<const Element> logits;
  TokenRows tokens;
  const RealOf<Element>*grad_logprobs, *grad_entropy;  // [num_rows]
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

// The divergence D of a policy from a teacher, row by row of their logits, and its gradient in the
// policy's, for CUDA, by the formulas in docs/token_loss.md#divergence-from-a-teacher.
enum class TeacherDivergence { kReverse, kForward, kJsd };
template <>
inline constexpr const char* kNamesOf<TeacherDivergence>[3] = {"reverse", "forward", "jsd"};

// All rows start at multiples of 16 bytes.
template <typename Gradient>
struct DivergenceRows {
  Rows<const float> policy, teacher;
  Rows<Gradient> gradient;  // or null; it may be the memory of `policy`, of bfloat16 the first half
                            // of each row
  int64_t num_rows, vocab_size;
  const float* temperature;  // [rows]
  const double* coefficients;  // [rows], which the gradient is multiplied by
  double* values;  // [rows]: D
  TeacherDivergence divergence;
  double beta;

  MAXRL_FIELDS(policy, teacher, gradient, num_rows, vocab_size, temperature, coefficients, values,
               divergence, beta)
};

}  // namespace maxrl
