// Multiplies with panels of every number of rows, columns and terms up to 70, on every instruction set of this processor, and
// compares with sums in float64. Prints what it tested, or the first difference.
#include "cpu/panels.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cpu/aligned.h"
#include "cpu/dispatch.h"

using namespace maxrl::cpu;

constexpr int64_t kMost = 70;

float number(int64_t i) { return static_cast<float>(i * 7919 % 2003 - 1001) / 1001; }

// Returns whether C [m, n] = A [m, k] B [n, k]^T is right, also bitwise beside the rows one at a time.
template <typename Vectors>
bool is_right(int64_t m, int64_t n, int64_t k) {
  const int64_t width = padded(n);
  std::vector<float> a(m * k), c(m * width, NAN), alone(m * width, NAN);
  AlignedVector<float> panels(width * k, 0.0f);
  for (int64_t i = 0; i < m * k; ++i) a[i] = number(i);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < k; ++j) panels[(i / kPanel * k + j) * kPanel + i % kPanel] = number(5 * (i * k + j) + 3);
  const auto multiply = [&](int64_t first, int64_t rows, std::vector<float>& to) {
    product<Vectors>(
        rows, [&](int64_t i) { return a.data() + (first + i) * k; }, k, panels.data(), panels_of(n), k * kPanel,
        [&](int64_t i, int64_t panel, const TileRow<Vectors>& row) {
          row.write(to.data() + (first + i) * width + panel * kPanel);
        });
  };
  compiled_for(Vectors{}, [&] {
    multiply(0, m, c);
    for (int64_t i = 0; i < m; ++i) multiply(i, 1, alone);
  });
  if (std::memcmp(c.data(), alone.data(), c.size() * sizeof(float)) != 0) return false;
  for (int64_t i = 0; i < m; ++i)
    for (int64_t column = 0; column < n; ++column) {
      double sum = 0, magnitude = 0;
      for (int64_t j = 0; j < k; ++j) {
        const double term = double{a[i * k + j]} * number(5 * (column * k + j) + 3);
        sum += term;
        magnitude += std::abs(term);
      }
      if (!(std::abs(c[i * width + column] - sum) <= 1e-7 * k * magnitude)) return false;
    }
  return true;
}

template <typename Vectors>
bool all_right() {
  for (int64_t m = 1; m <= kMost; m += m < 20 ? 1 : 7)
    for (int64_t n = 1; n <= 2 * kMost; n += 8)  // up to nine panels
      for (int64_t k = 1; k <= kMost; k += 23)
        if (!is_right<Vectors>(m, n, k)) {
          std::printf("%d lanes: wrong at m = %ld, n = %ld, k = %ld\n", Vectors::kLanes, long(m), long(n), long(k));
          return false;
        }
  std::printf("%d lanes\n", Vectors::kLanes);
  return true;
}

int main() {
  bool right = all_right<Vectors<float, 4>>();
#if defined(__x86_64__)
  if (use_avx2()) right = all_right<Vectors<float, 8>>() && right;
  if (use_avx512()) right = all_right<Vectors<float, 16>>() && right;
#endif
  return right ? 0 : 1;
}
