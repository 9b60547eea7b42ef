// Memory whose vectors of 64 bytes lie each in one cache line: a load across two lines costs two.
#pragma once
#include <cstddef>
#include <memory>
#include <new>
#include <vector>

namespace maxrl::cpu {

constexpr std::align_val_t kCacheLine{64};

template <typename T>
struct AlignedAllocator {
  using value_type = T;
  AlignedAllocator() = default;
  template <typename U>
  AlignedAllocator(const AlignedAllocator<U>&) {}

  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kCacheLine)); }
  void deallocate(T* p, size_t) { ::operator delete(p, kCacheLine); }
  template <typename U>
  bool operator==(const AlignedAllocator<U>&) const {
    return true;
  }
  template <typename U>
  bool operator!=(const AlignedAllocator<U>&) const {
    return false;
  }
};

struct AlignedDelete {
  void operator()(void* p) const { ::operator delete(p, kCacheLine); }
};
template <typename T>
using AlignedArray = std::unique_ptr<T[], AlignedDelete>;

// Uninitialised.
template <typename T>
AlignedArray<T> aligned_array(size_t n) {
  return AlignedArray<T>(AlignedAllocator<T>().allocate(n));
}

template <typename T>
using AlignedVector = std::vector<T, AlignedAllocator<T>>;

}  // namespace maxrl::cpu
