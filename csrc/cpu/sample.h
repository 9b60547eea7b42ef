// Sampling of tokens from a row of logits.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>

#include "../generation.h"
#include "dispatch.h"

namespace maxrl::cpu {

struct Sampled {
  int64_t token;
  float logprob;  // under the whole distribution at the temperature: before top-k, top-p and min-p;
                  // 0 at temperature 0
};

// Sets probabilities[i] = exp((z_i - top) / temperature), unnormalised, and returns their sum.
inline double exponentials(const float* logits, int64_t vocab, float top, double temperature,
                           float* probabilities) {
  const auto inverse = static_cast<float>(1.0 / temperature);
  double sum = 0.0;
  with_widest_floats([&](auto vectors) {
    using Vectors = decltype(vectors);
    const auto lowest = Vectors::all(Vectors::kLowestExponent);
    const auto of = [&](auto z) {
      return Vectors::exponential(Vectors::greater(lowest, (z - top) * inverse));
    };
    int64_t i = 0;
    for (; i + Vectors::kLanes <= vocab; i += Vectors::kLanes) {
      const auto e = of(Vectors::read(logits + i));
      Vectors::write(probabilities + i, e);
      for (int lane = 0; lane < Vectors::kLanes; ++lane) sum += e[lane];
    }
    for (; i < vocab; ++i) sum += probabilities[i] = of(Vectors::all(logits[i]))[0];
  });
  return sum;
}

// Applies top-k, top-p and min-p: sets the probabilities of excluded tokens to 0 and returns the
// sum of the others.
inline double filter(int64_t vocab, const SamplingOptions& options, double sum,
                     float* probabilities, int64_t* order) {
  const auto more_probable = [=](int64_t a, int64_t b) {
    return probabilities[a] != probabilities[b] ? probabilities[a] > probabilities[b] : a < b;
  };
  std::iota(order, order + vocab, int64_t{0});
  int64_t kept = vocab;
  if (options.top_k > 0 && options.top_k < vocab) {
    kept = options.top_k;
    std::nth_element(order, order + kept - 1, order + vocab, more_probable);
    sum = 0.0;
    for (int64_t i = 0; i < kept; ++i) sum += probabilities[order[i]];
  }
  if (options.top_p < 1.0) {
    double mass = 0.0;
    int64_t sorted = 0, nucleus = 0;
    while (nucleus < kept && (nucleus == 0 || mass < options.top_p * sum)) {
      if (nucleus == sorted) {  // sort a few at a time, because the nucleus is usually small
        sorted = std::min(kept, std::max<int64_t>(64, 8 * sorted));
        std::partial_sort(order + nucleus, order + sorted, order + kept, more_probable);
      }
      mass += probabilities[order[nucleus++]];
    }
    kept = nucleus;
  }
  for (int64_t i = kept; i < vocab; ++i) probabilities[order[i]] = 0.0f;
  double total = 0.0;
  const auto least = static_cast<float>(
      options.min_p);  // relative to the most probable token, which has exp(0) = 1
  for (int64_t i = 0; i < vocab; ++i) {
    if (probabilities[i] < least) probabilities[i] = 0.0f;
    total += probabilities[i];
  }
  return total;
}

// Draws from the distribution of one row of logits, by inverting its CDF in the order of the
// vocabulary. `probabilities` [vocab] and `order` [vocab] are scratch memory until the last draw.
// Logits that are not finite give log-probs that are not finite.
class Draws {
 public:
  Draws(const float* logits, int64_t vocab, const SamplingOptions& options, float* probabilities,
        int64_t* order)
      : logits_(logits), probabilities_(probabilities), vocab_(vocab),
        best_(std::max_element(logits, logits + vocab) - logits),
        is_greedy_(options.temperature == 0.0),
        temperature_(is_greedy_ ? 1.0 : options.temperature),
        sum_(exponentials(logits, vocab, logits[best_], temperature_, probabilities)),
        log_whole_(std::log(sum_)) {
    if (!is_greedy_ && ((options.top_k > 0 && options.top_k < vocab) || options.top_p < 1.0 ||
                        options.min_p > 0.0))
      sum_ = filter(vocab, options, sum_, probabilities, order);
  }

  // At u in [0, 1), not below that of the draw before: all draws are one pass over the vocabulary,
  // and equal tokens follow each other.
  Sampled at(float u) {
    if (is_greedy_) return {best_, sum_ == sum_ ? 0.0f : log_p(best_)};
    const double wanted = u * sum_;
    while (!(below_ > wanted) && passed_ < vocab_) below_ += probabilities_[passed_++];
    const int64_t token = below_ > wanted ? passed_ - 1 : best_;
    return {token, log_p(token)};
  }

 private:
  float log_p(int64_t token) const {
    return static_cast<float>((logits_[token] - logits_[best_]) / temperature_ - log_whole_);
  }

  const float *logits_, *probabilities_;
  int64_t vocab_, best_;
  bool is_greedy_;
  double temperature_, sum_, log_whole_;  // log_whole_: before the filters
  int64_t passed_ = 0;
  double below_ = 0.0;  // the probability of the first `passed_` tokens
};

}  // namespace maxrl::cpu
