// The scalar formulas of the token losses, used by the CPU and the CUDA kernels. A loss needs two numbers of a row of logits,
// the target's log-probability and the entropy, and returns its gradients in them.
#pragma once
#include <cmath>
#include <cstdint>

#include "softmax.h"

namespace maxrl {

// Log-ratios to the sampling and the reference policy are limited to +-20, probabilities 5e8 apart, so that one wrong log-prob
// cannot make the loss infinite. Beyond the limits the gradient is 0. verl and SkyRL limit ratios in the same way.
constexpr double kMaxLogRatio = 20.0;

// In the order of kLossNames, which is that of LOSSES in maxrl_fast/ops/losses.py; both are compared at import.
enum class Loss {
  kReinforce,
  kPpo,
  kCispo,
  kGspo,
  kLuspo,
  kGmpo,
  kVespo,
  kSapo,
  kDppo,
  kDispo,
  kTopr,
  kToprToken,
  kKlCov,
  kClipCov,
  kLpReg,
  kSimko,
  kCount
};
constexpr const char* kLossNames[] = {"reinforce", "ppo",   "cispo", "gspo",       "luspo",  "gmpo",     "vespo",  "sapo",
                                      "dppo",      "dispo", "topr",  "topr_token", "kl_cov", "clip_cov", "lp_reg", "simko"};
static_assert(sizeof(kLossNames) / sizeof(*kLossNames) == static_cast<int>(Loss::kCount));
enum class Divergence { kK1, kK2, kK3, kK3Plus };

struct LossTerms {
  static constexpr int kMaxOptions = 4;
  Loss loss;
  double clip_low, clip_high;  // the ratio is clipped to [1 - clip_low, 1 + clip_high]
  double dual_clip;            // for A < 0 the loss is at most -A dual_clip; infinite: no limit
  Divergence kl;
  double kl_coef, entropy_coef;
  double options[kMaxOptions];  // the loss's own numbers, in the order of LOSSES in maxrl_fast/ops/losses.py
  // The fields of LossTerms in maxrl_fast/ops/token_batch.py, compared when maxrl_fast.ops is imported.
  static constexpr const char* kNames[] = {"loss", "clip_low", "clip_high",    "dual_clip",
                                           "kl",   "kl_coef",  "entropy_coef", "options"};

  // Whether a token with advantage 0 has a term of the loss all the same.
  MAXRL_HOST_DEVICE bool has_term_without_advantage(double statistic) const {
    if (loss == Loss::kDppo) return options[2] != 0.0;
    return loss == Loss::kKlCov && statistic != 0.0 && options[1] != 0.0;
  }
  MAXRL_HOST_DEVICE bool has_gradient(double advantage, double statistic) const {
    return advantage != 0.0 || kl_coef != 0.0 || entropy_coef != 0.0 || has_term_without_advantage(statistic);
  }
};

// Sums over the rows: the weighted loss, the tokens that are not masked, and how many of these have no gradient. The other sums
// are over the tokens that have a gradient.
struct LossSums {
  enum Name { kLoss, kTokens, kDropped, kRatio, kRatioClamped, kClippedLow, kClippedHigh, kKl, kEntropy, kLogprobDiff, kSize };
  // The fields of LossSums in maxrl_fast/ops/token_loss_kernel.py, which compares them when it is imported.
  static constexpr const char* kNames[kSize] = {"loss",          "tokens",      "dropped_tokens", "ratio",
                                                "ratio_clamped", "clipped_low", "clipped_high",   "kl",
                                                "entropy",       "logprob_diff"};
  static_assert(kNames[kSize - 1] != nullptr);
  double values[kSize];
  MAXRL_HOST_DEVICE void clear() {
    for (double& value : values) value = 0.0;
  }
  MAXRL_HOST_DEVICE void add(const LossSums& other) {
    for (int i = 0; i < kSize; ++i) values[i] += other.values[i];
  }
};

// A matrix with contiguous rows, or null.
template <typename Element>
struct Rows {
  Element* data;
  int64_t stride;  // elements from row to row
  MAXRL_HOST_DEVICE Element* of(int64_t row) const { return data ? data + row * stride : nullptr; }
};

// The target and the temperature of each row of logits. Real is float, or double for double logits.
template <typename Real>
struct TokenRows {
  int64_t num_tokens, vocab_size;
  const int64_t* targets;    // [T]
  const Real* temperatures;  // [T], or null: then `temperature` for all
  double temperature;

