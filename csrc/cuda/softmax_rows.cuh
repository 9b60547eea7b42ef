// Rows of logits on a GPU. A cluster of blocks reads each row once, keeps it in shared memory until the gradients of the loss
// are known, and then writes the gradient in the logits. Rows that do not fit into a cluster (before Hopper: into a block) are
// read twice, the second time mostly from the L2 cache.
//
// A kernel consists of this loop and a Work, which has a zeroed State in shared memory and the functions
//     bool plan(State&, int64_t t)                                    whether row t must be read; otherwise its gradient is 0
//     RowGrads evaluate(State&, int64_t t, const Softmax& softmax)      dL/dlogp and dL/dH of the row
//     void finish(State&)                                            after the last row, by every thread
// plan and evaluate run on thread 0 of every block, and must return the same in all blocks of a cluster.
#pragma once
#include <cuda_pipeline_primitives.h>

#include <algorithm>
#include <cstdint>

#include "../token_loss.h"
#include "cluster.cuh"
#include "elements.cuh"
#include "launch.h"
#include "reduce.cuh"

namespace maxrl::cuda {

constexpr int kRowThreads = 512;
constexpr int kAhead = 4;                      // chunks of a thread on their way to shared memory
constexpr int kMaxClusterSize = 8;             // more is not portable
constexpr int64_t kPreferredStorage = 80 << 10;  // bytes of a block: two blocks of a multiprocessor hide each other's waits

template <typename Real>
constexpr Real kLowestExponent = sizeof(Real) == 4 ? Real(-150) : Real(-1080);  // 2^x is 0, and 0 times it too

// The sums of one thread over its part of a row: a fast form of PartialSoftmax. Exponents are base 2, and one multiply-add: z
// rate - base, with rate = log2(e) / tau, and base the greatest logit times rate, rounded. So the number that is subtracted
// from logits is base / rate, which is near the greatest logit.
template <typename Real>
struct ThreadSoftmax {
  Real greatest = -static_cast<Real>(INFINITY), base = 0, others = 0, moment = 0;

