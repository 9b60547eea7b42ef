#include "rank_transform.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels.h"

namespace maxrl::cpu {
namespace {

// Below this many rewards a team of threads costs more than it saves (measured: about 5 us to start one).
constexpr int64_t kParallelThreshold = 1 << 14;

template <typename Real>
void transform_group(const Real* rewards, const double* weights, Real* advantages, int64_t size, bool centred,
                     std::vector<int32_t>& order, std::vector<double>& prefix) {
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [rewards](int32_t a, int32_t b) { return sorts_before(rewards[a], a, rewards[b], b); });
  prefix[0] = 0.0;
  double sum = 0.0;
  for (int64_t i = 1; i < size; ++i) {
    prefix[i] = prefix[i - 1] + weighted_gap(weights[i - 1], rewards[order[i - 1]], rewards[order[i]]);
    sum += prefix[i];
  }
  const double mean = centred ? sum / size : 0.0;
  for (int64_t i = 0; i < size; ++i) advantages[order[i]] = static_cast<Real>(prefix[i] - mean);
}

}  // namespace

template <typename Real>
void rank_transform(const Real* rewards, const double* weights, Real* advantages, int64_t num_groups, int64_t group_size,
                    bool centred) {
  if (group_size == 0) return;
#pragma omp parallel if (num_groups * group_size >= kParallelThreshold)
  {
    std::vector<int32_t> order(group_size);
    std::vector<double> prefix(group_size);
#pragma omp for schedule(static)
    for (int64_t g = 0; g < num_groups; ++g)
      transform_group(rewards + g * group_size, weights, advantages + g * group_size, group_size, centred, order, prefix);
  }
}

template void rank_transform(const float*, const double*, float*, int64_t, int64_t, bool);
template void rank_transform(const double*, const double*, double*, int64_t, int64_t, bool);

}  // namespace maxrl::cpu
