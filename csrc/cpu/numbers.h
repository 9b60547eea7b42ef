// The numbers that the decoder multiplies: float32, or bfloat16 with float32 sums.
#pragma once
#include "bfloat16_panels.h"

namespace maxrl::cpu {

// Each has: the Element of packed matrices; the place of number j of column c in a panel; how many
// numbers a column of k has with padding; the rows of a tile; and a product of rows of floats with
// panels.
struct Float32Layout {
  using Element = float;
  static Element from_float(float x) { return x; }
  static int64_t depth(int64_t k) { return k; }
  static int64_t place(int64_t j, int64_t column) { return j * kPanel + column; }
};
struct BFloat16Layout {
  using Element = BFloat16;
  static Element from_float(float x) { return rounded(x); }
  static int64_t depth(int64_t k) { return bfloat16_depth(k); }
  static int64_t place(int64_t j, int64_t column) { return (j / 2 * kPanel + column) * 2 + j % 2; }
};

template <typename Vectors_>
struct Float32 : Float32Layout {
  using Vectors = Vectors_;
  static constexpr int kRows = tile_rows<Vectors>();

  template <typename RowOf, typename Sink>
  static void multiply(int64_t m, const RowOf& row_of, int64_t k, const float* panels,
                       int64_t num_panels, int64_t panel_stride, BFloat16*, const Sink& sink) {
    product<Vectors>(m, row_of, k, panels, num_panels, panel_stride, sink);
  }
};
template <typename Path>
struct BFloat16Products : BFloat16Layout {
  using Vectors = typename Path::Vectors;
  static constexpr int kRows = Path::kRows;

  // As panels.h's product, where `scratch` has space for m rounded rows, m rounded up to a multiple
  // of kMaxBFloat16Rows: [m][bfloat16_stride(k)].
  template <typename RowOf, typename Sink>
  static void multiply(int64_t m, const RowOf& row_of, int64_t k, const BFloat16* panels,
                       int64_t num_panels, int64_t panel_stride, BFloat16* scratch,
                       const Sink& sink) {
    using Row = TileRow<typename Path::Vectors>;
    const int64_t stride = bfloat16_stride(k), depth = bfloat16_depth(k);
    for (int64_t i = 0; i < m; ++i) Path::round(row_of(i), k, scratch + i * stride);
    alignas(64) float out[kMaxOut];
    const int most_rows = Path::rows_of(m), most_panels = Path::panels_of(m);
    for (int64_t p = 0; p < num_panels; p += most_panels) {
      const int count = static_cast<int>(std::min<int64_t>(most_panels, num_panels - p));
      for (int64_t start = 0; start < m; start += most_rows) {
        const int rows = static_cast<int>(std::min<int64_t>(most_rows, m - start)),
                  out_rows = Path::rows_of(rows);
        Path::multiply(rows, count, scratch + start * stride, stride, depth,
                       panels + p * panel_stride, panel_stride, out);
        for (int q = 0; q < count; ++q)
          for (int i = 0; i < rows; ++i)
            sink(start + i, p + q, Row::read(out + (q * out_rows + i) * kPanel));
      }
    }
  }
};

constexpr int kMaxQueries = 32;  // kRows of any of them
static_assert(kMaxQueries >= kMaxTileRows && kMaxQueries >= kMaxBFloat16Rows);

inline bool is_bfloat16(Arithmetic arithmetic) { return arithmetic != Arithmetic::kFloat32; }

// use(layout)
template <typename Use>
void with_layout(Arithmetic arithmetic, const Use& use) {
  if (is_bfloat16(arithmetic)) return use(BFloat16Layout{});
  use(Float32Layout{});
}

#if defined(MAXRL_HAS_BFLOAT16_INSTRUCTIONS)
template <typename Work>
MAXRL_AMX void with_amx(const Work& work) {
  work(BFloat16Products<AmxBFloat16>{});
}
template <typename Work>
MAXRL_AVX512_BF16 void with_avx512_bf16(const Work& work) {
  work(BFloat16Products<Avx512BFloat16>{});
}
#endif

// work(numbers), compiled for their instructions.
template <typename Work>
void with_numbers(Arithmetic arithmetic, const Work& work) {
#if defined(MAXRL_HAS_BFLOAT16_INSTRUCTIONS)
  if (arithmetic == Arithmetic::kAmx) return with_amx(work);
  if (arithmetic == Arithmetic::kAvx512BFloat16) return with_avx512_bf16(work);
#endif
  if (is_bfloat16(arithmetic)) return work(BFloat16Products<PlainBFloat16>{});
  with_widest_floats([&](auto vectors) { work(Float32<decltype(vectors)>{}); });
}

}  // namespace maxrl::cpu
