// Rows of logits on a GPU. A cluster of blocks reads each row once, keeps it in shared memory until
// the gradients of the loss are known, and then writes the gradient in the logits. Rows that do not
// fit into a cluster (before Hopper: into a block) are read twice, the second time from the
// L2 cache if the rows at work fit into it; so are short rows, each of which has a warp for itself.
// The threads that share a row in a block, all of them or a warp, are called its team.
//
// The gradient may be in the memory of the logits. Of float32 logits it may have half precision:
// then it may be the first half of each row.
//
// A kernel consists of this loop and a Work, which has a zeroed State for each team in shared
// memory, a Token for each row at work, and the functions
//     bool plan(State&, int64_t row, Token&)
//         whether the row must be read; otherwise its gradient is 0
//     RowGrads evaluate(State&, int64_t row, const Token&, const Softmax&)
//         dL/dlogp and dL/dH of the row
//     template <int teams> void finish(state_of)
//         after the last row, by every thread; state_of(team) is a State
// plan and evaluate run on one thread of every team, not the same one and at the same time, plan
// for a later row. Both must return the same in all blocks of a cluster.
#pragma once
#include <cooperative_groups.h>
#include <cuda_pipeline_primitives.h>

#include <cstdint>

#include "../token_loss.h"
#include "launch.h"
#include "reduce.cuh"
#include "softmax_layout.cuh"

namespace maxrl::cuda {

// Thread-block clusters, where the GPU has them (Hopper and later).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
struct Cluster {
  __device__ static auto own() { return cooperative_groups::this_cluster(); }
  __device__ static unsigned rank() { return own().block_rank(); }
  __device__ static unsigned size() { return own().num_blocks(); }
  __device__ static void sync() { own().sync(); }
  // The same shared variable of another block of the cluster.
  template <typename T>
  __device__ static const T* of_rank(const T* mine, unsigned rank) {
    return own().map_shared_rank(const_cast<T*>(mine), rank);
  }
};
#else
struct Cluster {  // a block by itself
  __device__ static unsigned rank() { return 0; }
  __device__ static unsigned size() { return 1; }
  __device__ static void sync() { __syncthreads(); }
  template <typename T>
  __device__ static const T* of_rank(const T* mine, unsigned) {
    return mine;
  }
};
#endif

constexpr int kRowThreads = 256;
constexpr int kAhead = 4;  // chunks of a thread on their way to shared memory

template <typename Real>
constexpr Real kLowest = -static_cast<Real>(INFINITY);
template <typename Real>
constexpr Real kLowestExponent =
    sizeof(Real) == 4 ? Real(-150) : Real(-1080);  // 2^x is 0, and 0 times it too
// A base moves only where it must: 2^31 terms of 2^16, and of 16 times that, have a finite sum.
constexpr int kMostExponent = 16;

// The sums of one thread over its part of a row. Exponents are base 2, and one multiply-add: x = z
// rate - base, with rate = log2(e) / tau, and base some logit times rate, rounded, which no x
// exceeds by more than kMostExponent.
template <typename Real>
struct ThreadSoftmax {
  Real limit = kLowest<Real>;  // a logit above it moves the base
  Real base = 0, others = 0, moment = 0;  // others, moment: sums of 2^x and of x 2^x

  __device__ Real base_of_sums() const { return limit == kLowest<Real> ? kLowest<Real> : base; }

