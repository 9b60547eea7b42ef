// The module maxrl_fast._C: every kernel as a function of Python. They take addresses (and, for
// CUDA, the stream) as integers and allocate no tensor. Callers go through maxrl_fast/ops, which
// checks tensors and passes the current stream.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cctype>
#include <cfloat>

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

const Kernel& find_kernel(const std::string& name, std::string_view dtype) {
  std::string known;
  for (const Kernel& kernel : kernels()) {
    if (kernel.name != name) continue;
    if (dtype == kernel.dtype) return kernel;
    known += std::string(" ") + kernel.dtype;
  }
  throw py::value_error(name + " takes" + known + ", got " + std::string(dtype));
}

void bind_kernels(py::module_& m) {
  for (const Kernel& kernel : kernels()) {
    const std::string& name = kernel.name;
    if (py::hasattr(m, name.c_str())) continue;  // of another dtype
    export_fields(m, name.substr(0, name.rfind('_')), kernel.fields);
    m.def(name.c_str(), [name](std::string_view dtype, std::string_view packed, int64_t last) {
      const Kernel& kernel = find_kernel(name, dtype);
      const py::gil_scoped_release release;
      return kernel.run(packed, last);
    });
  }
}

// DLTensor and DLPackExchangeAPI of DLPack 1, by which C reads torch's tensors without its headers.
struct TensorView {
  char* data;
  int32_t device_type, device, dims;
  uint8_t kind, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t offset;
};
struct TensorInterface {
  uint32_t major, minor;
  const void* others[4];
  int (*view)(PyObject*, TensorView*);
};

// A kernel's call but for its arguments, which it checks.
class Plan {
 public:
  // What a call writes at this place of the packed record. Of an argument: P a tensor's address, M
  // also the stride of its rows, N also whether it is float64, or a number above 0; in lower case
  // None too, which writes nothing. I: an integer. = a size, / a size as Numbers, ? whether the
  // last tensor of this size has T numbers.
  struct Slot {
    uint16_t at;
    char form;
    uint8_t kind, bits;  // of DLDataType; 0 bits: 32 or 64
    char sizes[2];  // names or spaces; s is S + 1, A is T or S
  };

  Plan(const py::object& tensor, const std::string& kernel, std::string_view dtype,
       std::string record, std::string_view slots)
      : kernel_(find_kernel(kernel, dtype)), on_cpu_(kernel.rfind("_cpu") != kernel.npos),
        record_(std::move(record)), slots_(slots.size() / sizeof(Slot)),
        is_neg_(tensor.attr("is_neg")) {
    std::memcpy(slots_.data(), slots.data(), slots.size());
    const py::capsule interface = tensor.attr("__dlpack_c_exchange_api__");
    interface_ = interface.get_pointer<TensorInterface>();
    if (interface_->major != 1) throw py::import_error("PyTorch's DLPack must have version 1");
  }

  // What the kernel returns, -1 for nothing. -2 - i if argument i is not as it reads them.
  int64_t run(const py::tuple& arguments, int64_t last) const {
    Call call{record_, {}, {}};
    std::fill_n(call.sizes, 128, -1);
    size_t next = 0;
    for (const Slot& slot : slots_)
      if (!std::isalpha(slot.form))
        put_size(call, slot);
      else if (next == arguments.size() ||
               !put(call, slot, PyTuple_GET_ITEM(arguments.ptr(), next++)))
        return PyErr_Clear(), -1 - static_cast<int64_t>(next);
    const py::gil_scoped_release release;
    return kernel_.run(call.packed, last);
  }

 private:
  static constexpr int kNext = sizeof(void*);  // after an address

