// Memory whose vectors of 64 bytes lie each in one cache line: a load across two lines costs two.
#pragma once
#include <cstddef>
#include <cstdint>
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

template <typename T>
using AlignedVector = std::vector<T, AlignedAllocator<T>>;

// Uninitialised memory for elements of any type.
class AlignedBytes {
 public:
  AlignedBytes() = default;
  explicit AlignedBytes(int64_t size)
      : data_(static_cast<std::byte*>(::operator new(size, kCacheLine))) {}

  template <typename Element>
  Element* as() const {
    return reinterpret_cast<Element*>(data_.get());
  }

 private:
  struct Free {
    void operator()(std::byte* data) const { ::operator delete(data, kCacheLine); }
  };
  std::unique_ptr<std::byte[], Free> data_;
};

}  // namespace maxrl::cpu
