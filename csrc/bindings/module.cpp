// The module maxrl_fast._C: every kernel as a function of Python. They take addresses (and, for
// CUDA, the stream) as integers and allocate no tensor. Callers go through maxrl_fast/ops, which
// checks tensors and passes the current stream.
#include <map>
#include <memory>

#include "../cpu/dispatch.h"
#include "../token_loss.h"
#include "keywords.h"

template <>
inline constexpr const char* maxrl::kNamesOf<maxrl::cpu::Instructions>[3] = {"baseline", "avx2",
                                                                             "avx512"};

namespace maxrl::bindings {

using cpu::Instructions;

void bind_generation(py::module_& m);
void bind_group_advantage(py::module_& m);

namespace {

const Kernel& kernel_for_dtype(const std::string& name, const std::vector<Kernel>& kernels,
                               Keywords& at) {
  if (!kernels.front().dtype) return kernels.front();
  std::string_view dtype;
  std::string known;
  at("dtype", dtype);
  for (const Kernel& kernel : kernels) {
    if (dtype == kernel.dtype) return kernel;
    known += std::string(" ") + kernel.dtype;
  }
  throw py::value_error(name + " takes" + known + ", got " + std::string(dtype));
}

void bind_kernels(py::module_& m) {
  std::map<std::string, std::vector<Kernel>> by_name;
  for (const Kernel& kernel : kernels()) by_name[kernel.name].push_back(kernel);
  for (const auto& [key, found] : by_name)
    m.def(key.c_str(), [name = key, kernels = found,
                        names = std::make_shared<Keywords::Names>()](const py::kwargs& given) {
      Keywords at(name, given, *names);
      return kernel_for_dtype(name, kernels, at).run(at);
    });
}

// Tells Python the names of a record's fields, in order: _C.FIELDS[record].
template <size_t size>
void export_fields(py::module_& m, const char* record, const char* const (&names)[size]) {
  py::tuple fields(size);
  for (size_t i = 0; i < size; ++i) fields[i] = names[i];
  m.attr("FIELDS")[record] = fields;
}

// For tests, which run kernels as machines with narrower vectors do.
void bind_instructions(py::module_& m) {
  m.def("instruction_sets", [] {  // the widest first
    std::vector<std::string_view> names;
    for (int i = static_cast<int>(cpu::processor_instructions()); i >= 0; --i)
      names.push_back(kNamesOf<Instructions>[i]);
    return names;
  });
  m.def("limit_instructions", [](std::string_view name) {
    for (int i = static_cast<int>(cpu::processor_instructions()); i >= 0; --i)
      if (name == kNamesOf<Instructions>[i])
        return void(cpu::widest_instructions = static_cast<Instructions>(i));
    throw py::value_error("this machine does not have the instruction set '" + std::string(name) +
                          "'");
  });
}

}  // namespace
}  // namespace maxrl::bindings

PYBIND11_MODULE(_C, m) {
  using namespace maxrl;
#ifdef MAXRL_FAST_CUDA
  m.attr("cuda") = true;
  m.attr("LOSS_WORKSPACE") = workspace_size(LossSums::kSize);
#else
  m.attr("cuda") = false;
#endif
  m.attr("MAX_LOG_RATIO") = kMaxLogRatio;
  m.attr("FIELDS") = pybind11::dict();
  bindings::export_fields(m, "Loss", kNamesOf<Loss>);
  bindings::export_fields(m, "LossSums", LossSums::kNames);
  bindings::bind_kernels(m);
  bindings::bind_instructions(m);
  bindings::bind_generation(m);
  bindings::bind_group_advantage(m);
}
