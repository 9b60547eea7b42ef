#include "../cpu/dispatch.h"
#include "bindings.h"

namespace maxrl::bindings {
namespace {

using cpu::Instructions;

constexpr std::pair<std::string_view, Instructions> kInstructions[] = {
    {"avx512", Instructions::kAvx512},
    {"avx2", Instructions::kAvx2},
    {"baseline", Instructions::kBaseline},
};

// For tests, which run kernels as machines with narrower vectors do.
void bind_instructions(py::module_& m) {
  m.def("instruction_sets", [] {
    std::vector<std::string_view> names;
    for (const auto& [name, instructions] : kInstructions)
      if (instructions <= cpu::processor_instructions()) names.push_back(name);
    return names;
  });
  m.def("limit_instructions", [](std::string_view name) {
    for (const auto& [known, instructions] : kInstructions)
      if (known == name && instructions <= cpu::processor_instructions()) return void(cpu::widest_instructions = instructions);
    throw py::value_error("this machine does not have the instruction set '" + std::string(name) + "'");
  });
}

}  // namespace
}  // namespace maxrl::bindings

PYBIND11_MODULE(_C, m) {
#ifdef MAXRL_FAST_CUDA
  m.attr("cuda") = true;
#else
  m.attr("cuda") = false;
#endif
  m.attr("FIELDS") = pybind11::dict();
  maxrl::bindings::bind_instructions(m);
  maxrl::bindings::bind_attention(m);
  maxrl::bindings::bind_group_advantage(m);
  maxrl::bindings::bind_token_loss(m);
  maxrl::bindings::bind_pacs(m);
  maxrl::bindings::bind_generation(m);
  maxrl::bindings::bind_decoding(m);
  maxrl::bindings::bind_layer(m);
  maxrl::bindings::bind_linear(m);
}
