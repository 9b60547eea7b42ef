// Keys and values of one sequence in all layers, packed in panels for two matrix multiplications:
// queries times keys gives scores, and probabilities times values gives outputs.
#pragma once
#include <algorithm>

#include "../generation.h"
#include "aligned.h"
#include "numbers.h"

namespace maxrl::cpu {

// For each layer and head, keys are panels of 16 tokens, each as deep as head_dim, and values
// panels of 16 dimensions, each as deep as the capacity in tokens, in the decoder's Layout
// (numbers.h).
class KeyValueCache {
 public:
  // Uninitialised: a position is read only after it was written, or its padding was.
  KeyValueCache(const DecoderSizes& sizes, int64_t length)
      : sizes_(sizes), capacity_(capacity(sizes, length)), keys_size_(capacity_ * depth(sizes)),
        head_size_(keys_size_ + capacity_ * padded(sizes.head_dim)),
        layer_size_(sizes.kv_heads * head_size_), data_(bytes(sizes, length)) {}

  // Of a prompt or a response of this length.
  static int64_t bytes(const DecoderSizes& sizes, int64_t length) {
    const int64_t element = is_bfloat16(sizes.arithmetic) ? sizeof(BFloat16) : sizeof(float);
    return element * sizes.layers * sizes.kv_heads * capacity(sizes, length) *
           (depth(sizes) + padded(sizes.head_dim));
  }

  template <typename Element>
  Element* keys(int64_t layer, int64_t head) const {
    return data_.as<Element>() + layer * layer_size_ + head * head_size_;
  }
  template <typename Element>
  Element* values(int64_t layer, int64_t head) const {
    return keys<Element>(layer, head) + keys_size_;
  }
  int64_t keys_panel_stride() const { return depth(sizes_) * kPanel; }
  int64_t values_panel_stride() const { return capacity_ * kPanel; }

  // Positions must be written in ascending order, from 0.
  void write(int64_t layer, int64_t head, int64_t position, const float* key, const float* value) {
    with_layout(sizes_.arithmetic, [&](auto layout) {
      using Layout = decltype(layout);
      using Element = typename Layout::Element;
      const int64_t dim = sizes_.head_dim, stride = values_panel_stride();
      Element* const panel = keys<Element>(layer, head) + position / kPanel * keys_panel_stride();
      // Padding is multiplied with zeros, so it must be finite: a cache may hold numbers of the
      // response before.
      if (Layout::depth(dim) > dim && position % kPanel == 0)
        std::fill_n(panel, keys_panel_stride(), Element{});
      for (int64_t first = 0; first < dim; first += kPanel) {
        Element* const to = values<Element>(layer, head) + first / kPanel * stride;
        if (Layout::depth(1) > 1 && position % Layout::depth(1) == 0)
          std::fill_n(to + position * kPanel, Layout::depth(1) * kPanel, Element{});
        const int64_t count = std::min(kPanel, dim - first);
        Element numbers[kPanel];  // converted before they are scattered, so that vectors do it
        for (int64_t d = 0; d < count; ++d) numbers[d] = Layout::from_float(key[first + d]);
        for (int64_t d = 0; d < count; ++d)
          panel[Layout::place(first + d, position % kPanel)] = numbers[d];
        for (int64_t d = 0; d < count; ++d) numbers[d] = Layout::from_float(value[first + d]);
        for (int64_t d = 0; d < count; ++d) to[Layout::place(position, d)] = numbers[d];
      }
    });
  }

  // Copies the first positions of a cache of the same sizes and capacity, in whole panels with
  // their padding.
  void copy(const KeyValueCache& from, int64_t positions) {
    with_layout(sizes_.arithmetic, [&](auto layout) {
      using Element = typename decltype(layout)::Element;
      const int64_t of_keys = padded(positions) * depth(sizes_),
                    of_values = layout.depth(positions) * kPanel;
      for (int64_t head = 0; head < sizes_.layers * sizes_.kv_heads; ++head) {
        const Element* const source = from.keys<Element>(0, head);
        Element* const to = keys<Element>(0, head);
        std::copy_n(source, of_keys, to);
        for (int64_t at = keys_size_; at < head_size_; at += values_panel_stride())
          std::copy_n(source + at, of_values, to + at);
      }
    });
  }

 private:
  static int64_t depth(const DecoderSizes& sizes) { return depth(sizes, sizes.head_dim); }
  static int64_t capacity(const DecoderSizes& sizes, int64_t length) {
    return depth(sizes, padded(length));
  }
  static int64_t depth(const DecoderSizes& sizes, int64_t k) {
    return is_bfloat16(sizes.arithmetic) ? BFloat16Layout::depth(k) : Float32Layout::depth(k);
  }

  DecoderSizes sizes_;
  int64_t capacity_, keys_size_, head_size_, layer_size_;  // in elements
  AlignedBytes data_;
};

}  // namespace maxrl::cpu
