// Launches of the kernels of softmax_rows.cuh and softmax_pipeline.cuh: how many blocks share a
// row, and where they keep it.
#pragma once
#include <algorithm>
#include <cstdint>

#include "softmax_pipeline.cuh"
#include "softmax_rows.cuh"

namespace maxrl::cuda {

constexpr int kMaxClusterSize = 16;
// Of a row for one warp, at most: all rows at work fit into the L2 cache.
constexpr int64_t kWarpRowBytes = 8 << 10;
// Bytes of a row's part in a block's shared memory, at most. On an H200 rows of 64 KB took 13% less
// time in one block than in a cluster of two, and rows of 300 KB the same in clusters of 4 and 8.
constexpr int64_t kRowStorage = 73728;
// 1: compute capability 9 takes the kernel of softmax_pipeline.cuh for rows that have no warp for
// themselves. It has run in the emulator only.
#ifndef MAXRL_PIPELINED
#define MAXRL_PIPELINED 0
#endif

// A launch on the present device.
struct RowLaunch {
  int cluster_size;  // blocks of a row
  int64_t storage;  // bytes of shared memory of a block; 0: the row is read twice
  bool has_clusters;
};

// Whether it was launched: a part of a GPU may hold no cluster of this size. `resident` is the
// kernel's own.
template <typename... Parameters, typename... Arguments>
bool launch_if_it_fits(void (*kernel)(Parameters...), OncePerDevice& resident, int threads,
                       int64_t wanted_clusters, const RowLaunch& plan, cudaStream_t stream,
                       const Arguments&... arguments) {
  const int64_t most = resident.get(plan.storage * (kMaxClusterSize + 1) + plan.cluster_size, [&] {
    return resident_clusters(kernel, threads, plan.storage, plan.cluster_size);
  });
  if (most == 0) return false;
  const int64_t clusters = std::min({wanted_clusters, most, kMaxSummingBlocks});
  launch(kernel, clusters * plan.cluster_size, threads, plan.storage,
         plan.has_clusters ? plan.cluster_size : 0, stream, arguments...);
  return true;
}

template <int kTeam, bool kOnChip, typename Element, typename Gradient, typename Work>
bool launch_with(const RowLaunch& plan, const RowsTask<Element, Gradient, Work>& task,
                 cudaStream_t stream) {
  auto* kernel = softmax_rows<Element, Gradient, kTeam, kOnChip, Work>;
  constexpr int64_t kTeams = kRowThreads / kTeam;
  if (kOnChip) allow_shared(kernel);
  static OncePerDevice resident;
  return launch_if_it_fits(kernel, resident, kRowThreads, (task.in.num_rows + kTeams - 1) / kTeams,
                           plan, stream, task);
}

// The smallest cluster with which MAXRL_PIPELINE_BLOCKS blocks fit on a multiprocessor.
template <typename Element, typename Gradient, typename Work>
bool launch_pipelined(const RowsTask<Element, Gradient, Work>& task, cudaStream_t stream) {
  auto* kernel = pipelined_rows<Element, Gradient, Work>;
  const int64_t most = most_shared(), row_chunks = task.in.vocab_size / Chunk<Element>::kSize;
  const auto kept_of = [&](int size) { return static_cast<int>(row_chunks / size + 2); };
  const auto storage_of = [&](int size) {
    return int64_t{2} * kept_of(size) * kAccess +
           kTurns * size * kReadingWarps * static_cast<int64_t>(sizeof(SentSums));
  };
  int size = 1;
  while (size < kMaxClusterSize && MAXRL_PIPELINE_BLOCKS * (storage_of(size) + kOwnShared) > most)
    size *= 2;
  allow_shared(kernel);
  static OncePerDevice resident;
  for (; size > 0 && storage_of(size) <= most; size /= 2)
    if (launch_if_it_fits(kernel, resident, kPipelineThreads, task.in.num_rows,
                          {size, storage_of(size), true}, stream, task, kept_of(size)))
      return true;
  return false;
}

// Runs `work` on all rows; `gradient` may be null.
template <typename Element, typename Gradient, typename Work>
void launch_rows(Rows<const Element> logits, const TokenRows& in, Rows<Gradient> gradient,
                 const Work& work, cudaStream_t stream) {
  if (in.num_rows == 0) return;
  if (in.vocab_size > INT32_MAX - kRowThreads * kAccess)
    throw std::invalid_argument("a row has too many logits");
  if constexpr (sizeof(Gradient) < sizeof(Element))
    check_alignment("a gradient in half precision",
                    {logits.data, logits.of(1), gradient.data, gradient.of(1)});
  const RowsTask<Element, Gradient, Work> task{logits, in, gradient, work};
  const int64_t row_bytes = in.vocab_size * static_cast<int64_t>(sizeof(Element)),
                most = most_shared();
  const auto storage_of = [&](int size) { return (row_bytes / size / kAccess + 2) * kAccess; };
  const int64_t capability =
      compiled_capability(softmax_rows<Element, Gradient, kRowThreads, true, Work>);
  const RowLaunch plan{1, 0, capability >= 9};
  bool is_launched = false;
  if constexpr (MAXRL_PIPELINED && sizeof(RealOf<Element>) == 4)
    if (capability == 9 && gradient.data && row_bytes > kWarpRowBytes)
      is_launched = launch_pipelined(task, stream);
  if (is_launched) return;
  if (row_bytes <= kWarpRowBytes) {
    is_launched = launch_with<kWarp, false>(plan, task, stream);
  } else {
    int size = 1;
    if (plan.has_clusters)
      while (size < kMaxClusterSize && storage_of(size) > kRowStorage) size *= 2;
    if (gradient.data)
      for (; !is_launched && size > 0 && storage_of(size) <= most; size /= 2)
        is_launched = launch_with<kRowThreads, true>({size, storage_of(size), plan.has_clusters},
                                                     task, stream);
    if (!is_launched) is_launched = launch_with<kRowThreads, false>(plan, task, stream);
  }
  if (!is_launched) throw std::runtime_error("no block of a softmax kernel fits on this GPU");
}

}  // namespace maxrl::cuda
