// The divergence D of a policy from a teacher, row by row of their logits, and its gradient in the
// policy's, for CUDA, by the formulas in docs/token_loss.md#divergence-from-a-teacher.
#pragma once
#include "kernel.h"
#include "token_loss.h"

namespace maxrl {

enum class TeacherDivergence { kReverse, kForward, kJsd };
template <>
inline constexpr const char* kNamesOf<TeacherDivergence>[3] = {"reverse", "forward", "jsd"};

// All rows start at multiples of 16 bytes.
template <typename Gradient>
struct DivergenceRows {
  Rows<const float> policy, teacher;
  Rows<Gradient> gradient;  // or null; it may be the memory of `policy`, of bfloat16 the first half
                            // of each row
  int64_t num_rows, vocab_size;
  const float* temperature;  // [rows]
  const double* coefficients;  // [rows], which the gradient is multiplied by
  double* values;  // [rows]: D
  TeacherDivergence divergence;
  double beta;

  MAXRL_FIELDS(policy, teacher, gradient, num_rows, vocab_size, temperature, coefficients, values,
               divergence, beta)
};

}  // namespace maxrl
