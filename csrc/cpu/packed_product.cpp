#include "packed_product.h"

#include <vector>

#include "aligned.h"
#include "numbers.h"

namespace maxrl::cpu {

void packed_product(Arithmetic arithmetic, int64_t m, int64_t n, int64_t k, const float* a, const float* b, float* c) {
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
        packed[row / kPanel * stride + Numbers::place(j, row % kPanel)] = Numbers::from_float(b[row * k + j]);
    Numbers::multiply(
        m, [&](int64_t i) { return a + i * k; }, k, packed, panels_of(n), stride, scratch.data(),
        [&](int64_t i, int64_t panel, const auto& row) {
          float columns[kPanel];
          row.write(columns);
          for (int64_t column = 0; column < kPanel && panel * kPanel + column < n; ++column)
            c[i * n + panel * kPanel + column] = columns[column];
        });
  });
}

}  // namespace maxrl::cpu
