// Launches of the kernel of softmax_rows.cuh: how many blocks share a row, and where they keep it.
#pragma once
#include <algorithm>
#include <cstdint>

#include "softmax_rows.cuh"

namespace maxrl::cuda {

constexpr int kMaxClusterSize = 8;  // more is not portable
// Of a row for one warp, at most: all rows at work fit into the L2 cache.
constexpr int64_t kWarpRowBytes = 8 << 10;
// Bytes of a row's part in a block's shared memory, at most. On an H200 rows of 64 KB took 13% less
// time in one block than in a cluster of two, and rows of 300 KB the same in clusters of 4 and 8.
#ifndef MAXRL_STORAGE
#define MAXRL_STORAGE 73728
#endif

// A launch on the present device.
struct RowLaunch {
  int cluster_size;  // blocks of a row
  int64_t storage;  // bytes of shared memory of a block; 0: the row is read twice
  bool has_clusters;
};

// Whether it was launched: a part of a GPU may hold no cluster of this size.
template <int kTeam, bool kOnChip, typename Element, typename Gradient, typename Work>
bool launch_with(const RowLaunch& plan, const RowsTask<Element, Gradient, Work>& task,
                 cudaStream_t stream) {
  auto* kernel = softmax_rows<Element, Gradient, kTeam, kOnChip, Work>;
  constexpr int64_t kTeams = kRowThreads / kTeam;
  const int64_t wanted = (task.in.num_rows + kTeams - 1) / kTeams;
  if (kOnChip) allow_shared(kernel);
  static OncePerDevice resident_for;  // of this kernel
  const int64_t resident = resident_for.get(
      plan.storage * (kMaxClusterSize + 1) + plan.cluster_size,
      [&] { return resident_clusters(kernel, kRowThreads, plan.storage, plan.cluster_size); });
  if (resident == 0) return false;
  const int64_t clusters = std::min({wanted, resident, kMaxSummingBlocks});
  launch(kernel, clusters * plan.cluster_size, kRowThreads, plan.storage,
         plan.has_clusters ? plan.cluster_size : 0, stream, task);
  return true;
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
  RowLaunch plan{1, 0, device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9};
  bool is_launched = false;
  if (row_bytes <= kWarpRowBytes) {
    is_launched = launch_with<kWarp, false>(plan, task, stream);
  } else {
    int size = 1;
    if (plan.has_clusters)
      while (size < kMaxClusterSize && storage_of(size) > MAXRL_STORAGE) size *= 2;
    if (gradient.data)
      for (; !is_launched && size > 0 && storage_of(size) <= most; size /= 2)
        is_launched = launch_with<kRowThreads, true>({size, storage_of(size), plan.has_clusters},
                                                     task, stream);
    if (!is_launched) is_launched = launch_with<kRowThreads, false>(plan, task, stream);
  }
  if (!is_launched) throw std::runtime_error("no block of a softmax kernel fits on this GPU");
}

}  // namespace maxrl::cuda
