// A tile of queries against blocks of keys: the arithmetic of attention.cpp.
//
// A row is one query of one head, and has a lane of a vector. Queries, outputs and their gradients
// are therefore transposed on the way in and out, and the softmax is lane by lane. Scores, outputs
// and gradients of queries are sums of vectors times broadcast numbers of keys and values as they
// stand; gradients of keys and values have a head's dimensions in their lanes:
//
//   s[key][rows] = sum_d k[key][d] q[d][rows]    o[d][rows] += sum_key v[key][d] p[key][rows]
//   dv[key][ds] += sum_row ...
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention_vectors.h"
#include "dispatch.h"

namespace maxrl::cpu {

// `stride`: numbers from one packed key to the next; dims, a head's dimensions, are padded to a
// multiple of 16 up to it.
template <typename Vectors_, int stride_>
struct alignas(64) AttentionTile {
  using Vectors = Vectors_;
  using Real = typename Vectors::Real;
  using Reals = typename Vectors::Reals;
  static constexpr int kStride = stride_, kLanes = Vectors::kLanes, kVectors = 2,
                       kRows = kVectors * kLanes;
  static constexpr int kKeys =
      kLanes == 16 ? 12 : 6;  // keys whose scores the registers hold for all rows
  static constexpr int kTail =
      kLanes == 16 ? 4 : 3;  // and of the last steps; up to kTail - 1 keys after the last are read
  static constexpr int kBlock =
      kStride == 16 ? 96 : 48;  // keys whose probabilities stay in the first cache
  static constexpr Real
      kHidden = -1e30,
      kNoTop = -1e20;  // of a row that has seen no score; every row sees a key of the first block
  static constexpr int64_t kGap = 8;  // keys between two ranges that become one
  static constexpr Real kHeadroom =
      60;  // by which a score may exceed its row's top: 2^60 leaves room for sums

  Real q[kStride * kRows];  // transposed, times log2(e) / sqrt(head_dim)
  Real o[kStride * kRows];  // transposed; forward: the output before it is divided; backward: dq
  Real p[kBlock * kRows];  // scores, then probabilities, of a block
  Real place[kRows];  // a row's own key, among the packed ones: it sees none after it
  const Real* last;  // of each packed key: the place of the last row that sees it
  struct Range {  // of packed keys, that some rows of one vector see, or all rows of the tile
    bool is_masked;
    int vector;
    int64_t begin, end;
  };
  std::vector<Range> ranges;
  Reals top[kVectors], sum[kVectors];
  int64_t places[kRows];  // (token, head) of a row in the stream's tensors
  // backward
  Real g[kStride * kRows];  // dL/do, transposed, divided by sqrt(head_dim)
  Real ds[kBlock * kRows];
  Real q_rows[kRows * kStride], g_rows[kRows * kStride];
  Real lse[kRows], delta[kRows];  // delta: g o, divided by sqrt(head_dim)
  int dims;

  static Reals read(const Real* from) { return Vectors::read(from); }
  static void write(Real* to, Reals x) { Vectors::write(to, x); }

