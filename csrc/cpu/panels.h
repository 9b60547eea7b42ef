// Matrix multiplication with packed matrices: C [m, n] = A [m, k] B^T, with B [n, k] in panels of
// 16 rows, each [k][16].
//
// Where A is transposed, the numbers of a row are `row_step` apart.
//
// An element of C is one chain of multiply-adds over k, independent of m and of the row's position.
// A sample's numbers are therefore bitwise independent of what else is in the batch.
#pragma once
#include <cstdint>
#include <type_traits>

#include "vectors.h"

namespace maxrl::cpu {

constexpr int64_t kPanel = 16;

inline int64_t panels_of(int64_t n) { return (n + kPanel - 1) / kPanel; }
inline int64_t padded(int64_t n) { return panels_of(n) * kPanel; }

// Distance between rows of a matrix in floats; with a power of two, rows would compete for few sets
// of the L1 cache.
inline int64_t row_stride(int64_t n) { return padded(n) + kPanel; }

// Rows and panels of the largest tile: as many as the registers hold accumulators for, besides a
// row of its panels and one factor. With one panel of AVX-512 vectors, each multiply-add would need
// a separate load.
template <typename Vectors>
constexpr int tile_rows() {
#if defined(__aarch64__)
  return 6;
#else
  return Vectors::kLanes == 4 ? 2 : Vectors::kLanes == 8 ? 6 : 8;
#endif
}
template <typename Vectors>
constexpr int tile_panels() {
  return Vectors::kLanes == 16 ? 3 : 1;
}
constexpr int kMaxTileRows = 8;

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

// Multiplies `rows` rows a[i] [k] with `width` panels, and calls sink(i, panel, row) for each.
// Meanwhile it prefetches what lies `ahead` floats after the panels: of one panel in a full tile,
// because others follow for the next panels, otherwise of all.
template <typename Vectors, int rows, int width, typename Sink>
inline void tile(const float* const* a, int64_t k, const float* panels, int64_t panel_stride,
                 int64_t row_step, int64_t ahead, const Sink& sink) {
  using Row = TileRow<Vectors>;
  constexpr bool kPrefetches = tile_panels<Vectors>() > 1;
  constexpr int kPrefetched = !kPrefetches ? 0 : rows == tile_rows<Vectors>() ? 1 : width;
  Row sums[rows][width] = {};
  const float* from[rows];
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) from[i] = a[i];
  for (int64_t j = 0; j < k; ++j, panels += kPanel) {
    Row b[width];
#pragma GCC unroll 3
    for (int w = 0; w < width; ++w) b[w] = Row::read(panels + w * panel_stride);
#pragma GCC unroll 3
    for (int w = 0; w < kPrefetched; ++w)
      __builtin_prefetch(panels + ahead + w * panel_stride, 0, 2);
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      const float x = from[i][j * row_step];
#pragma GCC unroll 3
      for (int w = 0; w < width; ++w)
#pragma GCC unroll 4
        for (int p = 0; p < Row::kParts; ++p) sums[i][w].part[p] += x * b[w].part[p];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 3
    for (int w = 0; w < width; ++w) sink(i, w, sums[i][w]);
}

template <typename Vectors, int most, int width, typename Sink>
inline void tile_of(int rows, const float* const* a, int64_t k, const float* panels,
                    int64_t panel_stride, int64_t row_step, int64_t ahead, const Sink& sink) {
  if constexpr (most > 1) {
    if (rows < most)
      return tile_of<Vectors, most - 1, width>(rows, a, k, panels, panel_stride, row_step, ahead,
                                               sink);
  }
  tile<Vectors, most, width>(a, k, panels, panel_stride, row_step, ahead, sink);
}

// Multiplies m rows row_of(i) with the first `width` of num_panels panels, and calls sink(i, panel,
// row) for each.
template <typename Vectors, int width, typename RowOf, typename Sink>
inline void tiles(int64_t m, const RowOf& row_of, int64_t k, const float* panels,
                  int64_t num_panels, int64_t panel_stride, int64_t row_step, const Sink& sink) {
  constexpr int kRows = tile_rows<Vectors>();
  for (int64_t start = 0; start < m; start += kRows) {
    const int rows = static_cast<int>(m - start < kRows ? m - start : kRows);
    const float* a[kRows];
    for (int i = 0; i < rows; ++i) a[i] = row_of(start + i);
    const int64_t next =
        rows < kRows ? 0 : start / kRows;  // which of the next panels this tile prefetches
    const int64_t ahead =
        next < width && width + next < num_panels ? (width + next) * panel_stride : 0;
    tile_of<Vectors, kRows, width>(
        rows, a, k, panels, panel_stride, row_step, ahead,
        [&](int i, int panel, const TileRow<Vectors>& row) { sink(start + i, panel, row); });
  }
}

// Multiplies m rows row_of(i) with all panels, `panel_stride` floats apart, and calls sink(i,
// panel, row) for each.
template <typename Vectors, typename RowOf, typename Sink>
inline void product(int64_t m, const RowOf& row_of, int64_t k, const float* panels,
                    int64_t num_panels, int64_t panel_stride, const Sink& sink,
                    int64_t row_step = 1) {
  int64_t done = 0;
  const auto multiply = [&](auto width) {
    tiles<Vectors, decltype(width)::value>(
        m, row_of, k, panels + done * panel_stride, num_panels - done, panel_stride, row_step,
        [&](int64_t i, int64_t panel, const TileRow<Vectors>& row) { sink(i, done + panel, row); });
    done += width;
  };
  if constexpr (tile_panels<Vectors>() == 3) {
    // The last four are two twos, because a single one is slow.
    while (num_panels - done == 3 || num_panels - done > 4)
      multiply(std::integral_constant<int, 3>{});
    while (num_panels - done >= 2) multiply(std::integral_constant<int, 2>{});
  }
  while (done < num_panels) multiply(std::integral_constant<int, 1>{});
}

}  // namespace maxrl::cpu
