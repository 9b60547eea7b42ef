// The module maxrl_fast._C: every kernel as a function of Python. They take addresses (and, for
// CUDA, the stream) as integers and allocate no tensor. Callers go through maxrl_fast/ops, which
// checks tensors and passes the current stream.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>

#include "../cpu/dispatch.h"
#include "../generation.h"
#include "../token_loss.h"

template <>
inline constexpr const char* maxrl::kNamesOf<maxrl::cpu::Instructions>[3] = {"baseline", "avx2",
                                                                             "avx512"};

namespace maxrl::bindings {

namespace py = pybind11;
using cpu::Instructions;

void bind_generation(py::module_& m);

namespace {

// Tells Python a record's arguments, in order, and their codes: _C.FIELDS[record].
void export_fields(const py::module_& m, const std::string& record, const Fields& fields) {
  py::dict codes;
  for (const auto& [name, code] : fields.all) codes[py::str(name)] = code;
  m.attr("FIELDS")[py::str(record)] = codes;
}

template <size_t size>
void export_names(const py::module_& m, const char* record, const char* const (&names)[size]) {
  py::dict fields;
  for (const char* name : names) fields[name] = "";
  m.attr("FIELDS")[record] = fields;
}

const Kernel& kernel_for_dtype(std::string_view dtype, const std::vector<Kernel>& kernels) {
  std::string known;
  for (const Kernel& kernel : kernels) {
    if (dtype == kernel.dtype) return kernel;
    known += std::string(" ") + kernel.dtype;
  }
  throw py::value_error(kernels.front().name + " takes" + known + ", got " + std::string(dtype));
}

void bind_kernels(py::module_& m) {
  std::map<std::string, std::vector<Kernel>> by_name;
  for (const Kernel& kernel : kernels()) by_name[kernel.name].push_back(kernel);
  for (const auto& [name, found] : by_name) {
    export_fields(m, name.substr(0, name.rfind('_')), found.front().fields);
    m.def(name.c_str(),
          [kernels = found](std::string_view dtype, std::string_view packed, int64_t last) {
            const Kernel& kernel = kernel_for_dtype(dtype, kernels);
            const py::gil_scoped_release release;
            return kernel.run(packed, last);
          });
  }
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
  bindings::export_names(m, "Loss", kNamesOf<Loss>);
  bindings::export_names(m, "LossSums", LossSums::kNames);
  bindings::export_fields(m, "DecoderOptions", fields_of<DecoderOptions>());
  bindings::export_fields(m, "DecoderWeights", fields_of<DecoderWeights>());
  bindings::export_fields(m, "LayerWeights", fields_of<LayerWeights>());
  bindings::export_fields(m, "GenerationJob", fields_of<GenerationJob>());
  bindings::bind_kernels(m);
  bindings::bind_instructions(m);
  bindings::bind_generation(m);
}
