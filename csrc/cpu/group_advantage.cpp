// Group advantages on a CPU, one tile (tile.h) at a time.
#include "../group_advantage.h"

#include <omp.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "dispatch.h"
#include "tile.h"

namespace maxrl::cpu {
namespace {

constexpr int64_t kParallelThreshold =
    1 << 12;  // rewards; below, starting threads costs more than it saves (about 5 us)
constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

// Computes t.ranks from t.values, whose empty rows must come last.
template <int kLanes>
void rank_by_counting(Tile<kLanes>& t) {
  using Lanes = typename Tile<kLanes>::Lanes;
  const Lanes one = t.all(1.0), zero = t.all(0.0),
              last = t.all(std::numeric_limits<double>::infinity());
  for (int32_t i = 0; i < t.rows; ++i) {
    const Lanes value = t.where_filled(i, t.values[i], last);
    Lanes rank = zero;
    for (int32_t j = 0; j < i; ++j) {
      const Lanes before = t.values[j] <= value ? one : zero;
      rank += before;
      t.ranks[j] += one - before;
    }
    t.values[i] = value;
    t.ranks[i] = rank;
  }
}

// Replaces the n > 0 sorted rewards of a group by their advantages minus a term that all have in
// common, and returns this term.
double transform_sorted(double* sorted, int32_t n, const Tables& tables) {
  const double* table = tables.of(n);
  const double *offset = table, *slope = table + n;
  double lower = sorted[0], base = offset[0] * lower, prefix = 0.0;
  sorted[0] = 0.0;
  for (int32_t j = 1; j < n; ++j) {
    const double gap = sorted[j] - lower;
    lower = sorted[j];
    base += offset[j] * gap;
    prefix += slope[j] * gap;
    sorted[j] = prefix;
  }
  return base;
}

template <int kLanes>
void transform_by_rank(Tile<kLanes>& t, const Tables& tables) {
  double* sorted = t.sorted.data();
  if (t.is_spread) {
    const auto n = static_cast<int32_t>(t.n[0]);
    double* values = t.column(t.values, 0);
    auto* keys = t.keys.data();
    for (int32_t i = 0; i < n; ++i) keys[i] = {values[i], i};
    std::sort(keys, keys + n, [](const auto& a, const auto& b) { return a.reward < b.reward; });
    for (int32_t i = 0; i < n; ++i) sorted[i] = keys[i].reward;
    const double base = n > 0 ? transform_sorted(sorted, n, tables) : 0.0;
    for (int32_t i = 0; i < n; ++i) values[keys[i].place] = base + sorted[i];
    return;
  }
  rank_by_counting(t);
  for (int32_t group = 0; group < t.num_groups; ++group) {
    const auto n = static_cast<int32_t>(t.n[group]);
    double *values = t.column(t.values, group), *ranks = t.column(t.ranks, group);
    for (int32_t i = 0; i < n; ++i)
      sorted[static_cast<int32_t>(ranks[i * kLanes])] = values[i * kLanes];
    const double base = n > 0 ? transform_sorted(sorted, n, tables) : 0.0;
    for (int32_t i = 0; i < n; ++i)
      values[i * kLanes] = base + sorted[static_cast<int32_t>(ranks[i * kLanes])];
    for (int32_t i = n; i < t.rows; ++i) values[i * kLanes] = 0.0;
  }
}

// Replaces zeros and ones by the entries of the table for the number of ones.
template <int kLanes>
void look_up(Tile<kLanes>& t, const Tables& tables) {
  for (int32_t group = 0; group < t.num_groups; ++group) {
    const auto n = static_cast<int32_t>(t.n[group]);
    double* values = t.column(t.values, group);
    int32_t correct = 0;
    for (int32_t i = 0; i < n; ++i) correct += values[i * t.stride()] == 1.0;
    const double* wrong = tables.of(n) + correct;
    for (int32_t i = 0; i < n; ++i)
      values[i * t.stride()] = values[i * t.stride()] == 1.0 ? wrong[n + 1] : *wrong;
  }
}

template <bool precise, int kLanes, typename Term>
auto exact_sum(const Tile<kLanes>& t, typename Tile<kLanes>::Lanes bound, const Term& term) {
  using Lanes = typename Tile<kLanes>::Lanes;
  const ExactSum<Lanes> sum(bound, 2.0 * powers_of_two_above(t.n));
  const Lanes zero = t.all(0.0);
  Lanes coarse = zero, fine = zero;
  for (int32_t i = 0; i < t.rows; ++i) {
    const Lanes x = t.where_filled(i, term(i), zero), part = sum.coarse(x);
    coarse += part;
    if (precise) fine += sum.fine(x - part);
  }
  const auto add = [](double a, double b) { return a + b; };
  return t.over_group(coarse, add) + t.over_group(fine, add);
}

// Multiplies the rewards of each group by its safe_scale, and returns these.
template <int kLanes>
auto rescale(Tile<kLanes>& t, const Formula& f) {
  using Lanes = typename Tile<kLanes>::Lanes;
  const Lanes zero = t.all(0.0);
  Lanes largest{}, scale;
  for (int32_t i = 0; i < t.rows; ++i) {
    const Lanes magnitude = t.values[i] < zero ? -t.values[i] : t.values[i];
    largest = magnitude > largest ? magnitude : largest;
  }
  largest = t.over_group(largest, [](double a, double b) { return std::max(a, b); });
  bool is_ordinary = true;
  for (int lane = 0; lane < kLanes; ++lane) {
    scale[lane] = safe_scale(f, largest[lane]);
    is_ordinary &= scale[lane] == 1.0;
  }
  if (is_ordinary) return scale;
  for (int32_t i = 0; i < t.rows; ++i) t.values[i] *= scale;
  return scale;
}

// A_i = (r_i - b) m, in place, of rewards multiplied by `scale`. Moments are computed from the
// distances to the smallest reward: they are 0 for equal rewards, and a large offset costs no
// precision.
template <bool precise, int kLanes>
void normalise(Tile<kLanes>& t, const Formula& f, typename Tile<kLanes>::Lanes scale) {
  using Lanes = typename Tile<kLanes>::Lanes;
  const Lanes infinity = t.all(std::numeric_limits<double>::infinity());
  Lanes low{}, mean{}, squares{}, origin{}, shift{}, factor;  // b is origin + shift
  if (f.needs_moments()) {
    Lanes high = -infinity;
    low = infinity;
    for (int32_t i = 0; i < t.rows; ++i) {
      const Lanes lower = t.where_filled(i, t.values[i], infinity),
                  higher = t.where_filled(i, t.values[i], -infinity);
      low = lower < low ? lower : low;
      high = higher > high ? higher : high;
    }
    low = t.over_group(low, [](double a, double b) { return std::min(a, b); });
    high = t.over_group(high, [](double a, double b) { return std::max(a, b); });
    const Lanes bound = powers_of_two_above(high - low);
    mean = exact_sum<precise>(t, bound, [&](int32_t i) { return t.values[i] - low; }) / t.n;
    if (f.scale == Scale::kStd)
      squares = exact_sum<precise>(t, bound * bound, [&](int32_t i) {
        const Lanes distance = (t.values[i] - low) - mean;
        return distance * distance;
      });
    if (f.centred) origin = low, shift = mean;
  }
  for (int lane = 0; lane < kLanes; ++lane)
    factor[lane] = multiplier(f, t.n[lane], low[lane] + mean[lane], squares[lane], scale[lane]);
  const Lanes unscale = f.is_ratio() ? t.all(1.0) : 1.0 / scale;
  for (int32_t i = 0; i < t.rows; ++i)
    t.values[i] = (t.values[i] - origin - shift) * factor * unscale;
}

// Reads groups first to first + num_groups - 1 into a tile.
template <int kLanes, typename Args>
void gather(const Args& a, int64_t first, int32_t num_groups, Tile<kLanes>& t) {
  const Groups& groups = a.groups;
  const bool is_direct = !groups.order && !groups.valid;
  t.num_groups = num_groups;
  int64_t largest = 0;
  for (int64_t g = first; g < first + num_groups; ++g)
    largest = std::max(largest, groups.begin(g + 1) - groups.begin(g));
  t.is_spread = largest > kLargestLane;  // then it is the only one
  t.rows = static_cast<int32_t>(t.is_spread ? (largest + kLanes - 1) / kLanes : largest);
  t.n = t.filled = t.all(0.0);
  if (!is_direct || groups.offsets || num_groups < kLanes)
    std::fill_n(t.values, t.rows, t.all(0.0));

  for (int32_t group = 0; group < num_groups; ++group) {
    const int64_t begin = groups.begin(first + group), end = groups.begin(first + group + 1),
                  stride = t.stride();
    double* values = t.column(t.values, group);
    int64_t n = 0;
    if (is_direct) {
      for (; n < end - begin; ++n) values[n * stride] = to_double(a.rewards[begin + n]);
    } else {
      for (int64_t position = begin; position < end; ++position) {
        const int64_t index = groups.index(position);
        if (groups.exists(index)) values[n++ * stride] = to_double(a.rewards[index]);
      }
    }
    if (t.is_spread) {
      t.n = t.all(n);
      for (int lane = 0; lane < kLanes; ++lane) t.filled[lane] = (n - lane + kLanes - 1) / kLanes;
    } else {
      t.n[group] = t.filled[group] = n;
    }
  }
  t.is_full = true;
  for (int lane = 0; lane < kLanes; ++lane) t.is_full &= t.filled[lane] == t.rows;
}

// Returns the first position with an unusable reward in the groups of a tile, or kNone.
template <int kLanes, typename Args>
int64_t first_unusable(const Args& a, int64_t first, const Tile<kLanes>& t) {
  auto poison = t.all(
      0.0);  // NaN after a reward that is not finite, or above 0 after one that is neither 0 nor 1
  if (a.formula.kind == Kind::kBinary)
    for (int32_t i = 0; i < t.rows; ++i)
      poison += (t.values[i] == t.all(0.0)) | (t.values[i] == t.all(1.0)) ? t.all(0.0) : t.all(1.0);
  else
    for (int32_t i = 0; i < t.rows; ++i) poison += t.values[i] * 0.0;
  bool all_usable = true;
  for (int lane = 0; lane < kLanes; ++lane) all_usable &= poison[lane] == 0.0;
  if (all_usable) return kNone;
  for (int64_t position = a.groups.begin(first); position < a.groups.begin(first + t.num_groups);
       ++position) {
    const int64_t index = a.groups.index(position);
    if (a.groups.exists(index) && !a.formula.accepts(to_double(a.rewards[index]))) return position;
  }
  return kNone;
}

// Writes the advantages of the groups of a tile; 0 for rollouts that are not valid. x + 0.0 is
// never -0.0.
template <int kLanes, typename Args>
void scatter(const Args& a, int64_t first, Tile<kLanes>& t) {
  using Advantage = typename Args::Advantage;
  const Groups& groups = a.groups;
  for (int32_t group = 0; group < t.num_groups; ++group) {
    const int64_t begin = groups.begin(first + group), end = groups.begin(first + group + 1),
                  stride = t.stride();
    const double* values = t.column(t.values, group);
    if (!groups.order && !groups.valid) {
      for (int64_t i = 0; i < end - begin; ++i)
        a.advantages[begin + i] = from_double<Advantage>(values[i * stride] + 0.0);
      continue;
    }
    int64_t n = 0;
    for (int64_t position = begin; position < end; ++position) {
      const int64_t index = groups.index(position);
      a.advantages[index] =
          from_double<Advantage>(groups.exists(index) ? values[n++ * stride] + 0.0 : 0.0);
    }
  }
}

// Computes groups first to first + num_groups - 1 in a tile. Returns the first position with an
// unusable reward, or kNone.
template <int kLanes, typename Args>
int64_t evaluate(const Args& a, int64_t first, int32_t num_groups, Tile<kLanes>& t) {
  gather(a, first, num_groups, t);
  const int64_t unusable = first_unusable(a, first, t);
  if (unusable != kNone) return unusable;
  constexpr bool is_double = std::is_same_v<typename Args::Reward, double>;
  auto scale = t.all(1.0);
  if constexpr (is_double) scale = rescale(t, a.formula);
  switch (a.formula.kind) {
    case Kind::kMoments: normalise<is_double>(t, a.formula, scale); break;
    case Kind::kRank:
      transform_by_rank(t, a.tables);
      for (int32_t i = 0; i < t.rows; ++i) t.values[i] *= 1.0 / scale;
      break;
    case Kind::kBinary: look_up(t, a.tables);
  }
  scatter(a, first, t);
  return kNone;
}

template <int kLanes, typename Args>
inline int64_t evaluate_share(const Args& a, int64_t largest, int64_t thread, int64_t num_threads) {
  Tile<kLanes> tile(largest);
  const int64_t step =
      largest > kLargestLane ? 1 : kLanes;  // with one large group, every group is computed alone
  const int64_t steps = (a.groups.num_groups + step - 1) / step;
  for (int64_t s = steps * thread / num_threads; s < steps * (thread + 1) / num_threads; ++s) {
    const auto num_groups = static_cast<int32_t>(std::min(step, a.groups.num_groups - s * step));
    const int64_t unusable = evaluate(a, s * step, num_groups, tile);
    if (unusable != kNone) return unusable;
  }
  return kNone;
}

// Returns the first position (in the order of groups) of a reward that is not finite, or for
// Kind::kBinary neither 0 nor 1; -1 if all rewards are usable. Otherwise the written advantages are
// wrong.
template <typename Reward, typename Advantage>
int64_t group_advantage(const GroupAdvantage<Reward, Advantage>& in, int num_threads) {
  const Groups& groups = in.groups;
  int64_t largest = groups.group_size;
  for (int64_t g = 0; groups.offsets && g < groups.num_groups; ++g)
    largest = std::max(largest, groups.begin(g + 1) - groups.begin(g));
  int64_t unusable = kNone;
#pragma omp parallel num_threads(num_threads) if (groups.num_rewards >= kParallelThreshold) \
    reduction(min : unusable)
  with_widest<double>(
      [&](auto vectors) {  // the arithmetic of every lane is the same for all of them
        compiled_for(vectors, [&] {
          unusable = evaluate_share<decltype(vectors)::kLanes>(in, largest, omp_get_thread_num(),
                                                               omp_get_num_threads());
        });
      });
  return unusable == kNone ? -1 : unusable;
}

// The distinct group sizes, ascending, counting only valid rollouts.
std::vector<int64_t> distinct_group_sizes(const Groups& groups, int) {
  const auto refuse = [&](const std::string& got) {
    throw std::invalid_argument("offsets must rise from 0 to " +
                                std::to_string(groups.num_rewards) + ", got " + got);
  };
  std::vector<bool> seen(groups.num_rewards + 1);
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    const int64_t begin = groups.begin(g), end = groups.begin(g + 1);
    if (begin < 0 || end < begin || end > groups.num_rewards || (g == 0 && begin != 0))
      refuse(std::to_string(begin) + " followed by " + std::to_string(end) + " at group " +
             std::to_string(g));
    int64_t size = end - begin;
    if (groups.valid) {
      size = 0;
      for (int64_t position = begin; position < end; ++position)
        size += groups.valid[groups.index(position)];
    }
    seen[size] = true;
  }
  const int64_t last = groups.begin(groups.num_groups);
  if (last != groups.num_rewards) refuse(std::to_string(last) + " as the last");
  std::vector<int64_t> sizes;
  for (int64_t size = 0; size <= groups.num_rewards; ++size)
    if (seen[size]) sizes.push_back(size);
  return sizes;
}

const bool defined =
    define_kernel("distinct_group_sizes", distinct_group_sizes) &&
    define_kernel("group_advantage", group_advantage<float, float>, group_advantage<double, double>,
                  group_advantage<BFloat16, BFloat16>, group_advantage<int32_t, float>,
                  group_advantage<int64_t, float>, group_advantage<bool, float>);

}  // namespace
}  // namespace maxrl::cpu