  __device__ void raise(Real new_greatest, Real rate) {
    const Real new_base = new_greatest * rate;
    if (others > 0) {
      const Real shift = base - new_base, factor = exponential2(shift);
      moment = factor > 0 ? factor * (moment + others * shift) : Real(0);
      others *= factor;
    }
    greatest = new_greatest;
    base = new_base;
  }
  __device__ void add(Real z, Real rate) {
    const Real x = at_least(fma(z, rate, -base), kLowestExponent<Real>);  // -inf too
    const Real e = exponential2(x);
    others += e;
    moment = fma(e, x, moment);
  }
  __device__ PartialSoftmax part(Real rate) const {
    const bool has_top = greatest > -static_cast<Real>(INFINITY) && rate > 0;
    const double top = has_top ? static_cast<double>(base) / rate : static_cast<double>(greatest);
    return {top, static_cast<double>(others), kLn2 * moment};
  }
};

// The layout of a row in memory: a few elements up to the first 16-byte boundary, chunks, a few elements. Sizes have 32 bits,
// so that an index takes one register.
template <typename Element>
struct RowLayout {
  int head, num_chunks, size;
  __device__ RowLayout(const Element* row, int size) : size(size) {
    const auto beyond = static_cast<int>(reinterpret_cast<uintptr_t>(row) % kAccess);
    const int wanted = beyond ? (kAccess - beyond) / static_cast<int>(sizeof(Element)) : 0;
    head = wanted < size ? wanted : size;
    num_chunks = (size - head) / Chunk<Element>::kSize;
  }
  __device__ int tail() const { return head + num_chunks * Chunk<Element>::kSize; }
  // The first chunk of a block of a cluster.
  __device__ int first_of(int rank, int cluster_size) const {
    return static_cast<int>(static_cast<int64_t>(num_chunks) * rank / cluster_size);
  }
};

// The numbers that a block needs to write the gradient of its row: 2^x (constant + slope x), x = z rate - base.
template <typename Element, typename Real>
struct ResolvedRow {
  Real base, constant, slope;
  Element at_target;
  Softmax softmax;  // in shared memory rather than in registers
};

// A function of its own, on one thread, so that its double precision takes no registers from the loops.
template <typename Element, typename Real, typename Work>
__device__ __noinline__ void resolve(const Work& work, typename Work::State& state, const TokenRows<Real>& in, int64_t t,
                                     double at_target, const PartialSoftmax* of_block, ResolvedRow<Element, Real>& resolved) {
  const double inverse_temperature = 1.0 / in.temperature_of(t);
  const auto rate = static_cast<Real>(kLog2E * inverse_temperature);
  PartialSoftmax part = *Cluster::of_rank(of_block, 0);
  for (unsigned r = 1; r < Cluster::size(); ++r) part.add(*Cluster::of_rank(of_block, r), inverse_temperature);
  resolved.softmax = Softmax(part, at_target, inverse_temperature);
  const RowGrads grads = work.evaluate(state, t, resolved.softmax);
  const Softmax& softmax = resolved.softmax;
  const RowGradient row = softmax.gradient(grads);
  // x under the rounded base instead of under the softmax's top.
  const auto base = static_cast<Real>(softmax.top * rate);
  const double shift = rate > 0 ? (static_cast<double>(base) / rate - softmax.top) * inverse_temperature : 0.0;
  const double factor = exp(shift);
  resolved.base = base;
  resolved.constant = static_cast<Real>(factor * (row.constant + row.slope * shift));
  resolved.slope = static_cast<Real>(factor * row.slope * kLn2);
  resolved.at_target = from_real<Element>(static_cast<Real>(row.at_target));
}

// Adds the sums of all threads of a block, always in the same order, into *of_block.
template <typename Real>
__device__ __noinline__ void combine(ThreadSoftmax<Real> mine, const TokenRows<Real>& in, int64_t t, PartialSoftmax* of_warps,
                                     PartialSoftmax* of_block) {
  const double inverse_temperature = 1.0 / in.temperature_of(t);
  PartialSoftmax part = mine.part(static_cast<Real>(kLog2E * inverse_temperature));
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    part.add({__shfl_down_sync(kAllLanes, part.top, offset), __shfl_down_sync(kAllLanes, part.others, offset),
              __shfl_down_sync(kAllLanes, part.moment, offset)},
             inverse_temperature);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = part;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kRowThreads / kWarp; ++w) part.add(of_warps[w], inverse_temperature);
  *of_block = part;
}

