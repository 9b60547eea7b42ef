// Thread-block clusters.
#pragma once
#include "cuda_runtime.h"

namespace cooperative_groups {
struct Cluster {
  unsigned block_rank() const { return emulation::cluster_rank(); }
  unsigned num_blocks() const { return emulation::cluster_size; }
  void sync() const { emulation::sync_cluster(); }
  template <typename T>
  T* map_shared_rank(T* mine, unsigned rank) const {
    return static_cast<T*>(emulation::of_rank(mine, rank));
  }
};
inline Cluster this_cluster() { return {}; }
}  // namespace cooperative_groups
