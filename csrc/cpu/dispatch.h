// Distributes rows over threads, with code compiled for the widest vectors of this processor.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "vectors.h"

namespace maxrl::cpu {

// The instructions that kernels are compiled for, the narrowest vectors first. AVX2 comes with FMA.
enum class Instructions { kBaseline, kAvx2, kAvx512 };

inline Instructions processor_instructions() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
    return Instructions::kBaseline;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq"))
    return Instructions::kAvx2;
  return Instructions::kAvx512;
#else
  return Instructions::kBaseline;
#endif
}

// The widest that kernels use. Only tests change it, to narrower ones, and never while a kernel
// runs.
inline Instructions widest_instructions = processor_instructions();

#if defined(__x86_64__)
// flatten: all that it calls is inlined, and so compiled for these instructions.
#define MAXRL_AVX2 __attribute__((target("avx2,fma"), flatten))
#define MAXRL_AVX512_NAMES "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma"
#define MAXRL_AVX512 __attribute__((target(MAXRL_AVX512_NAMES), flatten))
#endif

// work() in a separate function, compiled for the instructions that these vectors need.
#if defined(__x86_64__)
template <typename Work>
MAXRL_AVX512 __attribute__((noinline)) void compiled_for(Vectors<float, 16>, const Work& work) {
  work();
}
template <typename Real, typename Work>
MAXRL_AVX2 __attribute__((noinline)) void compiled_for(Vectors<Real, 32 / sizeof(Real)>,
                                                       const Work& work) {
  work();
}
#endif
template <typename AnyVectors, typename Work>
__attribute__((noinline, flatten)) void compiled_for(AnyVectors, const Work& work) {
  work();
}

// use(Vectors{}) with the most lanes, of at most these bytes, of the widest instructions. What
// `use` calls gets their instructions only by compiled_for.
template <typename Real, int most_bytes = 64, typename Use>
void with_widest(const Use& use) {
#if defined(__x86_64__)
  if constexpr (sizeof(Real) == 4 && most_bytes == 64)
    if (widest_instructions >= Instructions::kAvx512) return use(Vectors<float, 16>{});
  if (widest_instructions >= Instructions::kAvx2) return use(Vectors<Real, 32 / sizeof(Real)>{});
#endif
  use(Vectors<Real, 16 / sizeof(Real)>{});
}

// work(Vectors<float, lanes>{}) with the most lanes of the widest instructions, and compiled for
// them.
template <typename Work>
void with_widest_floats(const Work& work) {
  with_widest<float>([&](auto vectors) { compiled_for(vectors, [&] { work(vectors); }); });
}

// Rows of one piece of work: enough to hide the cost of starting a piece.
inline int64_t rows_per_piece(int64_t vocab_size) {
  return std::max<int64_t>(1, (1 << 17) / std::max<int64_t>(vocab_size, 1));
}

// work(vectors, piece, row) for all rows, in pieces of `grain` rows, compiled for the instructions
// of these vectors.
template <typename Vectors, typename Work>
void for_pieces(Vectors vectors, int64_t num_rows, int64_t grain, int num_threads,
                const Work& work) {
  const int64_t pieces = (num_rows + grain - 1) / grain;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1) if (pieces > 1)
  for (int64_t piece = 0; piece < pieces; ++piece)
    compiled_for(vectors, [&] {
      const int64_t end = std::min((piece + 1) * grain, num_rows);
      for (int64_t row = piece * grain; row < end; ++row) work(vectors, piece, row);
    });
}

// Calls work(vectors, piece, row, scratch) for all rows, in pieces of `grain` rows that do not
// depend on the number of threads. Every thread has its own `scratch` of the given size, null if
// that is 0.
template <typename Real, typename Work>
void for_rows(int64_t num_rows, int64_t grain, int64_t scratch_size, int num_threads,
              const Work& work) {
  const std::unique_ptr<Real[]> scratch(scratch_size ? new Real[scratch_size * num_threads]
                                                     : nullptr);
  with_widest<Real, 32>([&](auto widest) {
    for_pieces(widest, num_rows, grain, num_threads, [&](auto vectors, int64_t piece, int64_t row) {
      work(vectors, piece, row,
           scratch ? scratch.get() + omp_get_thread_num() * scratch_size : nullptr);
    });
  });
}

}  // namespace maxrl::cpu