  struct Call {
    std::string packed;
    TensorView first;  // of a tensor, whose device is that of all
    int64_t sizes[128];  // by name; -1: not known
    template <typename T>
    void write(int64_t at, T x) {
      std::memcpy(&packed[at], &x, sizeof x);
    }
    int64_t& size(char name) { return sizes[static_cast<int>(name)]; }
    // Whether what has this name may have this size.
    bool takes(char name, int64_t count) {
      if (name == 'A') {
        size('A') = count == size('T');
        return size('T') != size('S') && (size('A') || count == size('S'));
      }
      const int64_t found = count - (name == 's');
      int64_t& known = size(name == 's' ? 'S' : name);
      if (known < 0) known = found;
      return known == found && found >= 0;
    }
  };

  static void put_size(Call& call, const Slot& slot) {
    const char name = slot.sizes[0];
    const int64_t size = call.size(name);
    if (slot.form == '=') call.write(slot.at, size);
    if (slot.form == '/') call.write(slot.at + kNext + 1, static_cast<double>(size > 1 ? size : 1));
    if (slot.form == '?') call.write(slot.at, name == 'A' ? size == 1 : name == 'T');
  }

  bool put(Call& call, const Slot& slot, PyObject* x) const {
    const int form = std::toupper(slot.form);
    if (x == Py_None) return form != slot.form;
    if (form == 'I') return call.write(slot.at, PyLong_AsLongLong(x)), true;
    if (form == 'N' && PyFloat_CheckExact(x)) {
      const double number = PyFloat_AS_DOUBLE(x);
      call.write(slot.at + kNext + 1, number);
      return number > 0.0 && number <= DBL_MAX;
    }
    const auto is_neg = py::reinterpret_steal<py::object>(PyObject_CallOneArg(is_neg_.ptr(), x));
    if (is_neg.ptr() != Py_False) return false;  // of a view, memory may have the other sign
    TensorView tensor{};
    if (interface_->view(x, &tensor) != 0) return false;  // without memory
    constexpr int32_t kCpu = 1;
    if (!call.first.device_type) call.first = tensor;
    if (tensor.device_type != (on_cpu_ ? kCpu : call.first.device_type) ||
        tensor.device != call.first.device || tensor.kind != slot.kind ||
        (slot.bits ? tensor.bits != slot.bits : tensor.bits < 32))
      return false;
    const int dims = (slot.sizes[0] != ' ') + (slot.sizes[1] != ' ');
    if ((dims || form == 'N') && dims != tensor.dims) return false;
    int64_t dense = 1;
    for (int i = dims - 1; i >= 0; --i) {
      const bool is_free = tensor.shape[i] <= 1 || (form == 'M' && i == 0);
      if (!is_free && tensor.strides[i] != dense) return false;
      if (!call.takes(slot.sizes[i], tensor.shape[i])) return false;
      dense *= tensor.shape[i];
    }
    call.write(slot.at, tensor.data + tensor.offset);
    if (form == 'M') call.write(slot.at + kNext, tensor.strides[0]);
    if (form == 'N') call.write(slot.at + kNext, tensor.bits == 64);
    return tensor.data || !dense;
  }

  const Kernel& kernel_;
  bool on_cpu_;
  std::string record_;
  std::vector<Slot> slots_;
  py::object is_neg_;
  const TensorInterface* interface_;
};

void bind_plans(py::module_& m) {
  py::class_<Plan>(m, "Plan")
      .def(py::init<const py::object&, const std::string&, std::string_view, std::string,
                    std::string_view>())
      .def("run", &Plan::run);
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
  m.attr("FIELDS") = pybind11::dict();
  bindings::export_names(m, "Loss", kNamesOf<Loss>);
  bindings::export_fields(m, "LossSums", fields_of<LossSums>());
  bindings::export_fields(m, "DecoderOptions", fields_of<DecoderOptions>());
  bindings::export_fields(m, "DecoderWeights", fields_of<DecoderWeights>());
  bindings::export_fields(m, "LayerWeights", fields_of<LayerWeights>());
  bindings::export_fields(m, "GenerationJob", fields_of<GenerationJob>());
  bindings::bind_kernels(m);
  bindings::bind_instructions(m);
  bindings::bind_plans(m);
  bindings::bind_generation(m);
}
