// Memory that starts with a cache line, so that no row of a packed matrix crosses one.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace maxrl::cpu {

class AlignedBytes {
 public:
  AlignedBytes() = default;
  explicit AlignedBytes(int64_t size) : data_(new (kLine) std::byte[size]) {}  // uninitialised

  template <typename Element>
  Element* as() const {
    return reinterpret_cast<Element*>(data_.get());
  }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(std::byte* data) const { operator delete[](data, kLine); }
  };
  std::unique_ptr<std::byte[], Free> data_;
};

}  // namespace maxrl::cpu
