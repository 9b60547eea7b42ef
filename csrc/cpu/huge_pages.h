// Fewer page faults on fresh memory: a gradient of hundreds of megabytes costs more to map, 4 KiB at a time, than to compute.
#pragma once
#include <cstdint>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace maxrl::cpu {

// Advises the system to use huge pages for [begin, begin + bytes). The content does not change, and errors are ignored.
inline void advise_huge_pages([[maybe_unused]] void* begin, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 4096;
  constexpr int64_t kWorthwhile = 4 << 20;  // two huge pages
  if (bytes < kWorthwhile) return;
  const auto address = reinterpret_cast<uintptr_t>(begin), first = (address + kPage - 1) / kPage * kPage;
  madvise(reinterpret_cast<void*>(first), address + bytes - first, MADV_HUGEPAGE);
#endif
}

}  // namespace maxrl::cpu
