// Several groups in the lanes of vectors, computed together.
//
// Small groups are computed several at a time, one per lane; a larger group is computed alone,
// spread over all lanes. The code is the same: it sums over rows, and then over lanes if the group
// is spread. The sums are exact, so their order is irrelevant.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "../group_advantage.h"
#include "vectors.h"

namespace maxrl::cpu {

constexpr int64_t kLargestLane =
    32;  // rollouts of a group in one lane; up to it, counting smaller rewards beats sorting

// The working memory of one thread: a group of at most kLargestLane rollouts in each lane, or one
// group of any size.
template <int num_lanes>  // as many as a vector register has: compilers split wider vectors badly
struct Tile {
  static constexpr int kLanes = num_lanes;
  using Lanes = typename VectorTypes<double, kLanes>::Reals;

  struct Key {
    double reward;
    int32_t place;
  };

  struct alignas(sizeof(Lanes)) Row {  // a std::vector of Lanes itself would not be aligned
    Lanes lanes;
  };

  explicit Tile(int64_t largest_group)
      : capacity(std::max(kLargestLane, largest_group / kLanes + 1)), storage(2 * capacity),
        values(&storage[0].lanes), ranks(values + capacity),
        sorted(std::max(kLargestLane, largest_group)), keys(largest_group) {}

  bool is_full;  // every row of every lane holds a rollout
  bool is_spread;  // one group over all lanes, its i-th rollout at row i / kLanes, lane i % kLanes
  int32_t num_groups;
  int32_t rows;
  Lanes filled;  // number of rows of each lane that hold a rollout; the rows after them hold 0
  Lanes n;  // number of rollouts of each lane's group
  int64_t capacity;
  std::vector<Row> storage;
  Lanes *values, *ranks;  // [rows]; values: rewards, then advantages
  std::vector<double> sorted;
  std::vector<Key> keys;

  static Lanes all(double x) { return Lanes{} + x; }

  Lanes where_filled(int32_t row, Lanes x, Lanes otherwise) const {
    return is_full ? x : all(row) < filled ? x : otherwise;
  }

  // The i-th rollout of a group is at column(rows, group)[i * stride()].
  double* column(Lanes* of, int32_t group) { return reinterpret_cast<double*>(of) + group; }
  int64_t stride() const { return is_spread ? 1 : kLanes; }

  // Reduces over the lanes of a group; returns x if each lane is a group.
  template <typename Combine>
  Lanes over_group(Lanes x, const Combine& combine) const {
    if (!is_spread) return x;
    double result = x[0];
    for (int lane = 1; lane < kLanes; ++lane) result = combine(result, x[lane]);
    return all(result);
  }
};

template <typename Lanes>
Lanes powers_of_two_above(Lanes x) {
  for (size_t lane = 0; lane < sizeof(Lanes) / sizeof(double); ++lane)
    x[lane] = power_of_two_above(x[lane]);
  return x;
}

}  // namespace maxrl::cpu
