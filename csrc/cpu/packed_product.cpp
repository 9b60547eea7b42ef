// One of the decoder's matrix multiplications by itself, for tests.
#include <vector>

#include "aligned.h"
#include "numbers.h"

namespace maxrl::cpu {
namespace {

// c [m, n] = a [m, k] b [n, k]^T
struct PackedProduct {
  Arithmetic arithmetic;
  int64_t m, n, k;
  const float *a, *b;
  float* c;

  MAXRL_FIELDS(arithmetic, m, n, k, a, b, c)
};

void packed_product(const PackedProduct& in, int) {
  const int64_t m = in.m, n = in.n, k = in.k;
  const Arithmetic arithmetic = in.arithmetic;
  check_available(arithmetic);
  const TileRegisters tiles(arithmetic);
  std::vector<BFloat16> scratch((m + kMaxBFloat16Rows) * bfloat16_stride(k));
  with_numbers(arithmetic, [&](auto numbers) {
    using Numbers = decltype(numbers);
    using Element = typename Numbers::Element;
    const int64_t stride = Numbers::depth(k) * kPanel, size = panels_of(n) * stride;
    const AlignedBytes panels(size * static_cast<int64_t>(sizeof(Element)));
    auto* const packed = panels.as<Element>();
    for (int64_t i = 0; i < size; ++i) packed[i] = Element{};
    for (int64_t row = 0; row < n; ++row)
      for (int64_t j = 0; j < k; ++j)
        packed[row / kPanel * stride + Numbers::place(j, row % kPanel)] =
            Numbers::from_float(in.b[row * k + j]);
    Numbers::multiply(
        m, [&](int64_t i) { return in.a + i * k; }, k, packed, panels_of(n), stride, scratch.data(),
        [&](int64_t i, int64_t panel, const auto& row) {
          float columns[kPanel];
          row.write(columns);
          for (int64_t column = 0; column < kPanel && panel * kPanel + column < n; ++column)
            in.c[i * n + panel * kPanel + column] = columns[column];
        });
  });
}

const bool defined = define_kernel("packed_product", packed_product);

}  // namespace
}  // namespace maxrl::cpu
