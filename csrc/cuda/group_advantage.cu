// One block per group. Ranks take a bitonic sort in shared memory, then a prefix sum over the gaps.
// All sums are exact, so their order and the number of threads do not matter. Compiled without
// fused multiply-add (CMakeLists.txt), so that a term is the same number wherever it is computed.
#include <type_traits>

#include "../group_advantage.h"
#include "launch.h"
#include "reduce.cuh"

namespace maxrl::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int64_t kMaxRankedGroupSize =
    4096;  // a group is sorted in the shared memory of one block

// Threads of a block for groups of up to n.
inline int threads_for(int64_t n) {
  int threads = kWarp;
  while (2 * threads < n && threads < kMaxThreads) threads *= 2;
  return threads;
}

struct Least {
  __device__ double operator()(double a, double b) const { return fmin(a, b); }
};
struct Greatest {
  __device__ double operator()(double a, double b) const { return fmax(a, b); }
};

// Sorts values and indices [padded], a power of two, ascending; entries with a negative index last.
__device__ void bitonic_sort(double* values, int32_t* indices, int padded) {
  for (int run = 2; run <= padded; run *= 2) {
    for (int stride = run / 2; stride > 0; stride /= 2) {
      __syncthreads();
      for (int pair = threadIdx.x; pair < padded / 2; pair += blockDim.x) {
        const int low = 2 * pair - pair % stride,
                  high = low + stride;  // pair % stride + 2 * stride * (pair / stride)
        const bool ascending = (low & run) == 0;
        const bool low_empty = indices[low] < 0, high_empty = indices[high] < 0;
        if (low_empty && high_empty) continue;
        const bool high_first =
            low_empty ||
            (!high_empty && sorts_before(values[high], indices[high], values[low], indices[low]));
        if (high_first != ascending) continue;
        const double value = values[low];
        values[low] = values[high];
        values[high] = value;
        const int32_t index = indices[low];
        indices[low] = indices[high];
        indices[high] = index;
      }
    }
  }
  __syncthreads();
}

// Replaces sorted rewards [n] by their rank transform. The sums are exact, so that equal rewards in
// different threads get identical results, which a tree reduction would not give.
__device__ void rank_transform(double* values, int n, const double* table, double* warps) {
  const double *offset = table, *slope = table + n;
  const int per_thread = (n + blockDim.x - 1) / blockDim.x;
  const int begin = min(static_cast<int>(threadIdx.x) * per_thread, n),
            end = min(begin + per_thread, n);
  const double before = begin > 0 && begin < end ? values[begin - 1] : 0.0;
  const auto gap_at = [values](int i) { return i > 0 ? values[i] - values[i - 1] : values[0]; };
  double largest_offset = 0.0, largest_slope = 0.0;
  for (int i = begin; i < end; ++i) {
    const double gap = gap_at(i);
    largest_offset = fmax(largest_offset, fabs(offset[i] * gap));
    largest_slope = fmax(largest_slope, i > 0 ? fabs(slope[i] * gap) : 0.0);
  }
  const double margin = 2.0 * power_of_two_above(n);
  const ExactSum<double> base_sum(
      power_of_two_above(block_reduce(largest_offset, warps, Greatest())), margin);
  const ExactSum<double> sum(power_of_two_above(block_reduce(largest_slope, warps, Greatest())),
                             margin);

  double base_coarse = 0.0, base_fine = 0.0, coarse = 0.0, fine = 0.0;
  for (int i = begin; i < end; ++i) {
    const double gap = gap_at(i);
    const double base_term = offset[i] * gap, base_part = base_sum.coarse(base_term);
    base_coarse += base_part;
    base_fine += base_sum.fine(base_term - base_part);
    const double term = i > 0 ? slope[i] * gap : 0.0, part = sum.coarse(term);
    coarse += part;
    fine += sum.fine(term - part);
  }
  const double base =
      block_reduce(base_coarse, warps, Add()) + block_reduce(base_fine, warps, Add());
  coarse = block_prefix_sum(coarse, warps).before;
  fine = block_prefix_sum(fine, warps).before;
  double lower = before;
  for (int i = begin; i < end; ++i) {
    const double reward = values[i];
    const double term = i > 0 ? slope[i] * (reward - lower) : 0.0, part = sum.coarse(term);
    coarse += part;
    fine += sum.fine(term - part);
    values[i] = base + (coarse + fine);
    lower = reward;
  }
  __syncthreads();
}

