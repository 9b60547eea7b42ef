// Fewer page faults on new memory: mapping a gradient of hundreds of megabytes in 4 KiB pages takes
// longer than computing it.
#pragma once
#include <cstdint>

#include "../token_loss.h"
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace maxrl::cpu {

// Asks the operating system for huge pages for a matrix. This is only advice: it may be ignored,
// and the content of the memory does not change.
template <typename Element>
void advise_huge_pages([[maybe_unused]] Rows<Element> matrix, [[maybe_unused]] int64_t num_rows) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 4096;
  constexpr int64_t kWorthwhile = 4 << 20;  // two huge pages
  const int64_t bytes = num_rows * matrix.stride * static_cast<int64_t>(sizeof(Element));
  if (bytes < kWorthwhile) return;
  const auto address = reinterpret_cast<uintptr_t>(matrix.data),
             first = (address + kPage - 1) / kPage * kPage;
  madvise(reinterpret_cast<void*>(first), address + bytes - first, MADV_HUGEPAGE);
#endif
}

}  // namespace maxrl::cpu
