// Rows of logits on Hopper, with a gradient, in a pipeline: no thread that moves logits waits for a
// row's evaluation, for another block, or for the first load of a row.
//
//     readers    R(1) | W(0) L(2) | R(2) | W(1) L(3) | R(3) | ...
//     resolver          resolves 0         resolves 1
//     planner           plans 2            plans 3
//
// R(j): the sums of row j. W(j): its gradient. L(j): asynchronous copies of row j into the place
// that W(j - 2) has read, each by the thread that has read there. A block keeps its parts of two
// rows in shared memory. Readers send the sums of each warp to every block of the cluster, where
// they count on a barrier for which the resolver waits. The loop has no barrier of the cluster,
// whose fence waits for all of a thread's stores.
//
// Why four turns of sums are enough: a block sends those of row j + 4 after it has written row
// j + 2, for which it had the sums of row j + 2 of every block; a block sends these after it has
// written row j, so it has resolved that row and needs its sums no longer.
#pragma once
#include "barriers.cuh"
#include "softmax_rows.cuh"

// Warps of a block that read, and blocks that a multiprocessor shall hold.
#ifndef MAXRL_ROW_WARPS
#define MAXRL_ROW_WARPS 8
#endif
#ifndef MAXRL_PIPELINE_BLOCKS
#define MAXRL_PIPELINE_BLOCKS 3
#endif

namespace maxrl::cuda {

constexpr int kReadingWarps = MAXRL_ROW_WARPS, kReaders = kReadingWarps * kWarp;
constexpr int kResolver = kReadingWarps, kPlanner = kReadingWarps + 1;  // numbers of warps
constexpr int kPipelineThreads = kReaders + 2 * kWarp, kTurns = 4;

template <typename Gradient, typename Work>
struct PipelineMemory {
  PlannedRow<float, typename Work::Token> rows[kTurns];
  ResolvedRow<Gradient, float> resolved[2];
  Barrier summed[kTurns];  // of row j: its sums have come, and the readers have written row j - 2
  Barrier ready[2];  // of row j: it is resolved, and row j + 2 is planned
  typename Work::State state;
};

// How many groups of copies each reader makes of its block's part of a row.
template <typename Element>
__device__ inline int stripes_of(const RowPart<Element>& part) {
  return (part.last - part.first + kReaders - 1) / kReaders;
}

// L: one group.
template <typename Element>
__device__ inline void copy_stripe(const Element* row, const RowPart<Element>& part, int stripe,
                                   Chunk<Element>* kept) {
  const int i = stripe * kReaders + static_cast<int>(threadIdx.x);
  if (part.first + i < part.last)
    __pipeline_memcpy_async(&kept[i], row + part.start_of(part.first + i), kAccess);
}

// Waits until at most `but` of this thread's groups of copies are under way; perhaps fewer, as the
// instruction takes a constant.
__device__ inline void wait_for_copies(int but) {
  if (but >= 8)
    __pipeline_wait_prior(8);
  else if (but >= 4)
    __pipeline_wait_prior(4);
  else if (but >= 2)
    __pipeline_wait_prior(2);
  else
    __pipeline_wait_prior(0);
}

template <typename Element>
__device__ inline float greatest_of_both(const Chunk<Element>& one, const Chunk<Element>& two) {
  Chunk<Element> both;
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if constexpr (sizeof(Element) == 2)
      both.pairs[k] = greater(one.pairs[k], two.pairs[k]);
    else
      both.elements[k] = fmaxf(one.elements[k], two.elements[k]);
  return greatest_of<float>(both);
}

// R: the sums of this thread's elements, two chunks at a time: one wait, one comparison with the
// limit, two chains of additions.
template <typename Element>
__device__ ThreadSoftmax<float> sums_of_kept(const Element* row, const RowPart<Element>& part,
                                             float rate, int target, const Chunk<Element>* kept) {
  constexpr int kSize = Chunk<Element>::kSize;
  const int thread = threadIdx.x, stripes = stripes_of(part);
  ThreadSoftmax<float> mine;
  float others = 0.0f, moment = 0.0f;  // of every second chunk
  mine.add_ends(row, part, thread, rate, target);
  int c = part.first + thread;
  for (int s = 0; s < stripes; s += 2, c += 2 * kReaders) {
    wait_for_copies(stripes - 2 - s);
    if (c >= part.last) break;
    Chunk<Element> one, two;
    one.bits = kept[c - part.first].bits;
    two = Chunk<Element>::of_words(sizeof(Element) == 2 ? 0xff80ff80u : 0xff800000u);  // -inf
    if (c + kReaders < part.last) two.bits = kept[c + kReaders - part.first].bits;
    if (const unsigned at = part.target_in(c, target); at < kSize) without(one, at);
    if (const unsigned at = part.target_in(c + kReaders, target); at < kSize) without(two, at);
    const float greatest = greatest_of_both(one, two);
    if (greatest > mine.limit) {  // rare after the first chunks
      mine.others += others;
      mine.moment += moment;
      others = moment = 0.0f;
      mine.raise(greatest, rate);
    }
    float values[kSize], values_of_two[kSize];
    unpack(one, values);
    unpack(two, values_of_two);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      mine.add(values[i], rate);
      mine.add(values_of_two[i], rate, others, moment);
    }
  }
  mine.others += others;
  mine.moment += moment;
  return mine;
}