// Turns a reward into an advantage. x + 0.0 is never -0.0.
struct Normaliser {
  double origin, shift, factor, unscale;
  __device__ double operator()(double reward) const {
    return (reward - origin - shift) * factor * unscale + 0.0;
  }
};

// Computes the moments of n rewards that were multiplied by `scale`. `each(term)` calls
// term(reward) for every reward of this thread.
template <typename Each>
__device__ Normaliser normaliser(const Formula& f, int64_t n, double scale, const Each& each,
                                 double* warps) {
  Normaliser result{0.0, 0.0, multiplier(f, n, 0.0, 0.0, scale), f.is_ratio() ? 1.0 : 1.0 / scale};
  if (!f.needs_moments() || n == 0) return result;
  double low = INFINITY, high = -INFINITY;
  each([&](double reward) {
    low = fmin(low, reward);
    high = fmax(high, reward);
  });
  low = block_reduce(low, warps, Least());
  high = block_reduce(high, warps, Greatest());
  const double bound = power_of_two_above(high - low);

  const auto exact_sum = [&](double largest, const auto& term) {
    const ExactSum<double> sum(largest, 2.0 * power_of_two_above(n));
    double coarse = 0.0, fine = 0.0;
    each([&](double reward) {
      const double x = term(reward - low), part = sum.coarse(x);
      coarse += part;
      fine += sum.fine(x - part);
    });
    return block_reduce(coarse, warps, Add()) + block_reduce(fine, warps, Add());
  };
  const double mean = exact_sum(bound, [](double distance) { return distance; }) / n;
  double squares = 0.0;
  if (f.scale == Scale::kStd)
    squares = exact_sum(bound * bound,
                        [=](double distance) { return (distance - mean) * (distance - mean); });
  if (f.centred) result.origin = low, result.shift = mean;
  result.factor = multiplier(f, n, low + mean, squares, scale);
  return result;
}

