// The instructions of a processor for bfloat16, found at run time.
#pragma once
#include <vector>

#include "../generation.h"
#include "dispatch.h"

// AMX needs the permission of the operating system, which is asked for as on Linux. Older compilers
// lack the instructions.
#if defined(__clang__)
#define MAXRL_COMPILES_AMX (__clang_major__ >= 12)
#else
#define MAXRL_COMPILES_AMX (__GNUC__ >= 11)
#endif
#if defined(__x86_64__) && defined(__linux__) && MAXRL_COMPILES_AMX
#define MAXRL_HAS_BFLOAT16_INSTRUCTIONS
#include <immintrin.h>
#define MAXRL_AVX512_BF16 __attribute__((target(MAXRL_AVX512_NAMES ",avx512bf16"), flatten))
#define MAXRL_AMX \
  __attribute__((target(MAXRL_AVX512_NAMES ",avx512bf16,amx-tile,amx-bf16"), flatten))
#endif

namespace maxrl::cpu {

// The ways to multiply in bfloat16 that this machine has; the last one, plain C++, is for tests.
const std::vector<Arithmetic>& bfloat16_arithmetics();

// Throws std::invalid_argument for instructions that this machine does not have, which would end
// the process.
void check_available(Arithmetic arithmetic);

// The fastest arithmetic for a run in bfloat16: float32 where no instructions for bfloat16 are
// faster, as on Intel processors without AMX (bench/README.md).
Arithmetic fastest_for_bfloat16();

// AMX's tile registers of this thread, all of 16 rows of 64 bytes, in the scope of an object. Other
// arithmetic needs none.
class TileRegisters {
 public:
  explicit TileRegisters(Arithmetic arithmetic);
  ~TileRegisters();
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

 private:
  bool is_used_;
};

}  // namespace maxrl::cpu
