#include "bfloat16_instructions.h"

#include <stdexcept>

#if defined(MAXRL_HAS_BFLOAT16_INSTRUCTIONS)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace maxrl::cpu {
namespace {

#if defined(MAXRL_HAS_BFLOAT16_INSTRUCTIONS)
uint32_t cpuid_7(uint32_t subleaf,
                 int index) {  // eax, ebx, ecx or edx of leaf 7; 0 if there is none
  uint32_t registers[4] = {};
  __get_cpuid_count(7, subleaf, &registers[0], &registers[1], &registers[2], &registers[3]);
  return registers[index];
}

// AVX-512 is there only if the system saves its registers too.
bool has_avx512_bf16() {
  return processor_instructions() == Instructions::kAvx512 && (cpuid_7(1, 0) >> 5 & 1);
}

// Asks the kernel for the process's permission to use the tiles' data, which an older kernel, a
// hypervisor or a policy refuses.
bool has_amx() {
  constexpr uint32_t kTile = 1u << 24, kTileBf16 = 1u << 22, kXsave = 1u << 27;
  constexpr uint64_t kTileState = 3u << 17;
  constexpr long kRequestPermission = 0x1023,
                 kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  uint32_t eax, ebx, ecx, edx;
  if (!has_avx512_bf16() || (~cpuid_7(0, 3) & (kTile | kTileBf16))) return false;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & kXsave)) return false;
  asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  if (~(static_cast<uint64_t>(edx) << 32 | eax) & kTileState) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

MAXRL_AMX void configure_tiles() {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } configuration;
  asm volatile("" ::"r"(&configuration) : "memory");  // some compilers do not know that it is read
  _tile_loadconfig(&configuration);
}
MAXRL_AMX void release_tiles() { _tile_release(); }
#endif

}  // namespace

const std::vector<Arithmetic>& bfloat16_arithmetics() {
  static const std::vector<Arithmetic> found = [] {
    std::vector<Arithmetic> result;
#if defined(MAXRL_HAS_BFLOAT16_INSTRUCTIONS)
    if (has_amx()) result.push_back(Arithmetic::kAmx);
    if (has_avx512_bf16()) result.push_back(Arithmetic::kAvx512BFloat16);
#endif
    result.push_back(Arithmetic::kPlainBFloat16);
    return result;
  }();
  return found;
}

void check_available(Arithmetic arithmetic) {
  const auto& found = bfloat16_arithmetics();
  if (arithmetic != Arithmetic::kFloat32 &&
      std::find(found.begin(), found.end(), arithmetic) == found.end())
    throw std::invalid_argument(std::string("this machine cannot compute in '") +
                                kNamesOf<Arithmetic>[static_cast<int>(arithmetic)] + "'");
}

Arithmetic fastest_for_bfloat16() {
  const Arithmetic first = bfloat16_arithmetics().front();
  if (first == Arithmetic::kAmx) return first;
#if defined(MAXRL_HAS_BFLOAT16_INSTRUCTIONS)
  if (first == Arithmetic::kAvx512BFloat16 && !__builtin_cpu_is("intel")) return first;
#endif
  return Arithmetic::kFloat32;
}

TileRegisters::TileRegisters(Arithmetic arithmetic) : is_used_(arithmetic == Arithmetic::kAmx) {
#if defined(MAXRL_HAS_BFLOAT16_INSTRUCTIONS)
  if (is_used_) configure_tiles();
#endif
}
TileRegisters::~TileRegisters() {
#if defined(MAXRL_HAS_BFLOAT16_INSTRUCTIONS)
  if (is_used_) release_tiles();
#endif
}

}  // namespace maxrl::cpu