  // All rows of a tensor: transposed and multiplied, and as they are into `rows`, unless null.
  template <typename Element>
  void load(const Element* from, int64_t head_dim, Real factor, Real* transposed,
            Real* rows) const {
    compiled_for(Vectors{}, [=, this_ = this] {
      for (int r = 0; r < kRows; r += kLanes)
        for (int d = 0; d < this_->dims; d += kLanes) {
          Reals x[kLanes];
          const auto load_all = [&](int64_t count) {
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i)
              x[i] = load_lanes<Vectors>(from + this_->places[r + i] * head_dim + d, count);
          };
          if (head_dim - d >= kLanes)
            load_all(kLanes);
          else
            load_all(head_dim - d);
          if (rows)
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) write(rows + (r + i) * kStride + d, x[i]);
          transpose<kLanes / 2>(x);
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) write(transposed + (d + i) * kRows + r, x[i] * factor);
        }
    });
  }
  // The first `count` rows of o, times factors.
  template <typename Element>
  void store(Element* to, int64_t head_dim, int count, const Reals (&factors)[kVectors]) const {
    compiled_for(Vectors{}, [&] {
      for (int r = 0; r < count; r += kLanes)
        for (int d = 0; d < dims; d += kLanes) {
          Reals x[kLanes];
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i)
            x[i] = read(o + (d + i) * kRows + r) * factors[r / kLanes];
          transpose<kLanes / 2>(x);
          if (head_dim - d >= kLanes && count - r >= kLanes)
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i)
              store_lanes<Vectors>(to + places[r + i] * head_dim + d, kLanes, x[i]);
          else
            for (int i = 0; i < std::min(count - r, kLanes); ++i)
              store_lanes<Vectors>(to + places[r + i] * head_dim + d, head_dim - d, x[i]);
        }
    });
  }

  void begin_forward() {
    std::fill_n(o, dims * kRows, Real(0));
    for (int i = 0; i < kVectors; ++i) top[i] = Vectors::all(kNoTop), sum[i] = Vectors::all(0);
  }
  // Factors of the outputs, and the log-sum-exps.
  void end_forward(Reals (&factors)[kVectors]) {
    compiled_for(Vectors{}, [&] {
      for (int i = 0; i < kVectors; ++i) {
        factors[i] = Real(1) / sum[i];
        write(lse + i * kLanes, log_of_two<Vectors>(sum[i], top[i]));
      }
    });
  }
  // After `load` of g, and of the outputs into o: delta, and zeros for dq.
  void begin_backward() {
    compiled_for(Vectors{}, [&] {
      for (int r = 0; r < kRows; r += kLanes) {
        Reals total = Vectors::all(0);
        for (int d = 0; d < dims; ++d) total += read(g + d * kRows + r) * read(o + d * kRows + r);
        write(delta + r, total);
      }
      std::fill_n(o, dims * kRows, Real(0));
    });
  }

  // Ranges are added in the order of keys. One that begins soon after its vector's last one joins
  // it, for a block costs as much as a few keys; what is between is masked.
  void add_range(bool is_masked, int vector, int64_t begin, int64_t end) {
    if (begin >= end) return;
    if (!ranges.empty() && ranges.back().is_masked == is_masked && ranges.back().vector == vector &&
        begin <= ranges.back().end + (is_masked ? kGap : 0))
      ranges.back().end = end;
    else
      ranges.push_back({is_masked, vector, begin, end});
  }
  // use(is_masked, vector, begin, count) is for all vectors of rows if not masked, else for one.
  template <typename Use>
  void for_blocks(const Use& use) const {
    for (const Range& range : ranges)
      for (int64_t begin = range.begin; begin < range.end; begin += kBlock) {
        const int count = static_cast<int>(std::min<int64_t>(kBlock, range.end - begin));
        if (range.is_masked)
          use(std::true_type{}, range.vector, begin, count);
        else
          use(std::false_type{}, 0, begin, count);
      }
  }

  // Adds keys begin..begin + count - 1 to the online softmax. A row's probabilities are 2^(score -
  // top), its top the greatest score of the first keys as an integer, and raised only where a score
  // exceeds it by kHeadroom. Raising an integer is exact: a row's result is one chain of sums over
  // its keys, whatever the blocks are.
  template <bool is_masked>
  void forward_block(int vector, int64_t begin, int count, const Real* keys, const Real* values) {
    compiled_for(Vectors{}, [=, this_ = this] {
      this_->template add_keys<is_masked>(vector, begin, count, keys + begin * kStride);
      add_weighted_keys<is_masked ? 1 : kVectors>(this_->dims, count, this_->p + vector * kLanes,
                                                  values + begin * kStride,
                                                  this_->o + vector * kLanes);
    });
  }

  // Adds what keys begin..begin + count - 1 give to dq and what these rows give to their dk and dv.
  template <bool is_masked>
  void backward_block(int vector, int64_t begin, int count, const Real* keys, const Real* values,
                      Real* dk, Real* dv) {
    compiled_for(Vectors{}, [=, this_ = this] {
      constexpr int vectors = is_masked ? 1 : kVectors;
      const int row = vector * kLanes, dims = this_->dims;
      const int64_t at = begin * kStride;
      this_->template find_p_and_ds<is_masked>(vector, begin, count, keys + at, values + at);
      add_weighted_keys<vectors>(dims, count, this_->ds + row, keys + at, this_->o + row);
      add_weighted_rows<vectors * kLanes>(dims, count, this_->p + row,
                                          this_->g_rows + row * kStride, dv + at);
      add_weighted_rows<vectors * kLanes>(dims, count, this_->ds + row,
                                          this_->q_rows + row * kStride, dk + at);
    });
  }

 private:
  // What a row does not see becomes `hidden`.
  template <bool is_masked>
  Reals seen(Reals x, int vector, int64_t key, Real hidden) const {
    if constexpr (!is_masked) return x;
    return where_between(Vectors::all(static_cast<Real>(key)), read(place + vector * kLanes),
                         Vectors::all(last[key]), x, Vectors::all(hidden));
  }

  // sink(first, sums) for all keys, some at a time: sums[key][i] = sum_d keys[key][d] rows[d][i].
  template <int vectors, typename Sink>
  static void key_products(int dims, int count, const Real* rows, const Real* keys,
                           const Sink& sink) {
    int j = 0;
    for (; j + kKeys <= count; j += kKeys)
      some_products<vectors, kKeys>(dims, j, rows, keys + j * kStride, sink);
    for (; j < count; j += kTail)
      some_products<vectors, kTail>(dims, j, rows, keys + j * kStride, sink);
  }
  template <int vectors, int num_keys, typename Sink>
  static void some_products(int dims, int first_key, const Real* rows, const Real* keys,
                            const Sink& sink) {
    Reals sums[num_keys][vectors] = {};
    add_products<kStride, kRows>(dims, keys, rows, sums);
    sink(first_key, sums);
  }
  // sums[key][i] += sum_step numbers[key][step] rows[step][i], where `number_stride` is from one
  // key's numbers to the next's and `row_stride` from a row to the next.
  template <int number_stride, int row_stride, int num_keys, int vectors>
  static void add_products(int steps, const Real* numbers, const Real* rows,
                           Reals (&sums)[num_keys][vectors]) {
#pragma GCC unroll 2
    for (int step = 0; step < steps; ++step) {
      Reals row[vectors];
#pragma GCC unroll 2
      for (int i = 0; i < vectors; ++i) row[i] = read(rows + step * row_stride + i * kLanes);
#pragma GCC unroll 12
      for (int j = 0; j < num_keys; ++j) {
        const Real number = numbers[j * number_stride + step];
#pragma GCC unroll 2
        for (int i = 0; i < vectors; ++i) sums[j][i] += number * row[i];
      }
    }
  }

  // Exponentials have a separate loop: with the sums of products, their constants would not
  // fit into the registers.
  template <bool is_masked>
  void add_keys(int vector, int64_t begin, int count, const Real* keys) {
    constexpr int vectors = is_masked ? 1 : kVectors;
    const int row = vector * kLanes;
    Reals highest[vectors];
    for (auto& x : highest) x = Vectors::all(kHidden);
    key_products<vectors>(dims, count, q + row, keys, [&](int first_key, auto& scores) {
      constexpr int num_keys = std::extent_v<std::remove_reference_t<decltype(scores)>>;
#pragma GCC unroll 12
      for (int j = 0; j < num_keys; ++j)
#pragma GCC unroll 2
        for (int i = 0; i < vectors; ++i) {
          const Reals score =
              seen<is_masked>(scores[j][i], vector + i, begin + first_key + j, kHidden);
          if (num_keys == kKeys || first_key + j < count)
            highest[i] = Vectors::greater(score, highest[i]);
          write(p + row + (first_key + j) * kRows + i * kLanes, score);
        }
    });
    PowerOfTwo<Vectors> power[vectors];
    Reals sums_of[vectors];
    for (int i = 0; i < vectors; ++i) {
      if (__builtin_expect(any_greater(highest[i], top[vector + i] + kHeadroom), 0))
        raise(vector + i, highest[i]);
      power[i].set_base(top[vector + i]);
      sums_of[i] = sum[vector + i];
    }
    for_scores<vectors>(count, row, [&](int, int i, Real* at) {
      const Reals e = power[i](read(at));
      sums_of[i] += e;
      write(at, e);
    });
    for (int i = 0; i < vectors; ++i) sum[vector + i] = sums_of[i];
  }
  // Gives rows that have seen a score far above their top a higher one: what they have summed up
  // shrinks.
  void raise(int vector, const Reals& highest) {
    const Reals nearest = nearest_integer<Vectors>(highest);
    const Reals raised = highest > top[vector] + kHeadroom ? nearest : top[vector];
    PowerOfTwo<Vectors> power;
    power.set_base(raised);
    const Reals factor = power(top[vector]);
    top[vector] = raised;
    sum[vector] *= factor;
    Real* at = o + vector * kLanes;
    for (int d = 0; d < dims; ++d, at += kRows) write(at, read(at) * factor);
  }
  // use(key, i, address in p) for `count` keys and vectors of rows from `row` on.
  template <int vectors, typename Use>
  void for_scores(int count, int row, const Use& use) {
#pragma GCC unroll 4
    for (int j = 0; j < count; ++j)
#pragma GCC unroll 2
      for (int i = 0; i < vectors; ++i) use(j, i, p + row + j * kRows + i * kLanes);
  }

  template <bool is_masked>
  void find_p_and_ds(int vector, int64_t begin, int count, const Real* keys, const Real* values) {
    constexpr int vectors = is_masked ? 1 : kVectors;
    const int row = vector * kLanes;
    const auto to_all = [&](Real* to, const auto& of) {
      return [to, row, &of](int first_key, auto& sums) {
        constexpr int num_keys = std::extent_v<std::remove_reference_t<decltype(sums)>>;
#pragma GCC unroll 12
        for (int j = 0; j < num_keys; ++j)
#pragma GCC unroll 2
          for (int i = 0; i < vectors; ++i) {
            const int place = row + (first_key + j) * kRows + i * kLanes;
            write(to + place, of(place, i, sums[j][i]));
          }
      };
    };
    PowerOfTwo<Vectors> power;
    power.set_base(Vectors::all(0));
    Reals lse_of[vectors], delta_of[vectors];
    for (int i = 0; i < vectors; ++i)
      lse_of[i] = read(lse + row + i * kLanes), delta_of[i] = read(delta + row + i * kLanes);
    key_products<vectors>(dims, count, q + row, keys,
                          to_all(p, [](int, int, const Reals& score) { return score; }));
    for_scores<vectors>(count, row, [&](int j, int i, Real* at) {
      write(at, seen<is_masked>(power(read(at) - lse_of[i]), vector + i, begin + j, 0));
    });
    key_products<vectors>(dims, count, g + row, values,
                          to_all(ds, [&](int place, int i, const Reals& dp) {
                            return read(p + place) * (dp - delta_of[i]);
                          }));
  }

  // sums[d][rows] += sum_key keys[key][d] weights[key][rows].
  template <int vectors>
  static void add_weighted_keys(int dims, int count, const Real* weights, const Real* keys,
                                Real* sums) {
    constexpr int kStep = (kLanes == 16 ? 16 : 8) / vectors;
    for (int d = 0; d < dims; d += kStep) {
      Reals sum[kStep][vectors];
#pragma GCC unroll 16
      for (int s = 0; s < kStep; ++s)
#pragma GCC unroll 2
        for (int i = 0; i < vectors; ++i) sum[s][i] = read(sums + (d + s) * kRows + i * kLanes);
      for (int j = 0; j < count; ++j) {
        Reals weight[vectors];
#pragma GCC unroll 2
        for (int i = 0; i < vectors; ++i) weight[i] = read(weights + j * kRows + i * kLanes);
#pragma GCC unroll 16
        for (int s = 0; s < kStep; ++s) {
          const Real key = keys[j * kStride + d + s];
#pragma GCC unroll 2
          for (int i = 0; i < vectors; ++i) sum[s][i] += key * weight[i];
        }
      }
#pragma GCC unroll 16
      for (int s = 0; s < kStep; ++s)
#pragma GCC unroll 2
        for (int i = 0; i < vectors; ++i) write(sums + (d + s) * kRows + i * kLanes, sum[s][i]);
    }
  }

  // sums[key][d] += sum_row weights[key][row] rows[row][d].
  template <int num_rows>
  static void add_weighted_rows(int dims, int count, const Real* weights, const Real* rows,
                                Real* sums) {
    int d = 0;
    if constexpr (kStride >= 2 * kLanes)
      for (; d + 2 * kLanes <= dims; d += 2 * kLanes)
        add_weighted_dims<num_rows, 2>(count, weights, rows + d, sums + d);
    for (; d < dims; d += kLanes)
      add_weighted_dims<num_rows, 1>(count, weights, rows + d, sums + d);
  }
  template <int num_rows, int parts>
  static void add_weighted_dims(int count, const Real* weights, const Real* rows, Real* sums) {
    int j = 0;
    for (; j + kKeys <= count; j += kKeys)
      add_weighted_some<num_rows, parts, kKeys>(kKeys, weights + j * kRows, rows,
                                                sums + j * kStride);
    for (; j < count; j += kTail)
      add_weighted_some<num_rows, parts, kTail>(count - j, weights + j * kRows, rows,
                                                sums + j * kStride);
  }
  template <int num_rows, int parts, int num_keys>
  static void add_weighted_some(int count, const Real* weights, const Real* rows, Real* sums) {
    Reals sum[num_keys][parts] = {};
    add_products<kRows, kStride>(num_rows, weights, rows, sum);
#pragma GCC unroll 12
    for (int j = 0; j < num_keys; ++j)
      if (num_keys == kKeys || j < count)
#pragma GCC unroll 2
        for (int i = 0; i < parts; ++i) {
          Real* const at = sums + j * kStride + i * kLanes;
          write(at, read(at) + sum[j][i]);
        }
  }
};

}  // namespace maxrl::cpu