  __device__ void raise(Real new_greatest, Real rate) {
    const Real new_base = new_greatest * rate;
    if (others > 0) {
      const Real shift = base - new_base, factor = exponential2(shift);
      moment = factor > 0 ? factor * (moment + others * shift) : Real(0);
      others *= factor;
    }
    limit = new_greatest + kMostExponent / rate;  // no logit is above NaN
    base = new_base;
  }
  __device__ void add(Real z, Real rate) { add(z, rate, others, moment); }
  __device__ void add(Real z, Real rate, Real& others, Real& moment) const {
    const Real x = at_least(fma(z, rate, -base), kLowestExponent<Real>);  // -inf too
    const Real e = exponential2(x);
    others += e;
    moment = fma(e, x, moment);
  }
  // All elements of a thread that are in no chunk but the target.
  template <typename Element>
  __device__ void add_ends(const Element* row, const RowPart<Element>& part, int thread, Real rate,
                           int target) {
    part.for_ends(thread, [&](int i) {
      const Real z = to_real(row[i]);
      if (i == target) return;
      if (z > limit) raise(z, rate);
      add(z, rate);
    });
  }
};

// The sums of several threads, relative to one base, which is -inf where there is no logit above
// -inf.
template <typename Real>
struct SharedSums {
  Real base;
  double others, moment;
};

// Sums relative to the base `to`.
template <typename Real>
struct MovedSums {
  Real others, moment;
  __device__ MovedSums(Real base, Real to, Real others, Real moment) {
    const Real shift = base > kLowest<Real> ? base - to : Real(0), factor = exponential2(shift);
    this->others = factor * others;
    this->moment = factor * (factor > 0 ? moment + others * shift
                                        : moment);  // 0 times an overflow would be NaN
  }
};

// What a kernel is given.
template <typename Element, typename Gradient, typename Work>
struct RowsTask {
  Rows<const Element> logits;
  TokenRows in;
  Rows<Gradient> gradient;
  Work work;
};

// What is known of a row before its logits are read.
template <typename Real, typename Token>
struct PlannedRow {
  int64_t row;
  Token token;
  double inverse_temperature, at_target;
  Real rate;
  int target;  // -1 if it is not in the vocabulary, which makes the row's results NaN
  bool must_read;
};

// The numbers that a team needs to write the gradient of its row: 2^x (constant + slope x), x = z
// rate - base.
template <typename Gradient, typename Real>
struct ResolvedRow {
  Real base, constant, slope;
  Gradient at_target;
  Softmax softmax;  // in shared memory rather than in registers
};

template <typename Gradient, typename Real, typename Work, int kWarps>
struct TeamMemory {
  PlannedRow<Real, typename Work::Token>
      rows[2];  // by turns: the next row is planned while this one is resolved
  SharedSums<Real>
      sums[2][kWarps];  // by turns: other blocks of the cluster may still read the last row's
  ResolvedRow<Gradient, Real> resolved;
  typename Work::State state;
};

// This and `resolve` are separate functions, so that their double precision uses no registers
// from the loops.
template <typename Task, typename State, typename Planned>
__device__ __noinline__ void plan(const Task& task, State& state, int64_t row, Planned& planned) {
  planned.row = row;
  planned.must_read = row < task.in.num_rows && task.work.plan(state, row, planned.token);
  if (!planned.must_read) return;
  const int64_t t = task.in.token_of(row);
  planned.inverse_temperature = 1.0 / task.in.temperature_of(t);
  planned.rate = static_cast<decltype(planned.rate)>(kLog2E * planned.inverse_temperature);
  planned.target = task.in.is_target_valid(t) ? static_cast<int>(task.in.targets[t]) : -1;
  planned.at_target = planned.target < 0
                          ? static_cast<double>(NAN)
                          : static_cast<double>(to_real(task.logits.of(row)[planned.target]));
}

// The sums of this thread's elements of a row; on the chip, the row's part is kept in shared
// memory.
template <int kTeam, bool kOnChip, typename Real, typename Element>
__device__ ThreadSoftmax<Real> sums_of(const Element* row, const RowPart<Element>& part, int thread,
                                       Real rate, int target, Chunk<Element>* kept) {
  constexpr int kSize = Chunk<Element>::kSize;
  const auto* chunks = reinterpret_cast<const Chunk<Element>*>(row + part.layout.head);
  ThreadSoftmax<Real> mine;
  // A thread reads only its own copies, so it does not wait for others.
  const auto copy = [&](int c) {
    if (kOnChip && c < part.last)
      __pipeline_memcpy_async(&kept[c - part.first], &chunks[c], kAccess);
    if (kOnChip) __pipeline_commit();
  };
  for (int ahead = 0; ahead < kAhead; ++ahead) copy(part.first + thread + ahead * kTeam);
  mine.add_ends(row, part, thread, rate, target);
#pragma unroll 2
  for (int c = part.first + thread; c < part.last; c += kTeam) {
    Chunk<Element> chunk;
    if constexpr (kOnChip) {
      copy(c + kAhead * kTeam);
      __pipeline_wait_prior(kAhead);
      chunk.bits = kept[c - part.first].bits;
    } else {
      chunk.bits = chunks[c].bits;
    }
    if (const unsigned at = part.target_in(c, target); at < kSize) without(chunk, at);
    const Real greatest = greatest_of<Real>(chunk);
    if (greatest > mine.limit) mine.raise(greatest, rate);  // rare after a thread's first chunk
    Real values[kSize];
    unpack(chunk, values);
#pragma unroll
    for (int i = 0; i < kSize; ++i) mine.add(values[i], rate);
  }
  return mine;
}

// Adds the sums of a warp, always in the same order.
template <typename Real>
__device__ void store_sums(const ThreadSoftmax<Real>& mine, SharedSums<Real>& of_warp) {
  const Real own = mine.base_of_sums(), base = warp_max(own);
  const MovedSums<Real> moved(own, base, mine.others, mine.moment);
  const double others = warp_sum(moved.others), moment = warp_sum(moved.moment);
  if (threadIdx.x % kWarp == 0) of_warp = {base, others, moment};
}

// Adds the sums of all warps of a cluster, which the lanes of this warp read at the same time; lane
// 0 evaluates the row.
template <typename Work, typename Real, typename Gradient, typename SumsOf>
__device__ __forceinline__ void resolve_sums(const Work& work, typename Work::State& state,
                                             const PlannedRow<Real, typename Work::Token>& row,
                                             ResolvedRow<Gradient, Real>& resolved,
                                             unsigned num_warps, const SumsOf& sums_of_warp) {
  const unsigned lane = threadIdx.x % kWarp;
  const Real of_target = static_cast<Real>(row.at_target) * row.rate;
  Real base = of_target;
  for (unsigned warp = lane; warp < num_warps; warp += kWarp)
    base = fmax(base, sums_of_warp(warp).base);
  base = warp_max(base);
  double others = 0.0, moment = 0.0;
#pragma unroll 1
  for (unsigned warp = lane; warp < num_warps; warp += kWarp) {
    const auto& sums = sums_of_warp(warp);
    const MovedSums<double> moved(sums.base, base, sums.others, sums.moment);
    others += moved.others;
    moment += moved.moment;
  }
  others = warp_sum(others);
  moment = warp_sum(moment);
  if (lane != 0) return;
  PartialSoftmax part{row.rate > 0 ? static_cast<double>(base) / row.rate : 0.0, others,
                      kLn2 * moment};
  double shift = 0.0, factor = 1.0;
  if (base == of_target) {  // the top is the target's logit without rounding, so that a probability
                            // of 1 is exact
    shift = (part.top - row.at_target) * row.inverse_temperature;
    factor = exp(shift);
    part = {row.at_target, factor * part.others, factor * (part.moment + part.others * shift)};
  }
  resolved.base = base;
  resolved.softmax = Softmax(part, row.at_target, row.inverse_temperature);
  const RowGradient gradient =
      resolved.softmax.gradient(work.evaluate(state, row.row, row.token, resolved.softmax));
  resolved.constant = static_cast<Real>(factor * (gradient.constant + gradient.slope * shift));
  resolved.slope = static_cast<Real>(factor * gradient.slope * kLn2);
  resolved.at_target = from_real<Gradient>(static_cast<Real>(gradient.at_target));
}

template <typename Gradient, typename Real, typename Work, int kWarps>
__device__ __noinline__ void resolve(const Work& work,
                                     TeamMemory<Gradient, Real, Work, kWarps>& memory, int turn,
                                     int sums_turn, unsigned cluster_size) {
  resolve_sums(work, memory.state, memory.rows[turn], memory.resolved, kWarps * cluster_size,
               [&](unsigned warp) -> const SharedSums<Real>& {
                 return *Cluster::of_rank(&memory.sums[sums_turn][warp % kWarps], warp / kWarps);
               });
}

// The gradient of elements of a resolved row. Without a slope it needs no limit of exponents:
// 2^-inf is 0, and NaN stays.
template <bool kHasSlope, typename Gradient, typename Real>
struct GradientOf {
  const Real rate, base, constant, slope;
  __device__ GradientOf(Real rate, const ResolvedRow<Gradient, Real>& row)
      : rate(rate), base(row.base), constant(row.constant), slope(row.slope) {}
  __device__ Real at(Real z) const {
    const Real x = fma(z, rate, -base);
    if constexpr (!kHasSlope) return exponential2(x) * constant;
    const Real limited = at_least(x, kLowestExponent<Real>);
    return exponential2(limited) * fma(slope, limited, constant);
  }
  template <typename Element>
  __device__ Gradient operator()(Element z) const {
    return from_real<Gradient>(at(to_real(z)));
  }
  template <typename Element>
  __device__ Chunk<Gradient> operator()(const Chunk<Element>& chunk) const {
    Chunk<Element> in;
    in.bits = chunk.bits;  // in one access
    Real values[Chunk<Element>::kSize];
    unpack(in, values);
#pragma unroll
    for (Real& value : values) value = at(value);
    return rounded<Gradient>(values);
  }
};

template <int kTeam, bool kOnChip, typename Real, typename Element, typename Gradient,
          typename Sync>
__device__ void write_gradient(const Element* row, Gradient* gradient, const RowPart<Element>& part,
                               int thread, Real rate, int target,
                               const ResolvedRow<Gradient, Real>& resolved,
                               const Chunk<Element>* kept, const Sync& sync_team) {
  const GradientOf<true, Gradient, Real> gradient_of(rate, resolved);
  const auto* chunks = reinterpret_cast<const Chunk<Element>*>(row + part.layout.head);
  const auto chunk_of = [&](int c) {
    return gradient_of(kOnChip ? kept[c - part.first] : chunks[c]);
  };
  const auto value_at = [&](int i) { return gradient_of(row[i]); };
  if constexpr (sizeof(Gradient) < sizeof(Element) && !kOnChip)
    write_over_row<kTeam>(gradient, part, thread, chunk_of, value_at, sync_team);
  else
    write_row<kTeam>(gradient, part, thread, chunk_of, value_at);
  // The thread that has written the target's element writes it again.
  if (part.is_written_by(thread, kTeam, target)) gradient[target] = resolved.at_target;
}

template <typename Element, typename Gradient, int kTeam, bool kOnChip, typename Work>
__global__ void __launch_bounds__(kRowThreads, sizeof(RealOf<Element>) == 4 ? 4 : 2)
    softmax_rows(const __grid_constant__ RowsTask<Element, Gradient, Work> task) {
  using Real = RealOf<Element>;
  constexpr int kTeams = kRowThreads / kTeam, kWarps = kTeam / kWarp;
  static_assert(!kOnChip || kTeams == 1);
  __shared__ struct {
    TeamMemory<Gradient, Real, Work, kWarps> of[kTeams];
  } teams;
  auto* kept = reinterpret_cast<Chunk<Element>*>(dynamic_shared());
  const int thread = threadIdx.x % kTeam;
  auto& memory = teams.of[threadIdx.x / kTeam];
  const unsigned rank = kOnChip ? Cluster::rank() : 0, cluster_size = kOnChip ? Cluster::size() : 1;
  const bool plans = thread == kTeam - 1;  // not in the warp that resolves, if there are several
  const auto sync_team = [] {
    if (kTeam == kWarp)
      __syncwarp();
    else
      __syncthreads();
  };
  const auto sync_row = [&] {
    if (cluster_size == 1)  // the barrier of a cluster is slower
      sync_team();
    else
      Cluster::sync();
  };
  if (plans) {
    memory.state = {};
    plan(task, memory.state, int64_t{blockIdx.x / cluster_size} * kTeams + threadIdx.x / kTeam,
         memory.rows[0]);
  }
  sync_team();

  int sums_turn = 0;
  // What is in shared memory is read again after each barrier, rather than kept in registers.
  for (int turn = 0; memory.rows[turn].row < task.in.num_rows; turn ^= 1) {
    const auto& planned = memory.rows[turn];
    const auto plan_next = [&] {
      const int64_t step = int64_t{gridDim.x / cluster_size} * kTeams;
      if (plans) plan(task, memory.state, planned.row + step, memory.rows[turn ^ 1]);
    };
    const auto part_of_row = [&] {
      return RowPart<Element>(task.logits.of(planned.row), task.in.vocab_size, rank, cluster_size);
    };
    if (planned.must_read) {
      const ThreadSoftmax<Real> mine = sums_of<kTeam, kOnChip>(
          task.logits.of(planned.row), part_of_row(), thread, planned.rate, planned.target, kept);
      store_sums(mine, memory.sums[sums_turn][thread / kWarp]);
      sync_row();
      if (thread < kWarp) resolve(task.work, memory, turn, sums_turn, cluster_size);
      sums_turn ^= 1;
      plan_next();
      sync_team();
      if (task.gradient.data)
        write_gradient<kTeam, kOnChip>(task.logits.of(planned.row), task.gradient.of(planned.row),
                                       part_of_row(), thread, planned.rate, planned.target,
                                       memory.resolved, kept, sync_team);
    } else {
      if (task.gradient.data) {
        write_row<kTeam>(
            task.gradient.of(planned.row), part_of_row(), thread,
            [](int) { return Chunk<Gradient>::zeros(); }, [](int) { return Gradient{}; });
      }
      sync_team();  // no thread writes the last row any more, whose place the plan of the next row
                    // takes
      plan_next();
      sync_team();
    }
  }
  if (cluster_size > 1) Cluster::sync();  // the others have read this block's sums
  __syncthreads();
  const auto state_of = [](int team) -> const typename Work::State& {
    return teams.of[team].state;
  };
  task.work.template finish<kTeams>(state_of);
}

}  // namespace maxrl::cuda