// In single precision: the resolver adds the warps' sums in double precision.
__device__ inline SentSums sums_of_warp(const ThreadSoftmax<float>& mine) {
  const float own = mine.base_of_sums(), base = warp_max(own);
  const MovedSums<float> moved(own, base, mine.others, mine.moment);
  return {base, sum_over_lanes(moved.others, kWarp), sum_over_lanes(moved.moment, kWarp), 0.0f};
}

template <typename Work, typename Gradient>
__device__ __noinline__ void resolve_sent(const Work& work, PipelineMemory<Gradient, Work>& memory,
                                          int row, const SentSums* sums, unsigned count) {
  resolve_sums(work, memory.state, memory.rows[row % kTurns], memory.resolved[row % 2], count,
               [&](unsigned warp) -> const SentSums& { return sums[warp]; });
}

// A row of logits and what is kept of it.
template <typename Element>
struct KeptRow {
  const Element* row;
  RowPart<Element> part;
  Chunk<Element>* kept;
};

template <typename Gradient>
struct Zeros {
  template <typename Element>
  __device__ Gradient operator()(Element) const {
    return Gradient{};
  }
  template <typename Element>
  __device__ Chunk<Gradient> operator()(const Chunk<Element>&) const {
    return Chunk<Gradient>::zeros();
  }
};

// W and L: writes gradient_of(an element, or a chunk), and copies the next row into the same place.
template <typename Element, typename Gradient, typename Of>
__device__ void write_and_copy(const KeptRow<Element>& in, Gradient* gradient, bool copies,
                               const KeptRow<Element>& next, const Of& gradient_of) {
  const RowPart<Element>& part = in.part;
  part.for_ends(threadIdx.x, [&](int i) { gradient[i] = gradient_of(in.row[i]); });
  const ChunkWriter<Chunk<Element>::kSize, Gradient> writer(gradient, part);
  const int stripes = copies ? max(stripes_of(part), stripes_of(next.part)) : stripes_of(part);
#pragma unroll 2
  for (int s = 0; s < stripes; ++s) {
    const int i = s * kReaders + static_cast<int>(threadIdx.x);
    if (part.first + i < part.last)
      writer.write(part.start_of(part.first + i), gradient_of(in.kept[i]));
    if (copies) {  // after the write, for which what is copied over has been read
      copy_stripe(next.row, next.part, s, in.kept);
      __pipeline_commit();
    }
  }
}

