// The divergence D of a policy from a teacher, row by row of their logits, and its gradient in the
// policy's, for CUDA; maxrl_fast/ops/divergence.py has the same in PyTorch. With p and q =
// softmax(z / tau), d = log p - log q, share = 1 - beta, m = beta q + share p:
//     reverse  D = sum p d                                     dD/dz = p (d - D) / tau
//     forward  D = -sum q d                                    dD/dz = (p - q) / tau
//     jsd      D = share sum p log(p / m) + beta sum q log(q / m)
//              dD/dz = share p (log(p / m) - sum p log(p / m)) / tau
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
