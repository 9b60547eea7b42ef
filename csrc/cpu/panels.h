// Matrix multiplication with packed matrices: C [m, n] = A [m, k] B^T, with B [n, k] in panels of 16 rows, each [k][16].
//
// An element of C is one chain of multiply-adds over k, independent of m and of the row's position. A sample's numbers are
// therefore bitwise independent of what else is in the batch.
#pragma once
#include <cstdint>

#include "vectors.h"

namespace maxrl::cpu {

constexpr int64_t kPanel = 16;
constexpr int kMaxTileRows = 12;

inline int64_t panels_of(int64_t n) { return (n + kPanel - 1) / kPanel; }
inline int64_t padded(int64_t n) { return panels_of(n) * kPanel; }

// Distance between rows of a matrix in floats; with a power of two, rows would compete for few sets of the L1 cache.
inline int64_t row_stride(int64_t n) { return padded(n) + kPanel; }

// Rows of a tile: as many as the registers hold accumulators for, besides one row of a panel and one factor.
template <typename Vectors>
constexpr int tile_rows() {
#if defined(__aarch64__)
  return 6;
#else
  return Vectors::kLanes == 4 ? 2 : Vectors::kLanes == 8 ? 6 : kMaxTileRows;
#endif
}

// One row of a tile: 16 floats.
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

// Multiplies `rows` rows a[i] [k] with one panel, and calls sink(i, row) for each.
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

// Multiplies m rows row_of(i) with all panels, `panel_stride` floats apart, and calls sink(i, panel, row) for each.
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
