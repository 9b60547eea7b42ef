// Group advantages on a CPU, one group at a time.
#include "../group_advantage.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

namespace maxrl::cpu {
namespace {

constexpr int64_t kManyRewards = 1 << 12;  // below, starting threads costs more than it saves

using Key = std::pair<double, int64_t>;  // a reward and its place

// Replaces the n > 0 rewards of a group by their rank transform. `keys` is [n].
void rank_transform(double* rewards, int64_t n, const double* offset, const double* slope,
                    Key* keys) {
  for (int64_t i = 0; i < n; ++i) keys[i] = {rewards[i], i};
  std::sort(keys, keys + n);
  double lower = 0.0, base = 0.0, sum = 0.0;
  for (int64_t j = 0; j < n; ++j) {
    const double gap = keys[j].first - lower;
    lower = keys[j].first;
    base += offset[j] * gap;
    if (j > 0) sum += slope[j] * gap;
    keys[j].first = sum;
  }
  for (int64_t j = 0; j < n; ++j) rewards[keys[j].second] = base + keys[j].first;
}

// Replaces the n > 0 rewards of a group by (r_i - b) m.
template <typename Real>
void normalise(const GroupAdvantage<Real>& in, double* rewards, int64_t n) {
  const double size = static_cast<double>(n), low = *std::min_element(rewards, rewards + n);
  double mean = 0.0, squares = 0.0;  // of the distances to the smallest
  for (int64_t i = 0; i < n; ++i) mean += rewards[i] - low;
  mean /= size;
  if (in.scale == Scale::kStd)
    for (int64_t i = 0; i < n; ++i) {
      const double distance = rewards[i] - low - mean;
      squares += distance * distance;
    }
  const double factor = in.multiplier(size, low + mean, squares);
  for (int64_t i = 0; i < n; ++i)
    rewards[i] = (in.centred ? rewards[i] - low - mean : rewards[i]) * factor;
}

// Returns whether all advantages are finite.
template <typename Real>
int64_t group_advantage(const GroupAdvantage<Real>& in, int num_threads) {
  const int64_t size = in.group_size;
  bool are_finite = true;
#pragma omp parallel num_threads(num_threads) \
    reduction(&& : are_finite) if (in.num_groups * size >= kManyRewards)
  {
    std::vector<double> values(size);
    std::vector<Key> keys(in.tables ? size : 0);
    double* const rewards = values.data();
#pragma omp for schedule(static)
    for (int64_t group = 0; group < in.num_groups; ++group) {
      const int64_t begin = group * size, end = begin + size;
      int64_t n = 0;
      bool usable = true;
      for (int64_t i = begin; i < end; ++i)
        if (in.exists(i)) {
          usable &= in.accepts(in.rewards[i]);
          rewards[n++] = in.rewards[i];
        }
      if (!usable)
        std::fill_n(rewards, n, std::numeric_limits<double>::quiet_NaN());
      else if (n > 0 && in.tables)
        rank_transform(rewards, n, in.offsets(group), in.offsets(group) + size, keys.data());
      else if (n > 0)
        normalise(in, rewards, n);
      n = 0;
      for (int64_t i = begin; i < end; ++i) {  // x + 0.0 is never -0.0
        in.advantages[i] = in.exists(i) ? static_cast<Real>(rewards[n++] + 0.0) : Real(0);
        are_finite = are_finite && std::isfinite(in.advantages[i]);
      }
    }
  }
  return are_finite;
}

const bool defined =
    define_kernel("group_advantage", group_advantage<float>, group_advantage<double>);

}  // namespace
}  // namespace maxrl::cpu
