// The loss of PACS on one group, as formulas that the CPU and the CUDA kernel share. For a group of
// n rollouts with reward proxies r and labels R in {0, 1}:
//     score   psi_i = (r_i - c) m          c the mean of r, or 0; m depends on the kind
//     loss    L = (1/B) sum_i w_i (log(1 + e^psi_i) - R_i psi_i)
//     grads   q_i = dL/dpsi_i = w_i (sigmoid(psi_i) - R_i) / B, and through the mean and the
//     standard deviation in the score
//             dL/dr_i = m (q_i - mean q), with one more term for the standard deviation of grpo
#pragma once
#include <cmath>
#include <cstdint>

#include "kernel.h"

namespace maxrl {

enum class Score { kRloo, kGrpo, kDrGrpo, kNaive };
template <>
inline constexpr const char* kNamesOf<Score>[4] = {"rloo", "grpo", "dr_grpo", "naive"};

struct PacsSums {  // over the rollouts; kAccurate and kCorrect are numbers of rollouts
  enum Name { kLoss, kAccurate, kProxy, kScoreCorrect, kScoreWrong, kCorrect, kSize };
};

// Means over all rollouts; the scores' over those that are correct and over those that are wrong, 0
// if there are none.
struct PacsMetrics {
  enum Name { kAccuracy, kRewardProxy, kScoreCorrect, kScoreWrong, kSize };
  // The fields of PacsMetrics in maxrl_fast/ops/pacs_kernel.py, which compares them when it is
  // imported.
  static constexpr const char* kNames[kSize] = {"accuracy", "reward_proxy", "score_correct",
                                                "score_wrong"};
  static_assert(kNames[kSize - 1] != nullptr);
};

// Rollouts in groups of group_size, or, with `offsets` [num_groups + 1], in runs of uneven length.
// Real: float or double. The CPU kernel returns the first rollout whose label is neither 0 nor 1,
// or -1; on a GPU its group is NaN.
template <typename Real>
struct Pacs {
  int64_t num_rollouts, num_groups, group_size;
  const int64_t* offsets;
  const Real* proxies;  // [S]
  const Real* labels;  // [S], 0 or 1
  const double* denominators;  // [1], B, or null: then `denominator`
  double denominator;
  Score score;
  bool balanced;  // class weights n / (2C) and n / (2F) in groups that have both classes
  Real* loss;  // [1]
  double* metrics;  // [PacsMetrics::kSize]
  Real* cross_entropy;  // [S], without weights
  Real* gradient;  // [S], dL/dr
  double* workspace;  // zeros, [workspace_size(PacsSums::kSize)]; not used on a CPU

  MAXRL_FIELDS(num_rollouts, num_groups, group_size, offsets, proxies, labels, denominators,
               denominator, score, balanced, loss, metrics, cross_entropy, gradient, workspace)

