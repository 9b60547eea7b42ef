// The loss of PACS and its gradient in the reward proxies, on a CPU, one group at a time.
#include <algorithm>
#include <limits>
#include <vector>

#include "../kernels.h"

namespace maxrl::cpu {
namespace {

constexpr int64_t kParallelThreshold = 1 << 13;  // rollouts
constexpr int64_t kGroupsPerPiece = 64;          // whose sums are added in order, for any number of threads
constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

template <typename Real>
int64_t group_loss(const Pacs<Real>& in, int64_t begin, int64_t end, double* sums) {
  const int64_t n = end - begin;
  const double divisor = in.divisor();
  double mean = 0.0, squares = 0.0;
  int64_t num_correct = 0;
  for (int64_t i = begin; i < end; ++i) {
    const double label = in.labels[i];
    if (label != 0.0 && label != 1.0) return i;
    num_correct += label == 1.0;
    mean += (static_cast<double>(in.proxies[i]) - in.proxies[begin]) / static_cast<double>(n);
  }
  if (n > 0) mean += in.proxies[begin];  // so that equal proxies have exactly this mean; likewise for q below
  for (int64_t i = begin; i < end; ++i) squares += (in.proxies[i] - mean) * (in.proxies[i] - mean);
  const GroupScore score = group_score(in.options.score, n, mean, squares);
  double mean_q = 0.0, moment_q = 0.0;
  const auto grad_at = [&](int64_t i) {
    const double psi = (in.proxies[i] - score.centre) * score.multiplier, label = in.labels[i];
    return class_weight(in.options.balanced, n, num_correct, label == 1.0) * cross_entropy_grad(psi, label) / divisor;
  };
  const double first_q = n > 0 ? grad_at(begin) : 0.0;
  for (int64_t i = begin; i < end; ++i) {
    const double r = in.proxies[i], label = in.labels[i], psi = (r - score.centre) * score.multiplier;
    const double entropy = cross_entropy(psi, label);
    const double loss = class_weight(in.options.balanced, n, num_correct, label == 1.0) * entropy;
    const double q = grad_at(i);
    in.cross_entropy[i] = static_cast<Real>(entropy);
    mean_q += (q - first_q) / static_cast<double>(n);
    moment_q += q * (r - score.centre);
    sums[PacsSums::kLoss] += loss / divisor;
    sums[PacsSums::kAccurate] += (psi > 0.0) == (label == 1.0);
    sums[PacsSums::kProxy] += r;
    sums[label == 1.0 ? PacsSums::kScoreCorrect : PacsSums::kScoreWrong] += psi;
  }
  mean_q += first_q;
  for (int64_t i = begin; i < end; ++i)
    in.gradient[i] = static_cast<Real>(proxy_grad(in.options.score, score, n, in.proxies[i], grad_at(i), mean_q, moment_q));
  sums[PacsSums::kCorrect] += static_cast<double>(num_correct);
  return kNone;
}

}  // namespace

template <typename Real>
int64_t pacs_loss(const Pacs<Real>& in, int num_threads) {
  const int64_t pieces = (in.num_groups + kGroupsPerPiece - 1) / kGroupsPerPiece;
  std::vector<double> partial(pieces * PacsSums::kSize, 0.0);
  int64_t unusable = kNone;
#pragma omp parallel for num_threads(num_threads) if (in.begin(in.num_groups) >= kParallelThreshold) reduction(min : unusable)
  for (int64_t piece = 0; piece < pieces; ++piece)
    for (int64_t g = piece * kGroupsPerPiece; g < std::min((piece + 1) * kGroupsPerPiece, in.num_groups); ++g)
      unusable = std::min(unusable, group_loss(in, in.begin(g), in.begin(g + 1), &partial[piece * PacsSums::kSize]));
  if (unusable != kNone) return unusable;
  double sums[PacsSums::kSize] = {};
  for (size_t i = 0; i < partial.size(); ++i) sums[i % PacsSums::kSize] += partial[i];
  write_results(in, sums);
  return -1;
}

template int64_t pacs_loss(const Pacs<float>&, int);
template int64_t pacs_loss(const Pacs<double>&, int);

}  // namespace maxrl::cpu
