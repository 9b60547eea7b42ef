#include "sample.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "dispatch.h"

namespace maxrl::cpu {
namespace {

// probabilities[i] = e^((z_i - top) / temperature); returns their sum.
double exponentials(const float* logits, int64_t vocab, float top, double temperature, float* probabilities) {
  const auto inverse = static_cast<float>(1.0 / temperature);
  double sum = 0.0;
  with_widest_floats([&](auto vectors) {
    using Vectors = decltype(vectors);
    const auto lowest = Vectors::all(Vectors::kLowestExponent);
    const auto of = [&](auto z) { return Vectors::exponential(Vectors::greater(lowest, (z - top) * inverse)); };
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

// Sets the probabilities that the options leave out to 0; returns the sum of the others.
double filter(int64_t vocab, const SamplingOptions& options, double sum, float* probabilities, int64_t* order) {
  const auto likelier = [=](int64_t a, int64_t b) {
    return probabilities[a] != probabilities[b] ? probabilities[a] > probabilities[b] : a < b;
  };
  std::iota(order, order + vocab, int64_t{0});
  int64_t kept = vocab;
  if (options.top_k > 0 && options.top_k < vocab) {
    kept = options.top_k;
    std::nth_element(order, order + kept - 1, order + vocab, likelier);
    sum = 0.0;
    for (int64_t i = 0; i < kept; ++i) sum += probabilities[order[i]];
  }
  if (options.top_p < 1.0) {
    double mass = 0.0;
    int64_t sorted = 0, nucleus = 0;
    while (nucleus < kept && (nucleus == 0 || mass < options.top_p * sum)) {
      if (nucleus == sorted) {  // sorts a few at a time, since the nucleus is usually small
        sorted = std::min(kept, std::max<int64_t>(64, 8 * sorted));
        std::partial_sort(order + nucleus, order + sorted, order + kept, likelier);
      }
      mass += probabilities[order[nucleus++]];
    }
    kept = nucleus;
  }
  for (int64_t i = kept; i < vocab; ++i) probabilities[order[i]] = 0.0f;
  double total = 0.0;
  const auto least = static_cast<float>(options.min_p);  // the greatest probability is e^0 = 1 here
  for (int64_t i = 0; i < vocab; ++i) {
    if (probabilities[i] < least) probabilities[i] = 0.0f;
    total += probabilities[i];
  }
  return total;
}

}  // namespace

Sampled sample(const float* logits, int64_t vocab, const SamplingOptions& options, float u, float* probabilities, int64_t* order) {
  const int64_t likeliest = std::max_element(logits, logits + vocab) - logits;
  const float top = logits[likeliest];
  double sum = exponentials(logits, vocab, top, 1.0, probabilities);
  const auto log_p = [&](int64_t token, double temperature, double total) {
    return static_cast<float>((logits[token] - top) / temperature - std::log(total));
  };
  const double raw_sum = sum;
  if (options.temperature == 0.0)
    return {likeliest, sum == sum ? 0.0f : log_p(likeliest, 1.0, sum), log_p(likeliest, 1.0, sum)};
  if (options.temperature != 1.0) sum = exponentials(logits, vocab, top, options.temperature, probabilities);
  if ((options.top_k > 0 && options.top_k < vocab) || options.top_p < 1.0 || options.min_p > 0.0)
    sum = filter(vocab, options, sum, probabilities, order);
  const double wanted = u * sum;
  int64_t token = likeliest;
  double below = 0.0;
  for (int64_t i = 0; i < vocab; ++i) {
    below += probabilities[i];
    if (below > wanted) {
      token = i;
      break;
    }
  }
  return {token, log_p(token, options.temperature, sum), log_p(token, 1.0, raw_sum)};
}

}  // namespace maxrl::cpu