template <typename Element, typename Real, bool kOnChip, typename Work>
__global__ void __launch_bounds__(kRowThreads, sizeof(Real) == 4 ? 2 : 1)
    softmax_rows(const __grid_constant__ Rows<const Element> logits, const __grid_constant__ TokenRows<Real> in,
                 const __grid_constant__ Rows<Element> gradient, const __grid_constant__ Work work) {
  __shared__ PartialSoftmax of_warps[kRowThreads / kWarp];
  __shared__ PartialSoftmax of_block;  // read by the whole cluster
  __shared__ ResolvedRow<Element, Real> resolved;
  __shared__ typename Work::State state;
  __shared__ bool must_read;
  constexpr int kSize = Chunk<Element>::kSize;
  auto* kept = reinterpret_cast<Chunk<Element>*>(dynamic_shared());
  const int thread = threadIdx.x;
  const int rank = kOnChip ? Cluster::rank() : 0, cluster_size = kOnChip ? Cluster::size() : 1;
  if (thread == 0) state = {};
  // The barrier of a cluster is slower than the barrier of a block.
  const auto sync = [&] {
    if (cluster_size == 1)
      __syncthreads();
    else
      Cluster::sync();
  };

  for (int64_t t = blockIdx.x / cluster_size; t < in.num_tokens; t += gridDim.x / cluster_size) {
    const Element* row = logits.of(t);
    Element* row_gradient = gradient.of(t);
    const RowLayout<Element> layout(row, static_cast<int>(in.vocab_size));
    // This block's chunks; the first block also has the head, the last the tail.
    const int first = layout.first_of(rank, cluster_size), last = layout.first_of(rank + 1, cluster_size);
    const bool has_head = rank == 0, has_tail = rank == cluster_size - 1;
    const auto* chunks = reinterpret_cast<const Chunk<Element>*>(row + layout.head);
    const bool is_aligned =
        row_gradient && (reinterpret_cast<uintptr_t>(row_gradient + layout.head) % kAccess == 0 || layout.num_chunks == 0);

    // Calls use(index in the row) for the elements of this thread in the head and the tail.
    const auto for_ends = [&](const auto& use) {
      if (has_head && thread < layout.head) use(thread);
      if (has_tail && layout.tail() + thread < layout.size) use(layout.tail() + thread);
    };
    const auto write = [&](int chunk, const Chunk<Element>& out) {
      Element* to = row_gradient + (layout.head + chunk * kSize);
      if (is_aligned)
        *reinterpret_cast<uint4*>(to) = out.bits;
      else
        for (int i = 0; i < kSize; ++i) to[i] = out.elements[i];
    };

    if (thread == 0) must_read = work.plan(state, t);
    __syncthreads();
    if (!must_read) {
      if (row_gradient) {
        Chunk<Element> zeros;
        zeros.bits = uint4{0, 0, 0, 0};
        for_ends([&](int i) { row_gradient[i] = Element{}; });
        for (int c = first + thread; c < last; c += kRowThreads) write(c, zeros);
      }
      __syncthreads();  // must_read is read
      continue;
    }

    const int target = in.is_target_valid(t) ? static_cast<int>(in.targets[t]) : -1;
    const auto rate = static_cast<Real>(kLog2E * (1.0 / in.temperature_of(t)));
    // Which element of a chunk the target is; of the other chunks, none.
    const auto target_in = [&](int chunk) { return static_cast<unsigned>(target - (layout.head + chunk * kSize)); };
    ThreadSoftmax<Real> mine;
    for_ends([&](int i) {
      if (i == target) return;
      const Real z = to_real(row[i]);
      if (z > mine.greatest) mine.raise(z, rate);
      mine.add(z, rate);
    });
    // A thread reads only its own copies, so it does not wait for others.
    const auto copy = [&](int c) {
      if (kOnChip && c < last) __pipeline_memcpy_async(&kept[c - first], &chunks[c], kAccess);
      if (kOnChip) __pipeline_commit();
    };
    for (int ahead = 0; ahead < kAhead; ++ahead) copy(first + thread + ahead * kRowThreads);
#pragma unroll 2
    for (int c = first + thread; c < last; c += kRowThreads) {
      Chunk<Element> chunk;
      if constexpr (kOnChip) {
        copy(c + kAhead * kRowThreads);
        __pipeline_wait_prior(kAhead);
        chunk.bits = kept[c - first].bits;
      } else {
        chunk.bits = chunks[c].bits;
      }
      if (target_in(c) < kSize) {  // one chunk of a row, element by element
#pragma unroll 1
        for (int i = 0; i < kSize; ++i) {
          if (i == static_cast<int>(target_in(c))) continue;
          const Real z = to_real(row[layout.head + c * kSize + i]);
          if (z > mine.greatest) mine.raise(z, rate);
          mine.add(z, rate);
        }
        continue;
      }
      const Real greatest = greatest_of<Real>(chunk);
      if (greatest > mine.greatest) mine.raise(greatest, rate);
      Real values[kSize];
      unpack(chunk, values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) mine.add(values[i], rate);
    }

    combine(mine, in, t, of_warps, &of_block);
    sync();
    if (thread == 0) {
      // A target that is not in the vocabulary makes all of it NaN.
      const double at_target = target < 0 ? NAN : static_cast<double>(to_real(row[target]));
      resolve(work, state, in, t, at_target, &of_block, resolved);
    }
    sync();  // before another row changes of_block, and before the gradient takes the place of the logits
    if (!row_gradient) continue;

    const Real base = resolved.base, constant = resolved.constant, slope = resolved.slope;
    const Element at_target = resolved.at_target;
    const auto gradient_of = [&](Real z) {
      const Real x = at_least(fma(z, rate, -base), kLowestExponent<Real>);
      return exponential2(x) * fma(slope, x, constant);
    };
    for_ends([&](int i) { row_gradient[i] = i == target ? at_target : from_real<Element>(gradient_of(to_real(row[i]))); });
    for (int c = first + thread; c < last; c += kRowThreads) {
      Chunk<Element> in_chunk;
      in_chunk.bits = kOnChip ? kept[c - first].bits : chunks[c].bits;
      Real values[kSize];
      unpack(in_chunk, values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = gradient_of(values[i]);
      write(c, rounded<Element>(values));
      if (target_in(c) < kSize) row_gradient[target] = at_target;  // after the write, by the same thread
    }
  }
  __syncthreads();
  work.finish(state);
}

// The launch for rows of a vocabulary, on the present device.
struct RowLaunch {
  int cluster_size;   // blocks of a row
  int64_t storage;    // bytes of shared memory of a block; 0: the row is read twice
  bool has_clusters;
};

inline RowLaunch plan_launch(int64_t row_bytes, bool needs_gradient) {
  const bool has_clusters = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  if (!needs_gradient) return {1, 0, has_clusters};  // nothing is read again
  const int64_t most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 4096;  // the kernel has some of its own
  const auto storage_of = [&](int size) { return (row_bytes / size / kAccess + 2) * kAccess; };
  int size = 1;
  if (has_clusters)
    while (size < kMaxClusterSize && storage_of(size) > kPreferredStorage) size *= 2;
  if (storage_of(size) > most) return {1, 0, has_clusters};
  return {size, storage_of(size), has_clusters};
}

template <typename Element, typename Real, bool kOnChip, typename Work>
void launch_with(const RowLaunch& plan, Rows<const Element> logits, const TokenRows<Real>& in, Rows<Element> gradient,
                 Work work, cudaStream_t stream) {
  auto* kernel = softmax_rows<Element, Real, kOnChip, Work>;
  if (plan.storage > 0) allow_shared(kernel, plan.storage);
  const int64_t resident = resident_clusters(kernel, kRowThreads, plan.storage, plan.cluster_size);
  const int64_t clusters = std::max<int64_t>(1, std::min({in.num_tokens, resident, kMaxSummingBlocks}));
  launch(kernel, clusters * plan.cluster_size, kRowThreads, plan.storage, plan.has_clusters ? plan.cluster_size : 0, stream,
         logits, in, gradient, work);
}

// Runs `work` on all rows; `gradient` may be null, or the logits.
template <typename Element, typename Real, typename Work>
void launch_rows(Rows<const Element> logits, const TokenRows<Real>& in, Rows<Element> gradient, const Work& work,
                 cudaStream_t stream) {
  if (in.vocab_size > INT32_MAX - kRowThreads * kAccess) throw std::invalid_argument("a row has too many logits");
  const RowLaunch plan = plan_launch(in.vocab_size * static_cast<int64_t>(sizeof(Element)), gradient.data != nullptr);
  if (plan.storage > 0)
    launch_with<Element, Real, true>(plan, logits, in, gradient, work, stream);
  else
    launch_with<Element, Real, false>(plan, logits, in, gradient, work, stream);
}

}  // namespace maxrl::cuda