  // NaN if it is not above 0: the exponential only takes exponents up to 0.
  MAXRL_HOST_DEVICE double temperature_of(int64_t t) const {
    const double tau = temperatures ? static_cast<double>(temperatures[t]) : temperature;
    return tau > 0.0 ? tau : static_cast<double>(NAN);
  }
  MAXRL_HOST_DEVICE bool is_target_valid(int64_t t) const { return targets[t] >= 0 && targets[t] < vocab_size; }
};

// The tokens of packed sequences and the inputs of their loss. Absent inputs are null.
template <typename Real>
struct TokenLossInputs {
  TokenRows<Real> rows;
  int64_t num_sequences;
  const int64_t* cu_seqlens;       // [S+1]
  const Real* advantages;          // [T] if advantages_per_token, else [S]
  bool advantages_per_token;
  const Real* importance_weights;  // [T] if importance_per_token, else [S]
  bool importance_per_token;
  const Real* old_logprobs;        // [T]
  const Real* ref_logprobs;        // [T]
  const Real* sequence_log_ratio;  // [S], for the losses with a ratio of the whole sequence
  const Real* token_statistics;    // [T], for the losses that need one; LOSSES in maxrl_fast/ops/losses.py says what it is
  const int64_t* top_tokens;       // [T, K], for simko: the most probable tokens of the sampling policy
  Real* spread;                    // [T], with top_tokens; zeros that the loss overwrites (spread_gradient)
  const bool* mask;                // [T]
  const int64_t* sequence_tokens;  // [S] tokens that are not masked, for the mean of each sequence
  const double* denominator;       // [1]

  // The sequence of token t: the last one that starts at or before it (empty sequences may start there too).
  MAXRL_HOST_DEVICE int64_t sequence_of(int64_t t) const {
    int64_t low = 0, high = num_sequences;  // cu_seqlens[low] <= t < cu_seqlens[high]
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (cu_seqlens[middle] <= t ? low : high) = middle;
    }
    return low;
  }
};

// The part of a row's loss that is known before its logits are read.
struct RowPlan {
  bool counts;      // not masked
  bool must_read;   // otherwise its gradient and loss are 0
  int64_t sequence;
  double advantage;  // times the importance weight
  double weight;     // of the token's loss in the total
  double statistic;  // 0 where there is none
};

