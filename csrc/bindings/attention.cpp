#include "bindings.h"

void maxrl::bindings::bind_attention(py::module_& m) {
  constexpr Dtypes<Types<float, float>, Types<double, double>, Types<BFloat16, float>> dtypes;
  define<SharedPromptAttention, int>(m, "shared_prompt_attention_cpu", dtypes,
                                     [](auto& in, int n) { cpu::shared_prompt_attention(in, n); });
  define<SharedPromptAttentionBackward, int>(m, "shared_prompt_attention_backward_cpu", dtypes,
                                             [](auto& in, int n) { cpu::shared_prompt_attention_backward(in, n); });
}
