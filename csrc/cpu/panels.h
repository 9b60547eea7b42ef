// Matrix multiplication with packed matrices: C [m, n] = A [m, k] B^T, with B [n, k] in panels of 16 of its rows, each [k][16].
//
// Every element of C is one chain of multiply-adds over k, for any m and any position of its row. So the numbers of a sample
// are bitwise identical whatever else is in the batch.
#pragma once
#include <cstdint>

#include "vectors.h"

namespace maxrl::cpu {

constexpr int64_t kPanel = 16;
constexpr int kMostTileRows = 12;

inline int64_t panels_of(int64_t n) { return (n + kPanel - 1) / kPanel; }
inline int64_t padded(int64_t n) { return panels_of(n) * kPanel; }

// Elements from one row to the next: with a power of two, rows would compete for few sets of the L1 cache.
inline int64_t row_stride(int64_t n) { return padded(n) + kPanel; }

// Rows of a tile: their sums, a row of a panel and a factor fill the registers.
template <typename Vectors>
constexpr int tile_rows() {
#if defined(__aarch64__)
  return 6;
#else
  return Vectors::kLanes == 4 ? 2 : Vectors::kLanes == 8 ? 6 : kMostTileRows;
#endif
}

// A row of a tile: 16 numbers.
template <typename Vectors>
struct TileRow {
  static constexpr int kParts = kPanel / Vectors::kLanes;
  typename Vectors::Reals part[kParts];

  static TileRow read(const float* from) {
    TileRow row;
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) row.part[p] = Vectors::read(from + p * Vectors::kLanes);
    return row;
  }
  void write(float* to) const {
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) Vectors::write(to + p * Vectors::kLanes, part[p]);
  }
  TileRow& operator+=(const TileRow& other) {
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) part[p] += other.part[p];
    return *this;
  }
};

// Calls sink(i, row) for `rows` rows a[i] [k] times a panel.
template <typename Vectors, int rows, typename Sink>
inline void tile(const float* const* a, int64_t k, const float* panel, const Sink& sink) {
  using Row = TileRow<Vectors>;
  Row sums[rows] = {};
  const float* from[rows];
#pragma GCC unroll 12
  for (int i = 0; i < rows; ++i) from[i] = a[i];
  for (int64_t j = 0; j < k; ++j) {
    const Row b = Row::read(panel + j * kPanel);
#pragma GCC unroll 12
    for (int i = 0; i < rows; ++i) {
      const float x = from[i][j];
#pragma GCC unroll 4
      for (int p = 0; p < Row::kParts; ++p) sums[i].part[p] += x * b.part[p];
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < rows; ++i) sink(i, sums[i]);
}

template <typename Vectors, int most, typename Sink>
inline void tile_of(int rows, const float* const* a, int64_t k, const float* panel, const Sink& sink) {
  if constexpr (most > 1) {
    if (rows < most) return tile_of<Vectors, most - 1>(rows, a, k, panel, sink);
  }
  tile<Vectors, most>(a, k, panel, sink);
}

// Calls sink(i, panel, row) for all rows row_of(i) and all panels, which are `panel_stride` numbers apart.
template <typename Vectors, typename RowOf, typename Sink>
inline void product(int64_t m, const RowOf& row_of, int64_t k, const float* panels, int64_t num_panels, int64_t panel_stride,
                    const Sink& sink) {
  constexpr int kRows = tile_rows<Vectors>();
  for (int64_t p = 0; p < num_panels; ++p)
    for (int64_t start = 0; start < m; start += kRows) {
      const int rows = static_cast<int>(m - start < kRows ? m - start : kRows);
      const float* a[kRows];
      for (int i = 0; i < rows; ++i) a[i] = row_of(start + i);
      tile_of<Vectors, kRows>(rows, a, k, panels + p * panel_stride,
                              [&](int i, const TileRow<Vectors>& row) { sink(start + i, p, row); });
    }
}

}  // namespace maxrl::cpu
