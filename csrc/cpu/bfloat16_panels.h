// Matrix multiplication in bfloat16 with float32 sums, C [m, n] = A [m, k] B^T as in panels.h, on
// three paths: AMX tiles, AVX512-BF16, and plain C++ that runs anywhere.
//
// Rows of A are rounded to bfloat16 when they are multiplied, and padded with zeros to whole steps
// of 32 numbers. B is in panels of 16 rows, each [k / 2][16][2]: a panel's row has two successive
// numbers of each of 16 rows of B, which is what the instructions of both kinds multiply. On every
// path an element of C is the same sequence of operations whatever m is, so that a sample's numbers
// are bitwise independent of what else is in the batch; between paths it is not the same sequence.
#pragma once
#include <cstring>

#include "bfloat16_instructions.h"
#include "panels.h"

namespace maxrl::cpu {

constexpr int64_t kBFloat16Step = 32;  // numbers of k that an AMX instruction multiplies

// Numbers of a row of k: padding is zero.
inline int64_t bfloat16_depth(int64_t k) {
  return (k + kBFloat16Step - 1) / kBFloat16Step * kBFloat16Step;
}

// Distance between rounded rows, where rows of a power of two would compete for few sets of the L1
// cache.
inline int64_t bfloat16_stride(int64_t k) { return bfloat16_depth(k) + kBFloat16Step; }

inline void round_row(const float* __restrict x, int64_t k, BFloat16* __restrict to,
                      int64_t first = 0) {
  for (int64_t j = first; j < k; ++j) to[j] = rounded(x[j]);
  for (int64_t j = k; j < bfloat16_depth(k); ++j) to[j] = {0};
}

// A path rounds rows, and multiplies up to rows_of(m) rows a + i * stride [depth] with up to
// panels_of(m) panels, to out [panel][rows_of(m)][16], at most kMaxOut floats. It may compute more
// rows than `rows`.
struct PlainBFloat16 {
  using Vectors = cpu::Vectors<float, 4>;
  static constexpr int kRows = 12;

  static constexpr int rows_of(int64_t) { return kRows; }
  static constexpr int panels_of(int64_t) { return 1; }
  static void round(const float* x, int64_t k, BFloat16* to) { round_row(x, k, to); }

  static void multiply(int rows, int, const BFloat16* a, int64_t stride, int64_t depth,
                       const BFloat16* panels, int64_t, float* out) {
    const auto value = [](BFloat16 x) {
      return bits_as<float>(static_cast<uint32_t>(x.bits) << 16);
    };
    for (int i = 0; i < rows; ++i) {
      float sums[kPanel] = {};
      for (int64_t j = 0; j < depth; j += 2) {
        const float even = value(a[i * stride + j]), odd = value(a[i * stride + j + 1]);
        const BFloat16* const b = panels + j * kPanel;
        for (int64_t c = 0; c < kPanel; ++c)
          sums[c] += even * value(b[2 * c]) + odd * value(b[2 * c + 1]);
      }
      std::memcpy(out + i * kPanel, sums, sizeof sums);
    }
  }
};

#if defined(MAXRL_HAS_BFLOAT16_INSTRUCTIONS)
struct Avx512BFloat16 {
  using Vectors = cpu::Vectors<float, 16>;
  static constexpr int kRows = 12;  // as many accumulators hide the latency of the instruction

  static constexpr int rows_of(int64_t) { return kRows; }
  static constexpr int panels_of(int64_t) { return 1; }

  MAXRL_AVX512_BF16 static void round(const float* x, int64_t k, BFloat16* to) {
    int64_t j = 0;
    for (; j + 16 <= k; j += 16) {
      const auto part = _mm512_cvtneps_pbh(_mm512_loadu_ps(x + j));
      std::memcpy(to + j, &part, sizeof part);
    }
    round_row(x, k, to, j);
  }

  template <int rows>
  MAXRL_AVX512_BF16 static void tile(const BFloat16* a, int64_t stride, int64_t depth,
                                     const BFloat16* panel, float* out) {
    __m512 sums[rows];
#pragma GCC unroll 12
    for (int i = 0; i < rows; ++i) sums[i] = _mm512_setzero_ps();
    for (int64_t j = 0; j < depth; j += 2) {
      const auto b = (__m512bh)_mm512_loadu_si512(panel + j * kPanel);
#pragma GCC unroll 12
      for (int i = 0; i < rows; ++i) {
        int pair;
        std::memcpy(&pair, a + i * stride + j, sizeof pair);
        sums[i] = _mm512_dpbf16_ps(sums[i], b, (__m512bh)_mm512_set1_epi32(pair));
      }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; ++i) _mm512_storeu_ps(out + i * kPanel, sums[i]);
  }
  template <int most = kRows>
  MAXRL_AVX512_BF16 static void multiply(int rows, int panels, const BFloat16* a, int64_t stride,
                                         int64_t depth, const BFloat16* panel, int64_t panel_stride,
                                         float* out) {
    if constexpr (most > 1)
      if (rows < most)
        return multiply<most - 1>(rows, panels, a, stride, depth, panel, panel_stride, out);
    tile<most>(a, stride, depth, panel, out);
  }
};

// Tiles 0 to 3 are sums, of 16 or 32 rows and one or two panels; 4 and 5 are rows, 6 and 7 panels.
struct AmxBFloat16 : Avx512BFloat16 {
  static constexpr int kRows = 32;
  static constexpr int64_t kTile = 16, kRowBytes = 64, kSums = kTile * kPanel;

  static constexpr int rows_of(int64_t m) { return m > kTile ? 32 : 16; }
  static constexpr int panels_of(int64_t) { return 2; }

  template <int rows, int count>
  MAXRL_AMX static void tile(const BFloat16* a, int64_t stride, int64_t depth,
                             const BFloat16* panels, int64_t panel_stride, float* out) {
    const int64_t bytes = stride * static_cast<int64_t>(sizeof *a);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t j = 0; j < depth; j += kBFloat16Step) {
      _tile_loadd(4, a + j, bytes);
      _tile_loadd(6, panels + j * kPanel, kRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (rows > kTile) {
        _tile_loadd(5, a + kTile * stride + j, bytes);
        _tile_dpbf16ps(1, 5, 6);
      }
      if constexpr (count > 1) {
        _tile_loadd(7, panels + panel_stride + j * kPanel, kRowBytes);
        _tile_dpbf16ps(2, 4, 7);
        if constexpr (rows > kTile) _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, out, kRowBytes);
    if constexpr (rows > kTile) _tile_stored(1, out + kSums, kRowBytes);
    if constexpr (count > 1) _tile_stored(2, out + rows * kPanel, kRowBytes);
    if constexpr (count > 1 && rows > kTile)
      _tile_stored(3, out + rows * kPanel + kSums, kRowBytes);
  }

  MAXRL_AMX static void multiply(int rows, int count, const BFloat16* a, int64_t stride,
                                 int64_t depth, const BFloat16* panels, int64_t panel_stride,
                                 float* out) {
    const auto work = rows > kTile ? (count > 1 ? tile<32, 2> : tile<32, 1>)
                                   : (count > 1 ? tile<16, 2> : tile<16, 1>);
    asm volatile("" ::: "memory");  // some compilers do not know that loads of tiles read memory
    work(a, stride, depth, panels, panel_stride, out);
    asm volatile("" ::: "memory");
  }
};
#endif

constexpr int64_t kMaxBFloat16Rows =
    32;  // rows_of of any path: rounded rows are allocated in multiples of it
constexpr int64_t kMaxOut = 4 * 16 * kPanel;

}  // namespace maxrl::cpu