// Dynamic shared memory, for ranks: values [capacity] double, then indices [capacity] int32;
// capacity is a power of two.
template <typename Reward, typename Advantage>
__global__ void group_advantage_kernel(const Reward* rewards, Groups groups, Tables tables,
                                       Formula f, Advantage* advantages, int capacity) {
  __shared__ double warps[kMaxThreads / kWarp];
  // Offsets on a GPU were not checked: stay inside the array in any case.
  const int64_t begin = max(groups.begin(blockIdx.x), int64_t(0));
  const int64_t size = min(groups.begin(blockIdx.x + int64_t(1)), groups.num_rewards) - begin;
  if (size <= 0) return;

  double num_valid = 0.0, num_correct = 0.0, num_unusable = 0.0, largest = 0.0, scale = 1.0;
  const auto each_index =
      [&](const auto& use) {  // use(index, exists) for the rollouts of this thread
        for (int64_t i = threadIdx.x; i < size; i += blockDim.x) {
          const int64_t index = groups.index(begin + i);
          use(index, groups.exists(index));
        }
      };
  each_index([&](int64_t index, bool exists) {
    if (!exists) return;
    const double reward = to_double(rewards[index]);
    num_valid += 1.0;
    largest = fmax(largest, fabs(reward));
    num_correct += reward == 1.0;
    num_unusable += !f.accepts(reward);
  });
  const int64_t n = static_cast<int64_t>(block_reduce(num_valid, warps, Add()));
  const bool fits = (f.kind == Kind::kMoments || n <= tables.largest_table) &&
                    (f.kind != Kind::kRank || size <= capacity);
  if (block_reduce(num_unusable, warps, Add()) > 0.0 || !fits) {
    each_index([&](int64_t index, bool exists) {
      advantages[index] = from_double<Advantage>(exists ? static_cast<double>(NAN) : 0.0);
    });
    return;
  }
  if constexpr (std::is_same_v<Reward, double>)
    scale = safe_scale(f, block_reduce(largest, warps, Greatest()));

  if (f.kind != Kind::kRank) {
    const int64_t correct =
        f.kind == Kind::kBinary ? static_cast<int64_t>(block_reduce(num_correct, warps, Add())) : 0;
    const double* table = f.kind == Kind::kBinary ? tables.of(n) : nullptr;
    const auto value_of = [&](int64_t index) {
      const double reward = to_double(rewards[index]) * scale;
      return table ? table[(reward == 1.0 ? n + 1 : 0) + correct] : reward;
    };
    const auto each = [&](const auto& term) {
      each_index([&](int64_t index, bool exists) {
        if (exists) term(value_of(index));
      });
    };
    const Normaliser normalise =
        table ? Normaliser{0.0, 0.0, 1.0, 1.0} : normaliser(f, n, scale, each, warps);
    each_index([&](int64_t index, bool exists) {
      advantages[index] = from_double<Advantage>(exists ? normalise(value_of(index)) : 0.0);
    });
    return;
  }

  double* values = reinterpret_cast<double*>(dynamic_shared());
  int32_t* places = reinterpret_cast<int32_t*>(values + capacity);  // in the group; -1: none
  int padded = 2;
  while (padded < size) padded *= 2;
  for (int i = threadIdx.x; i < padded; i += blockDim.x) {
    const int64_t index = i < size ? groups.index(begin + i) : 0;
    const bool exists = i < size && groups.exists(index);
    values[i] = exists ? to_double(rewards[index]) * scale : 0.0;
    places[i] = exists ? i : -1;
    if (i < size && !exists) advantages[index] = from_double<Advantage>(0.0);
  }
  if (n == 0) return;
  bitonic_sort(values, places, padded);
  rank_transform(values, static_cast<int>(n), tables.of(n), warps);
  for (int i = threadIdx.x; i < n; i += blockDim.x)
    advantages[groups.index(begin + places[i])] =
        from_double<Advantage>(values[i] * (1.0 / scale) + 0.0);
}

}  // namespace

// A group with an unusable reward becomes NaN, since to report it the host would have to wait. So
// does an uneven group with more rollouts than kMaxRankedGroupSize or than the tables take.
template <typename Reward, typename Advantage>
void group_advantage(const GroupAdvantage<Reward, Advantage>& in, cudaStream_t stream) {
  const Groups& groups = in.groups;
  const bool is_rank = in.formula.kind == Kind::kRank;
  if (groups.num_groups == 0 || groups.num_rewards == 0)
    return;  // a zero-sized grid is a launch error
  if (is_rank && !groups.offsets && groups.group_size > kMaxRankedGroupSize)
    throw std::invalid_argument("ranks on a GPU take groups of at most " +
                                std::to_string(kMaxRankedGroupSize) + " rollouts, got " +
                                std::to_string(groups.group_size));
  // The host does not know the sizes of uneven groups; none is larger than the number of rewards.
  const int64_t largest = groups.offsets ? groups.num_rewards : groups.group_size;
  int capacity = 0;
  if (is_rank)
    for (capacity = 2; capacity < largest && capacity < kMaxRankedGroupSize;) capacity *= 2;
  const auto shared_bytes = static_cast<int64_t>(capacity * (sizeof(double) + sizeof(int32_t)));
  const auto kernel = group_advantage_kernel<Reward, Advantage>;
  if (shared_bytes > 40 * 1024) allow_shared(kernel);  // the kernel has static shared memory too
  launch(kernel, groups.num_groups, threads_for(largest), shared_bytes, 0, stream, in.rewards,
         groups, in.tables, in.formula, in.advantages, capacity);
}

const bool defined =
    define_kernel("group_advantage", group_advantage<float, float>, group_advantage<double, double>,
                  group_advantage<BFloat16, BFloat16>, group_advantage<int32_t, float>,
                  group_advantage<int64_t, float>, group_advantage<bool, float>);

}  // namespace maxrl::cuda
