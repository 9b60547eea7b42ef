// Sampling of one token from a row of logits.
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

// Samples by inverting the CDF in the order of the vocabulary, at u in [0, 1). `probabilities`
// [vocab] and `order` [vocab] are scratch memory. Logits that are not finite give log-probs that
// are not finite.
inline Sampled sample(const float* logits, int64_t vocab, const SamplingOptions& options, float u,
                      float* probabilities, int64_t* order) {
  const int64_t best = std::max_element(logits, logits + vocab) - logits;
  const float top = logits[best];
  const bool is_greedy = options.temperature == 0.0;
  const double temperature = is_greedy ? 1.0 : options.temperature;
  const double whole = exponentials(logits, vocab, top, temperature, probabilities);
  const auto log_p = [&](int64_t token) {
    return static_cast<float>((logits[token] - top) / temperature - std::log(whole));
  };
  if (is_greedy) return {best, whole == whole ? 0.0f : log_p(best)};
  double sum = whole;
  if ((options.top_k > 0 && options.top_k < vocab) || options.top_p < 1.0 || options.min_p > 0.0)
    sum = filter(vocab, options, sum, probabilities, order);
  const double wanted = u * sum;
  int64_t token = best;
  double below = 0.0;
  for (int64_t i = 0; i < vocab; ++i) {
    below += probabilities[i];
    if (below > wanted) {
      token = i;
      break;
    }
  }
  return {token, log_p(token)};
}

}  // namespace maxrl::cpu
