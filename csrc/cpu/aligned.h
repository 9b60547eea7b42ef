// Memory whose vectors of 64 bytes lie each in one cache line: a load across two lines costs two.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace maxrl::cpu {

constexpr std::align_val_t kCacheLine{64};

// Memory for elements of any type, uninitialised unless `zeros` made it.
class AlignedBytes {
 public:
  AlignedBytes() = default;
  explicit AlignedBytes(int64_t size)
      : data_(static_cast<std::byte*>(::operator new(size, kCacheLine))) {}

  template <typename Element>
  static AlignedBytes zeros(int64_t count) {
    AlignedBytes made(count * static_cast<int64_t>(sizeof(Element)));
    std::fill_n(made.as<Element>(), count, Element{});
    return made;
  }

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