// num_kept: the chunks of a row's part in shared memory, which has two of them and the sums.
template <typename Element, typename Gradient, typename Work>
__global__ void __launch_bounds__(kPipelineThreads, MAXRL_PIPELINE_BLOCKS)
    pipelined_rows(const __grid_constant__ RowsTask<Element, Gradient, Work> task, int num_kept) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900  // launch_rows takes other kernels elsewhere
  __shared__ PipelineMemory<Gradient, Work> memory;
  auto* const kept = reinterpret_cast<Chunk<Element>*>(dynamic_shared());
  auto* const sums = reinterpret_cast<SentSums*>(kept + 2 * num_kept);
  const unsigned rank = Cluster::rank(), cluster_size = Cluster::size();
  const int count = static_cast<int>(cluster_size) * kReadingWarps;  // sums of a row
  const int64_t first = blockIdx.x / cluster_size, step = gridDim.x / cluster_size;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (threadIdx.x == 0) {
    for (Barrier& barrier : memory.summed) init_barrier(barrier, 1);
    for (Barrier& barrier : memory.ready) init_barrier(barrier, 2);
    publish_barriers();
    memory.state = {};
    plan(task, memory.state, first, memory.rows[0]);
    plan(task, memory.state, first + step, memory.rows[1]);
  }
  __syncwarp();
  Cluster::sync();
  const int turns = kTurns;
  const auto planned = [&](int j) -> auto& { return memory.rows[j % kTurns]; };
  const auto exists = [&](int j) { return planned(j).row < task.in.num_rows; };
  const auto wait_for_sums = [&](int j) { wait(memory.summed[j % turns], j / turns % 2); };
  const auto wait_until_ready = [&](int j) { wait(memory.ready[j % 2], j / 2 % 2); };

  if (warp == kResolver) {
    for (int j = 0; exists(j); ++j) {
      if (lane == 0) arrive_announcing(memory.summed[j % turns], count * sizeof(SentSums));
      wait_for_sums(j);
      if (planned(j).must_read) resolve_sent(task.work, memory, j, sums + j % turns * count, count);
      __syncwarp();
      if (lane == 0) arrive(memory.ready[j % 2]);
      wait_until_ready(j);  // for the plan of row j + 2
    }
  } else if (warp == kPlanner) {
    if (lane == 0)
      for (int j = 0; exists(j); ++j) {
        wait_for_sums(j);  // nobody needs the plan of row j - 2
        plan(task, memory.state, planned(j).row + 2 * step, planned(j + 2));
        arrive(memory.ready[j % 2]);
      }
  } else {
    const auto kept_row = [&](int j) {
      const Element* row = task.logits.of(planned(j).row);
      return KeptRow<Element>{row, RowPart<Element>(row, task.in.vocab_size, rank, cluster_size),
                              kept + j % 2 * num_kept};
    };
    const auto copy = [&](int j) {
      if (!exists(j) || !planned(j).must_read) return;
      const auto to = kept_row(j);
      for (int s = 0; s < stripes_of(to.part); ++s) {
        copy_stripe(to.row, to.part, s, to.kept);
        __pipeline_commit();
      }
    };
    const auto read = [&](int j) {
      if (!exists(j)) return;
      ThreadSoftmax<float> mine;
      if (planned(j).must_read) {
        const auto in = kept_row(j);
        mine = sums_of_kept(in.row, in.part, planned(j).rate, planned(j).target, in.kept);
      }
      const SentSums of_warp = sums_of_warp(mine);
      __syncwarp();  // no lane needs the plan of row j - 2 any more
      if (lane < static_cast<int>(cluster_size))
        send(of_warp, sums[j % turns * count + rank * kReadingWarps + warp],
             memory.summed[j % turns], lane);
    };
    copy(0);
    read(0);
    copy(1);
    for (int j = 0; exists(j); ++j) {
      read(j + 1);
      wait_until_ready(j);
      const auto& row = planned(j);
      const bool copies = exists(j + 2) && planned(j + 2).must_read;
      const auto in = kept_row(j), next = copies ? kept_row(j + 2) : in;
      Gradient* const gradient = task.gradient.of(row.row);
      const auto& resolved = memory.resolved[j % 2];
      const auto write = [&](const auto& gradient_of) {
        write_and_copy(in, gradient, copies, next, gradient_of);
      };
      if (!row.must_read)
        write(Zeros<Gradient>{});
      else if (resolved.slope == 0)
        write(GradientOf<false, Gradient, float>(row.rate, resolved));
      else
        write(GradientOf<true, Gradient, float>(row.rate, resolved));
      if (row.must_read && in.part.is_written_by(threadIdx.x, kReaders, row.target))
        gradient[row.target] = resolved.at_target;
    }
  }
  __syncwarp();
  Cluster::sync();  // others may send to this block until they end
  task.work.template finish<1>([](int) -> const typename Work::State& { return memory.state; });
#endif
}

}  // namespace maxrl::cuda