template <typename Real>
MAXRL_HOST_DEVICE inline RowPlan plan_row(const TokenLossInputs<Real>& in, const LossTerms& terms, int64_t t) {
  RowPlan row{};
  row.counts = !in.mask || in.mask[t];
  if (!row.counts) return row;
  row.sequence = in.sequence_of(t);
  row.advantage = static_cast<double>(in.advantages[in.advantages_per_token ? t : row.sequence]);
  if (in.importance_weights)
    row.advantage *= static_cast<double>(in.importance_weights[in.importance_per_token ? t : row.sequence]);
  if (in.token_statistics) row.statistic = static_cast<double>(in.token_statistics[t]);
  row.must_read = terms.has_gradient(row.advantage, row.statistic);
  if (row.must_read) {
    row.weight = 1.0 / *in.denominator;
    if (in.sequence_tokens) row.weight /= static_cast<double>(in.sequence_tokens[row.sequence]);
  }
  return row;
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
  double logp, p;             // of the target
  double own_log_ratio;       // logp - old, not clamped
  ClampedLogRatio log_ratio;  // of the token, or of its sequence where the loss has a ratio of the sequence
  double ratio;               // e^log_ratio
  double statistic;           // given for the token; 0 where there is none
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

// The policy-gradient terms, a struct each: `of` returns value and gradient. LOSSES in maxrl_fast/ops/losses.py has formulas,
// sources and the names of the options.

// -w A logp with a constant weight w.
MAXRL_HOST_DEVICE inline TokenLoss weighted_logp(const Token& x, double weight) {
  return {-weight * x.advantage * x.logp, -weight * x.advantage};
}

struct Reinforce {
  MAXRL_HOST_DEVICE static TokenLoss of(const LossTerms&, const Token& x) { return {-x.advantage * x.logp, -x.advantage}; }
};

struct Ppo {  // with the ratio of the sequence also gspo and luspo
  MAXRL_HOST_DEVICE static TokenLoss of(const LossTerms& terms, const Token& x) {
    return clipped(x, 1.0 - terms.clip_low, 1.0 + terms.clip_high, terms.dual_clip);
  }
  MAXRL_HOST_DEVICE static TokenLoss clipped(const Token& x, double low, double high, double dual_clip) {
    const double free = -x.advantage * x.ratio, bound = -x.advantage * clip(x.ratio, low, high);
    TokenLoss token = free >= bound ? TokenLoss{free, x.log_ratio.is_clamped ? 0.0 : free} : TokenLoss{bound, 0.0};
    if (x.advantage < 0.0 && token.value > -x.advantage * dual_clip) token = {-x.advantage * dual_clip, 0.0};
    if (free != free) token = {free, free};  // comparisons would hide a NaN
    token.clipped_low = x.ratio < low && x.advantage < 0.0;
    token.clipped_high = x.ratio > high && x.advantage > 0.0;
    return token;
  }
};

struct Cispo {
  MAXRL_HOST_DEVICE static TokenLoss of(const LossTerms& terms, const Token& x) {
    const double low = 1.0 - terms.clip_low, high = 1.0 + terms.clip_high;
    TokenLoss token = weighted_logp(x, clip(x.ratio, low, high));
    token.clipped_low = x.ratio < low;
    token.clipped_high = x.ratio > high;
    return token;
  }
};

struct Gmpo {  // options: low, high; bounds of the token's log-ratio, already applied in the ratio of the sequence
  MAXRL_HOST_DEVICE static TokenLoss of(const LossTerms& terms, const Token& x) {
    const bool low = x.advantage < 0.0 && x.own_log_ratio < -terms.options[0];
    const bool high = x.advantage > 0.0 && x.own_log_ratio > terms.options[1];
    const double value = -x.advantage * x.ratio;
    return {value, low || high || x.log_ratio.is_clamped ? 0.0 : value, low, high};
  }
};

struct Vespo {  // options: k_positive, lambda_positive, k_negative, lambda_negative
  MAXRL_HOST_DEVICE static TokenLoss of(const LossTerms& terms, const Token& x) {
    const double* option = terms.options + (x.advantage < 0.0 ? 2 : 0);
    return weighted_logp(x, exp(option[1] + option[0] * x.log_ratio.value - option[1] * x.ratio));
  }
};

struct Sapo {  // options: tau_positive, tau_negative
  MAXRL_HOST_DEVICE static TokenLoss of(const LossTerms& terms, const Token& x) {
    const double tau = terms.options[x.advantage > 0.0 ? 0 : 1], u = tau * (x.ratio - 1.0);
    const double e = exp(-fabs(u)), inverse = 1.0 / (1.0 + e);  // the sigmoid is 1 - e inverse or e inverse
    const double value = -x.advantage * 4.0 / tau * (u < 0.0 ? e : 1.0) * inverse;
    return {value, x.log_ratio.is_clamped ? 0.0 : -x.advantage * 4.0 * e * inverse * inverse * x.ratio};
  }
};

struct Dppo {  // options: low, high, kl
  MAXRL_HOST_DEVICE static TokenLoss of(const LossTerms& terms, const Token& x) {
    const double change = x.p * (x.ratio - 1.0);  // (pi - pi_old) pi / pi_old: a division would take registers
    const bool low = x.advantage < 0.0 && change < -terms.options[0] * x.ratio;
    const bool high = x.advantage > 0.0 && change > terms.options[1] * x.ratio;
    const double free = low || high ? 0.0 : -x.advantage * x.ratio, kl = terms.options[2], d = x.log_ratio.value;
    return {free + kl * d * d, x.log_ratio.is_clamped ? 0.0 : free + 2.0 * kl * d, low, high};
  }
};

struct Dispo {  // options: low_positive, high_positive, low_negative, high_negative
  MAXRL_HOST_DEVICE static TokenLoss of(const LossTerms& terms, const Token& x) {
    const double* bound = terms.options + (x.advantage < 0.0 ? 2 : 0);
    TokenLoss token = weighted_logp(x, clip(x.ratio, bound[0], bound[1]));
    token.clipped_low = x.ratio < bound[0];
    token.clipped_high = x.ratio > bound[1];
    return token;
  }
};

struct Topr {  // topr with the ratio of the sequence, topr_token with that of the token
  MAXRL_HOST_DEVICE static TokenLoss of(const LossTerms&, const Token& x) {
    const bool is_tapered = x.advantage < 0.0;
    TokenLoss token = weighted_logp(x, is_tapered ? clip(x.ratio, 0.0, 1.0) : 1.0);
    token.clipped_high = is_tapered && x.ratio > 1.0;
    return token;
  }
};

struct KlCov {  // options: share, of those who choose the tokens; coef. The statistic is 1 for a chosen token, else 0.
  MAXRL_HOST_DEVICE static TokenLoss of(const LossTerms& terms, const Token& x) {
    const double free = -x.advantage * x.ratio, coef = x.statistic != 0.0 ? terms.options[1] : 0.0, d = x.log_ratio.value;
    const double slope = d > 0.0 ? coef : d < 0.0 ? -coef : 0.0;
    return {free + coef * fabs(d), x.log_ratio.is_clamped ? 0.0 : free + slope};
  }
};

struct ClipCov {  // options: share, low, high, of those who choose the tokens. The statistic is 1 for a chosen token, else 0.
  MAXRL_HOST_DEVICE static TokenLoss of(const LossTerms& terms, const Token& x) {
    const TokenLoss free = Ppo::of(terms, x);
    if (x.statistic == 0.0) return free;
    return {0.0 * free.value, 0.0, x.advantage < 0.0, x.advantage > 0.0};  // NaN stays
  }
};

// Options: share and min_p, of those who make the statistic; low, high. The statistic is the log-prob that the proxy gives the
// token, minus infinity where the token is not protected.
struct LpReg {
  MAXRL_HOST_DEVICE static TokenLoss of(const LossTerms& terms, const Token& x) {
    if (!(x.logp < x.statistic))
      return Ppo::clipped(x, 1.0 - terms.options[2], 1.0 + terms.options[3], static_cast<double>(INFINITY));
    const double free = -x.advantage * x.ratio;
    const ClampedLogRatio to_proxy = clamp_log_ratio(x.logp - x.statistic);
    const TokenLoss kl = divergence(Divergence::kK3, to_proxy.value);
    return {free + kl.value, (x.log_ratio.is_clamped ? 0.0 : free) + (to_proxy.is_clamped ? 0.0 : kl.grad_logp)};
  }
};

// Options: alpha, k; tau, of those who make the statistic; penalty. The statistic is 1 for a token that takes part, else 0. The
// value is ppo's, and so is the gradient, but that for A > 0 the part alpha of it goes to the top tokens (spread_gradient).
struct Simko {
  MAXRL_HOST_DEVICE static TokenLoss of(const LossTerms& terms, Token x) {
    if (x.advantage < 0.0 && x.statistic != 0.0) x.advantage *= terms.options[3];
    return Ppo::of(terms, x);
  }
  MAXRL_HOST_DEVICE static double spread(const LossTerms& terms, const RowPlan& row, const TokenLoss& token) {
    return row.advantage > 0.0 && row.statistic != 0.0 ? terms.options[0] * row.weight * token.grad_logp : 0.0;
  }
};

// One thread of a row comes here, so that the switch costs nothing beside reading the row.
MAXRL_HOST_DEVICE inline TokenLoss term_of(const LossTerms& terms, const Token& token) {
  switch (terms.loss) {
    case Loss::kPpo:
    case Loss::kGspo:
    case Loss::kLuspo: return Ppo::of(terms, token);
    case Loss::kCispo: return Cispo::of(terms, token);
    case Loss::kGmpo: return Gmpo::of(terms, token);
    case Loss::kVespo: return Vespo::of(terms, token);
    case Loss::kSapo: return Sapo::of(terms, token);
    case Loss::kDppo: return Dppo::of(terms, token);
    case Loss::kDispo: return Dispo::of(terms, token);
    case Loss::kTopr:
    case Loss::kToprToken: return Topr::of(terms, token);
    case Loss::kKlCov: return KlCov::of(terms, token);
    case Loss::kClipCov: return ClipCov::of(terms, token);
    case Loss::kLpReg: return LpReg::of(terms, token);
    case Loss::kSimko: return Simko::of(terms, token);
    default: return Reinforce::of(terms, token);
  }
}

MAXRL_HOST_DEVICE inline TokenLoss surrogate(const LossTerms& terms, const Token& token) {
  TokenLoss term = term_of(terms, token);
  if (token.advantage == 0.0 && !terms.has_term_without_advantage(token.statistic))
    term.value = term.grad_logp = 0.0;  // even if the ratio is NaN
  return term;
}

// Adds the row to the sums and returns its gradients. Each number is added as soon as it is known, which frees its registers.
template <typename Real>
MAXRL_HOST_DEVICE inline RowGrads evaluate_row(const TokenLossInputs<Real>& in, const LossTerms& terms, int64_t t,
                                               const RowPlan& row, const Softmax& softmax, LossSums& sums) {
  const double log_ratio = in.old_logprobs ? softmax.logp - static_cast<double>(in.old_logprobs[t]) : 0.0;
  const ClampedLogRatio to_old =
      clamp_log_ratio(in.sequence_log_ratio ? static_cast<double>(in.sequence_log_ratio[row.sequence]) : log_ratio);
  const double ratio = exp(to_old.value);
  sums.values[LossSums::kRatio] += ratio;
  sums.values[LossSums::kLogprobDiff] += fabs(log_ratio);
  TokenLoss token = surrogate(terms, {row.advantage, softmax.logp, softmax.p, log_ratio, to_old, ratio, row.statistic});
  if (in.spread) in.spread[t] = static_cast<Real>(Simko::spread(terms, row, token));
  sums.values[LossSums::kClippedLow] += token.clipped_low;
  sums.values[LossSums::kClippedHigh] += token.clipped_high;
  bool is_clamped = to_old.is_clamped;
  if (in.ref_logprobs) {
    const ClampedLogRatio to_ref = clamp_log_ratio(softmax.logp - static_cast<double>(in.ref_logprobs[t]));
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
  sums.values[LossSums::kLoss] += row.weight * token.value;
  return {row.weight * token.grad_logp, -row.weight * terms.entropy_coef};
}

// Moves the part `spread` of dL/dlogp in a row's gradient from the target to the top tokens, in equal shares. The gradient of
// the log-prob of token j is onehot(j) - p, so that only the logits of these tokens change.
template <typename Element, typename Real>
MAXRL_HOST_DEVICE inline void spread_gradient(const TokenLossInputs<Real>& in, const LossTerms& terms, int64_t t,
                                              Element* gradient) {
  const double moved = static_cast<double>(in.spread[t]) / in.rows.temperature_of(t);
  if (moved == 0.0 || !in.rows.is_target_valid(t)) return;  // without a valid target the row is NaN already
  const int k = static_cast<int>(terms.options[1]);
  const auto add = [gradient](int64_t token, double x) {
    gradient[token] = from_double<Element>(to_double(gradient[token]) + x);
  };
  double at_target = -moved;
  for (int i = 0; i < k; ++i) {
    const int64_t token = in.top_tokens[t * k + i];
    if (token == in.rows.targets[t])
      at_target += moved / k;
    else if (token >= 0 && token < in.rows.vocab_size)
      add(token, moved / k);
    else
      at_target = static_cast<double>(NAN);
  }
  add(in.rows.targets[t], at_target);
}

}  // namespace maxrl
