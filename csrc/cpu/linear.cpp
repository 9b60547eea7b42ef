// The products of a linear layer in training, in float32, by the tiles of panels.h: y = x W^T, dx =
// dy W and dW = dy^T x.
//
// For y and dx the weights are packed into panels, and rows are cut into tasks. For dW its own rows
// are cut into tasks; a task packs blocks of rows of x and dy, and adds up their products, one
// after the other. Every number is therefore summed in one order: results are bitwise the same for
// any number of threads.
#include <algorithm>
#include <stdexcept>

#include "../layer.h"
#include "aligned.h"
#include "dispatch.h"
#include "panels.h"

namespace maxrl::cpu {
namespace {

constexpr int64_t kTaskRows = 64;  // of a task: they stay in the second cache while panels pass
constexpr int64_t kBlockRows =
    128;  // of x and dy in dW: three panels of x are half of the first cache
constexpr int64_t kGroup =
    6;  // panels of x that are packed at a time: a multiple of the tiles' two or three
constexpr int64_t kTaskColumns =
    256;  // of dy, at most: packed, they are an eighth of the second cache

// [panels, k, 16] of a matrix whose number (column, row) is at column * column_stride + row *
// row_stride.
AlignedBytes pack(const float* matrix, int64_t columns, int64_t k, int64_t column_stride,
                  int64_t row_stride, int num_threads) {
  AlignedBytes packed(columns * k * static_cast<int64_t>(sizeof(float)));
  float* const panels = packed.as<float>();
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t first = 0; first < columns; first += kPanel)
    for (int64_t j = 0; j < k; ++j)
      for (int64_t c = 0; c < kPanel; ++c)
        panels[first * k + j * kPanel + c] = matrix[(first + c) * column_stride + j * row_stride];
  return packed;
}

// to [m, n] = from [m, k] times panels, finished by finish(i, column, row of a tile).
template <typename Finish>
void multiply(int64_t m, int64_t n, int64_t k, const float* from, const AlignedBytes& panels,
              float* to, int num_threads, const Finish& finish) {
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1)
  for (int64_t first = 0; first < m; first += kTaskRows)
    with_widest_floats([&](auto vectors) {
      using Vectors = decltype(vectors);
      product<Vectors>(
          std::min(kTaskRows, m - first), [&](int64_t i) { return from + (first + i) * k; }, k,
          panels.as<float>(), n / kPanel, k * kPanel,
          [&](int64_t i, int64_t panel, TileRow<Vectors> row) {
            const int64_t column = panel * kPanel;
            finish(first + i, column, row);
            row.write(to + (first + i) * n + column);
          });
    });
}

// Copies 16 columns of a matrix [rows, stride] side by side, and hands each row of them to `seen`.
template <typename Vectors, typename Seen>
void pack_columns(const float* from, int64_t rows, int64_t stride, float* to, const Seen& seen) {
  for (int64_t i = 0; i < rows; ++i) {
    const auto row = TileRow<Vectors>::read(from + i * stride);
    row.write(to + i * kPanel);
    seen(row);
  }
}

// Rows begin..end - 1 of dW, and of the gradient in the bias; at most kTaskColumns.
template <typename Vectors>
void weight_rows(const LinearBackward& in, int64_t begin, int64_t end) {
  using Row = TileRow<Vectors>;
  // Columns of dy and of x: in the matrices their rows lie far apart, and would compete for few
  // sets of the caches.
  alignas(64) float grads[kTaskColumns * kBlockRows], inputs[kGroup * kPanel * kBlockRows];
  const int64_t num_panels = in.in_size / kPanel;
  for (int64_t first = 0; first < in.num_rows; first += kBlockRows) {
    const int64_t rows = std::min(kBlockRows, in.num_rows - first), size = rows * kPanel;
    const auto add = [&](float* to, Row row) {
      if (first) row += Row::read(to);
      row.write(to);
    };
    for (int64_t column = begin; column < end; column += kPanel) {
      Row sum = {};
      pack_columns<Vectors>(in.grad + first * in.out_size + column, rows, in.out_size,
                            grads + (column - begin) * rows, [&](const Row& row) { sum += row; });
      if (in.grad_bias) add(in.grad_bias + column, sum);
    }
    for (int64_t panel = 0; panel < num_panels; panel += kGroup) {
      const int64_t group = std::min(kGroup, num_panels - panel);
      for (int64_t p = 0; p < group; ++p)
        pack_columns<Vectors>(in.x + first * in.in_size + (panel + p) * kPanel, rows, in.in_size,
                              inputs + p * size, [](const Row&) {});
      product<Vectors>(
          end - begin, [&](int64_t i) { return grads + i / kPanel * size + i % kPanel; }, rows,
          inputs, group, size,
          [&](int64_t i, int64_t p, const Row& row) {
            add(in.grad_weight + (begin + i) * in.in_size + (panel + p) * kPanel, row);
          },
          kPanel);
    }
  }
}

void check_sizes(int64_t in_size, int64_t out_size) {
  if (in_size < 16 || out_size < 16 || in_size % 16 || out_size % 16)
    throw std::invalid_argument("a linear layer needs sizes that are multiples of 16");
}

void linear(const Linear& in, int num_threads) {
  check_sizes(in.in_size, in.out_size);
  const AlignedBytes panels = pack(in.weight, in.out_size, in.in_size, in.in_size, 1, num_threads);
  multiply(in.num_rows, in.out_size, in.in_size, in.x, panels, in.y, num_threads,
           [&](int64_t i, int64_t column, auto& row) {
             if (in.bias) row += row.read(in.bias + column);
             if (in.added) row += row.read(in.added + i * in.out_size + column);
           });
}

void linear_backward(const LinearBackward& in, int num_threads) {
  check_sizes(in.in_size, in.out_size);
  if (in.grad_x) {
    const AlignedBytes panels =
        pack(in.weight, in.in_size, in.out_size, 1, in.in_size, num_threads);
    multiply(in.num_rows, in.in_size, in.out_size, in.grad, panels, in.grad_x, num_threads,
             [](int64_t, int64_t, auto&) {});
  }
  if (!in.grad_weight) return;
  if (in.num_rows == 0) {  // without a block of rows nothing would be written
    std::fill_n(in.grad_weight, in.out_size * in.in_size, 0.0f);
    if (in.grad_bias) std::fill_n(in.grad_bias, in.out_size, 0.0f);
    return;
  }
  const int64_t even = padded((in.out_size - 1) / num_threads + 1),
                of_task = std::min(even, kTaskColumns);
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1)
  for (int64_t begin = 0; begin < in.out_size; begin += of_task)
    with_widest_floats([&](auto vectors) {
      weight_rows<decltype(vectors)>(in, begin, std::min(begin + of_task, in.out_size));
    });
}

const bool defined =
    define_kernel("linear", linear) && define_kernel("linear_backward", linear_backward);

}  // namespace
}  // namespace maxrl::cpu