  MAXRL_HOST_DEVICE double divisor() const { return denominators ? *denominators : denominator; }
  MAXRL_HOST_DEVICE int64_t begin(int64_t g) const { return offsets ? offsets[g] : g * group_size; }
};

struct GroupScore {
  double centre, multiplier, deviation;  // deviation: the sample standard deviation of r, for kGrpo
};

// mean: of r; squares: the sum of (r - mean)^2.
MAXRL_HOST_DEVICE inline GroupScore group_score(Score kind, int64_t n, double mean,
                                                double squares) {
  if (kind == Score::kNaive) return {0.0, 1.0, 0.0};
  if (n < 2) return {mean, 0.0, 0.0};
  const double others = static_cast<double>(n - 1);
  if (kind == Score::kRloo) return {mean, n / others, 0.0};
  if (kind == Score::kDrGrpo) return {mean, 1.0, 0.0};
  const double deviation = sqrt(squares / others);
  // If the squares overflow double, the result must not be that of equal proxies.
  return {mean, deviation - deviation == 0.0 ? 1.0 / (deviation + 1e-6) : static_cast<double>(NAN),
          deviation};
}

MAXRL_HOST_DEVICE inline double class_weight(bool balanced, int64_t n, int64_t num_correct,
                                             bool is_correct) {
  if (!balanced || num_correct == 0 || num_correct == n) return 1.0;
  return static_cast<double>(n) /
         (2.0 * static_cast<double>(is_correct ? num_correct : n - num_correct));
}

// The cross-entropy of the label under sigmoid(psi), and its gradient in psi.
MAXRL_HOST_DEVICE inline double cross_entropy(double psi, double label) {
  return fmax(psi, 0.0) - psi * label + log1p(exp(-fabs(psi)));
}
MAXRL_HOST_DEVICE inline double cross_entropy_grad(double psi, double label) {
  const double tail = exp(-fabs(psi));  // the odds of the less likely class
  return (psi >= 0.0 ? 1.0 : tail) / (1.0 + tail) - label;
}

// dL/dr from q, its mean, and the sum over the group of q (r - centre).
MAXRL_HOST_DEVICE inline double proxy_grad(Score kind, const GroupScore& s, int64_t n, double r,
                                           double q, double mean_q, double moment_q) {
  if (kind == Score::kNaive) return q;
  double grad = s.multiplier * (q - mean_q);
  // The derivative of the deviation, (r - mean) / ((n - 1) deviation); 0 if all proxies are equal.
  if (kind == Score::kGrpo && s.deviation > 0.0)
    grad -= s.multiplier * s.multiplier * moment_q * (r - s.centre) /
            (static_cast<double>(n - 1) * s.deviation);
  return grad;
}

// Computes a group, rollouts begin to end - 1, and adds what it gives to `sums`. A warp computes it
// on a GPU: lane i of `lanes` has the rollouts begin + i, begin + i + lanes, ..., and sum_lanes
// adds a number of each lane. Where a label is neither 0 nor 1 the group is NaN.
template <typename Real, typename SumLanes>
MAXRL_HOST_DEVICE inline void pacs_group(const Pacs<Real>& in, int64_t begin, int64_t end, int lane,
                                         int lanes, const SumLanes& sum_lanes, double* sums) {
  const int64_t n = end - begin;
  if (n <= 0) return;
  const double divisor = in.divisor(), size = static_cast<double>(n);
  // Distances from the first proxy, so that equal proxies have exactly the distance 0 from their
  // mean; likewise for q below.
  const double first = in.proxies[begin];
  double mean = 0.0, correct = 0.0, squares = 0.0;
  for (int64_t i = begin + lane; i < end; i += lanes) {
    mean += (in.proxies[i] - first) / size;
    correct += in.labels[i] == Real(0)   ? 0.0
               : in.labels[i] == Real(1) ? 1.0
                                         : static_cast<double>(NAN);
  }
  correct = sum_lanes(correct);
  mean = sum_lanes(mean) + first;
  for (int64_t i = begin + lane; i < end; i += lanes)
    squares += (in.proxies[i] - mean) * (in.proxies[i] - mean);
  const GroupScore score = group_score(in.score, n, mean, sum_lanes(squares));
  const auto num_correct = static_cast<int64_t>(correct == correct ? correct : 0.0);
  const double poison = correct * 0.0;
  const auto weight_of = [&](double label) {
    return class_weight(in.balanced, n, num_correct, label == 1.0);
  };
  const auto grad_at = [&](int64_t i) {
    const double psi = (in.proxies[i] - score.centre) * score.multiplier, label = in.labels[i];
    return weight_of(label) * cross_entropy_grad(psi, label) / divisor + poison;
  };
  const double first_q = grad_at(begin);
  double mean_q = 0.0, moment_q = 0.0;
  for (int64_t i = begin + lane; i < end; i += lanes) {
    const double r = in.proxies[i], label = in.labels[i],
                 psi = (r - score.centre) * score.multiplier;
    const double entropy = cross_entropy(psi, label) + poison, q = grad_at(i);
    in.cross_entropy[i] = static_cast<Real>(entropy);
    mean_q += (q - first_q) / size;
    moment_q += q * (r - score.centre);
    sums[PacsSums::kLoss] += weight_of(label) * entropy / divisor;
    sums[PacsSums::kAccurate] += (psi > 0.0) == (label == 1.0);
    sums[PacsSums::kProxy] += r;
    sums[PacsSums::kScoreCorrect] +=
        label == 1.0 ? psi : 0.0;  // no computed index: it would move sums out of registers
    sums[PacsSums::kScoreWrong] += label == 1.0 ? 0.0 : psi;
    sums[PacsSums::kCorrect] += label == 1.0;
  }
  mean_q = sum_lanes(mean_q) + first_q;
  moment_q = sum_lanes(moment_q);
  for (int64_t i = begin + lane; i < end; i += lanes)
    in.gradient[i] = static_cast<Real>(
        proxy_grad(in.score, score, n, in.proxies[i], grad_at(i), mean_q, moment_q));
}

template <typename Real>
MAXRL_HOST_DEVICE inline void write_results(const Pacs<Real>& in, const double* sums) {
  const double size = static_cast<double>(in.num_rollouts), correct = sums[PacsSums::kCorrect];
  *in.loss = static_cast<Real>(sums[PacsSums::kLoss]);
  in.metrics[PacsMetrics::kAccuracy] = sums[PacsSums::kAccurate] / fmax(size, 1.0);
  in.metrics[PacsMetrics::kRewardProxy] = sums[PacsSums::kProxy] / fmax(size, 1.0);
  in.metrics[PacsMetrics::kScoreCorrect] = sums[PacsSums::kScoreCorrect] / fmax(correct, 1.0);
  in.metrics[PacsMetrics::kScoreWrong] = sums[PacsSums::kScoreWrong] / fmax(size - correct, 1.0);
}

// Packed sequences whose log-ratios are summed: r_s = beta sum_t (logp_t - ref_t) over the tokens
// that are not masked.
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
