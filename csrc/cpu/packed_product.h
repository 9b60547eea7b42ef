// One of the decoder's matrix multiplications by itself, for tests.
#pragma once
#include "../generation.h"

namespace maxrl::cpu {

// c [m, n] = a [m, k] b [n, k]^T
void packed_product(Arithmetic arithmetic, int64_t m, int64_t n, int64_t k, const float* a, const float* b, float* c);

}  // namespace maxrl::cpu
