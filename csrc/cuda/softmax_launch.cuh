// Launches of the kernel of softmax_rows.cuh: how many blocks share a row, and where they keep it.
#pragma once
#include <algorithm>
#include <cstdint>

#include "softmax_rows.cuh"

namespace maxrl::cuda {

constexpr int kMaxClusterSize = 8;  // more is not portable

// The launch for rows of a vocabulary, on the present device.
struct RowLaunch {
  int cluster_size;  // blocks of a row
  int64_t storage;  // bytes of shared memory of a block; 0: the row is read twice
  bool has_clusters;
};

inline RowLaunch plan_launch(int64_t row_bytes, bool needs_gradient) {
  RowLaunch plan{1, 0, device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9};
  if (!needs_gradient || row_bytes <= kWarpRowBytes) return plan;
  const int64_t most = most_shared();
  const auto storage_of = [&](int size) { return (row_bytes / size / kAccess + 2) * kAccess; };
  int size = 1;
  if (plan.has_clusters)
    while (size < kMaxClusterSize && storage_of(size) > kPreferredStorage) size *= 2;
  return storage_of(size) > most ? plan : RowLaunch{size, storage_of(size), plan.has_clusters};
}

template <typename Element, typename Real, int kTeam, bool kOnChip, typename Work>
void launch_with(const RowLaunch& plan, const RowsTask<Element, Real, Work>& task,
                 cudaStream_t stream) {
  auto* kernel = softmax_rows<Element, Real, kTeam, kOnChip, Work>;
  constexpr int64_t kTeams = kRowThreads / kTeam;
  const int64_t wanted = (task.in.num_tokens + kTeams - 1) / kTeams;
  if (plan.storage > 0) allow_shared(kernel);
  static OncePerDevice resident_for;  // of this kernel
  const int64_t resident = resident_for.get(
      plan.storage * (kMaxClusterSize + 1) + plan.cluster_size,
      [&] { return resident_clusters(kernel, kRowThreads, plan.storage, plan.cluster_size); });
  const int64_t clusters = std::max<int64_t>(1, std::min({wanted, resident, kMaxSummingBlocks}));
  launch(kernel, clusters * plan.cluster_size, kRowThreads, plan.storage,
         plan.has_clusters ? plan.cluster_size : 0, stream, task);
}

// Runs `work` on all rows; `gradient` may be null, or the logits.
template <typename Element, typename Work>
void launch_rows(Rows<const Element> logits, const TokenRows& in, Rows<Element> gradient,
                 const Work& work, cudaStream_t stream) {
  if (in.num_tokens == 0) return;
  if (in.vocab_size > INT32_MAX - kRowThreads * kAccess)
    throw std::invalid_argument("a row has too many logits");
  using Real = RealOf<Element>;
  const int64_t row_bytes = in.vocab_size * static_cast<int64_t>(sizeof(Element));
  const RowLaunch plan = plan_launch(row_bytes, gradient.data != nullptr);
  const RowsTask<Element, Real, Work> task{logits, in, gradient, work};
  if (row_bytes <= kWarpRowBytes)
    launch_with<Element, Real, kWarp, false>(plan, task, stream);
  else if (plan.storage > 0)
    launch_with<Element, Real, kRowThreads, true>(plan, task, stream);
  else
    launch_with<Element, Real, kRowThreads, false>(plan, task, stream);
}

}  // namespace maxrl::cuda
