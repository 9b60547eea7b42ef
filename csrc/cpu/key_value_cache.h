// Keys and values of one sequence in all layers, packed in panels for two matrix multiplications: queries times keys gives
// scores, and probabilities times values gives outputs.
#pragma once
#include <cstring>

#include "../generation.h"
#include "aligned.h"
#include "panels.h"

namespace maxrl::cpu {

// For each layer and head, keys are [capacity / 16][head_dim][16] and values [head_dim / 16][capacity][16], padded to panels.
class KeyValueCache {
 public:
  KeyValueCache(const DecoderSizes& sizes, int64_t length)
      : head_dim_(sizes.head_dim), capacity_(padded(length)), keys_size_(capacity_ * head_dim_),
        head_size_(keys_size_ + capacity_ * padded(head_dim_)), layer_size_(sizes.kv_heads * head_size_),
        data_(aligned_array<float>(sizes.layers * layer_size_)) {}

  static int64_t bytes(const DecoderSizes& sizes, int64_t length) {
    return 4 * sizes.layers * sizes.kv_heads * padded(length) * (sizes.head_dim + padded(sizes.head_dim));
  }

  const float* keys(int64_t layer, int64_t head) const { return data_.get() + layer * layer_size_ + head * head_size_; }
  const float* values(int64_t layer, int64_t head) const { return keys(layer, head) + keys_size_; }
  int64_t values_panel_stride() const { return capacity_ * kPanel; }

  void write(int64_t layer, int64_t head, int64_t position, const float* key, const float* value) {
    float* const keys = data_.get() + layer * layer_size_ + head * head_size_;
    float* column = keys + position / kPanel * kPanel * head_dim_ + position % kPanel;
    float* row = keys + keys_size_ + position * kPanel;
    for (int64_t first = 0; first < head_dim_; first += kPanel, row += values_panel_stride()) {
      const int64_t count = head_dim_ - first < kPanel ? head_dim_ - first : kPanel;
      for (int64_t d = 0; d < count; ++d, column += kPanel) *column = key[first + d];
      std::memcpy(row, value + first, count * sizeof(float));
    }
  }

 private:
  int64_t head_dim_, capacity_, keys_size_, head_size_, layer_size_;
  AlignedArray<float> data_;  // uninitialised: a position is read only after it was written
};

}  // namespace maxrl::cpu
