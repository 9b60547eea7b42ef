// Asynchronous copies to shared memory. They happen when a thread waits for them, or at once with
// MAXRL_EMULATED_COPIES=early.
#pragma once
#include "cuda_runtime.h"

namespace emulation {
void copy(void* to, const void* from, size_t bytes);
void commit_copies();
void finish_copies(size_t but);  // all groups but the newest ones
}  // namespace emulation

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  emulation::copy(to, from, bytes);
}
inline void __pipeline_commit() { emulation::commit_copies(); }
inline void __pipeline_wait_prior(size_t but) { emulation::finish_copies(but); }
