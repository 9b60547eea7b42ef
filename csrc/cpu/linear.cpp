// The products of a linear layer in training, in float32, by the tiles of panels.h: y = x W^T, dx = dy W and dW = dy^T x.
//
// For y and dx the weights are packed into panels, and rows are cut into tasks. For dW the rows of x are those of the panels as
// they are, and the rows of dW are cut into tasks; a task adds up blocks of rows of x, one after the other. Every number is
// therefore summed in one order: results are bitwise the same for any number of threads.
#include <algorithm>

#include "../kernels.h"
#include "aligned.h"
#include "dispatch.h"
#include "panels.h"

namespace maxrl::cpu {
namespace {

constexpr int64_t kTaskRows = 64;  // of a task: they stay in the second cache while panels pass
constexpr int64_t kBlockRows = 256;  // of x, which stay there while columns of dy pass

// [panels, k, 16] of a matrix whose number (column, row) is at column * column_stride + row * row_stride.
AlignedBytes pack(const float* matrix, int64_t columns, int64_t k, int64_t column_stride, int64_t row_stride, int num_threads) {
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
void multiply(int64_t m, int64_t n, int64_t k, const float* from, const AlignedBytes& panels, float* to, int num_threads,
              const Finish& finish) {
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1)
  for (int64_t first = 0; first < m; first += kTaskRows)
    with_widest_floats([&](auto vectors) {
      using Vectors = decltype(vectors);
      product<Vectors>(
          std::min(kTaskRows, m - first), [&](int64_t i) { return from + (first + i) * k; }, k, panels.as<float>(), n / kPanel,
          k * kPanel,
          [&](int64_t i, int64_t panel, TileRow<Vectors> row) {
            const int64_t column = panel * kPanel;
            finish(first + i, column, row);
            row.write(to + (first + i) * n + column);
          });
    });
}

// Rows begin..end - 1 of dW, and of the gradient in the bias.
template <typename Vectors>
void weight_rows(const LinearBackward& in, int64_t begin, int64_t end) {
  using Row = TileRow<Vectors>;
  alignas(64) float packed[kBlockRows * kPanel];  // 16 columns of dy, whose rows lie far apart
  for (int64_t first = 0; first < in.num_rows; first += kBlockRows) {
    const int64_t rows = std::min(kBlockRows, in.num_rows - first);
    const auto add = [&](float* to, Row row) {
      if (first) row += Row::read(to);
      row.write(to);
    };
    for (int64_t column = begin; column < end; column += kPanel) {
      Row sum = {};
      for (int64_t i = 0; i < rows; ++i) {
        const Row row = Row::read(in.grad + (first + i) * in.out_size + column);
        row.write(packed + i * kPanel);
        sum += row;
      }
      if (in.grad_bias) add(in.grad_bias + column, sum);
      product<Vectors>(
          kPanel, [&](int64_t i) { return packed + i; }, rows, in.x + first * in.in_size, in.in_size / kPanel, kPanel,
          [&](int64_t i, int64_t panel, const Row& row) {
            add(in.grad_weight + (column + i) * in.in_size + panel * kPanel, row);
          },
          {kPanel, in.in_size});
    }
  }
}

}  // namespace

void linear(const Linear& in, int num_threads) {
  const AlignedBytes panels = pack(in.weight, in.out_size, in.in_size, in.in_size, 1, num_threads);
  multiply(in.num_rows, in.out_size, in.in_size, in.x, panels, in.y, num_threads, [&](int64_t i, int64_t column, auto& row) {
    if (in.bias) row += row.read(in.bias + column);
    if (in.added) row += row.read(in.added + i * in.out_size + column);
  });
}

void linear_backward(const LinearBackward& in, int num_threads) {
  if (in.grad_x) {
    const AlignedBytes panels = pack(in.weight, in.in_size, in.out_size, 1, in.in_size, num_threads);
    multiply(in.num_rows, in.in_size, in.out_size, in.grad, panels, in.grad_x, num_threads, [](int64_t, int64_t, auto&) {});
  }
  if (!in.grad_weight) return;
  if (in.num_rows == 0) {  // without a block of rows nothing would be written
    std::fill_n(in.grad_weight, in.out_size * in.in_size, 0.0f);
    if (in.grad_bias) std::fill_n(in.grad_bias, in.out_size, 0.0f);
    return;
  }
  const int64_t num_panels = in.out_size / kPanel, of_task = (num_panels - 1) / num_threads + 1;
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t panel = 0; panel < num_panels; panel += of_task)
    with_widest_floats([&](auto vectors) {
      weight_rows<decltype(vectors)>(in, panel * kPanel, std::min(panel + of_task, num_panels) * kPanel);
    });
}

}  // namespace maxrl::cpu
