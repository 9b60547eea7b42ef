// Barriers in shared memory on which threads arrive and wait for one another, and stores to other
// blocks of a cluster that count on one (mbarrier and st.async; Hopper and later).
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace maxrl::cuda {

// What a warp sends to each block of its cluster: its sums of a row, relative to one base.
struct alignas(16) SentSums {
  float base, others, moment, unused;
};

#ifdef __CUDACC__
// A phase ends when as many threads as expected have arrived, and as many bytes as announced have
// come.
struct alignas(8) Barrier {
  uint64_t bits;
};
__device__ inline unsigned shared_address(const void* x) {
  return static_cast<unsigned>(__cvta_generic_to_shared(x));
}
__device__ inline unsigned address_of_rank(const void* x, unsigned rank) {
  unsigned address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(shared_address(x)), "r"(rank));
  return address;
}
__device__ inline void init_barrier(Barrier& barrier, unsigned threads) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(threads));
}
// Before the barrier of the cluster after which other blocks use this block's barriers.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}
__device__ inline void arrive_announcing(Barrier& barrier, unsigned bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}
// Waits until the present phase is not the one of this parity any more.
__device__ inline void wait(Barrier& barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
      "@!ended bra again;\n"
      "}" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}
// Writes to the same place of a block of the cluster, and counts the bytes on its barrier.
__device__ inline void send(const SentSums& sums, const SentSums& place, const Barrier& barrier,
                            unsigned rank) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address_of_rank(&place, rank)),
      "f"(sums.base), "f"(sums.others), "f"(sums.moment), "f"(sums.unused),
      "r"(address_of_rank(&barrier, rank))
      : "memory");
}
#else
using emulation::Barrier, emulation::init_barrier, emulation::arrive, emulation::wait;
inline void publish_barriers() {}
inline void arrive_announcing(Barrier& barrier, unsigned bytes) {
  emulation::arrive(barrier, 1, static_cast<int>(bytes));
}
inline void send(const SentSums& sums, const SentSums& place, const Barrier& barrier,
                 unsigned rank) {
  *static_cast<SentSums*>(emulation::of_rank(&const_cast<SentSums&>(place), rank)) = sums;
  emulation::arrive(
      *static_cast<Barrier*>(emulation::of_rank(&const_cast<Barrier&>(barrier), rank)), 0,
      -static_cast<int>(sizeof sums));
}
#endif

}  // namespace maxrl::cuda
