// Kernels as functions of Python. They take addresses (and, for CUDA, the stream) as integers and allocate no tensor. Callers
// go through maxrl_fast/ops, which checks tensors and passes the current stream.
//
// The arguments of a kernel are a record of csrc/*.h. Its member `fields` lists them once, by name.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../kernels.h"

namespace maxrl::bindings {

namespace py = pybind11;
using py::literals::operator""_a;

// Reads fields from keyword arguments. Errors name the function and the argument.
class Arguments {
 public:
  // The names as Python's strings, in the order of the fields, which every call of a function shares.
  using Names = std::vector<py::object>;

  Arguments(const char* function, py::handle given, Names& names) : function_(function), given_(given), names_(names) {}

  template <typename T>
  void operator()(const char* name, T& to) {
    read(take(name), name, to);
  }
  template <typename Choice, std::size_t size>
  void operator()(const char* name, Choice& to, const char* const (&choices)[size]) {
    std::string_view chosen;
    read(take(name), name, chosen);
    for (std::size_t i = 0; i < size; ++i)
      if (chosen == choices[i]) return void(to = static_cast<Choice>(i));
    throw py::value_error(std::string(function_) + ": unknown " + name + " '" + std::string(chosen) + "'");
  }

  // Refuses arguments that are no field.
  void finish() const {
    if (PyDict_Size(given_.ptr()) == static_cast<Py_ssize_t>(num_read_)) return;
    for (const auto& [name, value] : py::reinterpret_borrow<py::dict>(given_)) {
      bool is_known = false;
      for (const py::object& known : names_) is_known |= known.equal(name);
      if (!is_known) throw py::type_error(std::string(function_) + ": unknown argument " + std::string(py::str(name)));
    }
  }

 private:
  template <typename T, typename = void>
  struct IsRecord : std::false_type {};
  template <typename T>
  struct IsRecord<T, std::void_t<decltype(std::declval<T&>().fields(std::declval<Arguments&>()))>> : std::true_type {};

  py::handle take(const char* name) {
    if (num_read_ == names_.size()) names_.push_back(py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name)));
    PyObject* const value = PyDict_GetItemWithError(given_.ptr(), names_[num_read_++].ptr());
    if (!value) throw py::type_error(std::string(function_) + ": missing argument " + name);
    return value;
  }

  void require(bool fits, const char* name, const char* wanted, py::handle value) const {
    if (!fits)
      throw py::type_error(std::string(function_) + ": " + name + " must be " + wanted + ", got " +
                           std::string(py::repr(value)));
  }

  template <typename T>
  void read(py::handle value, const char* name, T& to) {
    if constexpr (std::is_pointer_v<T>) {
      std::intptr_t address;
      read(value, name, address);
      to = reinterpret_cast<T>(address);
    } else if constexpr (std::is_same_v<T, bool>) {
      require(PyBool_Check(value.ptr()), name, "a bool", value);
      to = value.ptr() == Py_True;
    } else if constexpr (std::is_integral_v<T>) {
      int overflow = 0;
      const long long number = PyLong_Check(value.ptr()) ? PyLong_AsLongLongAndOverflow(value.ptr(), &overflow) : 0;
      to = static_cast<T>(number);
      require(PyLong_Check(value.ptr()) && !overflow && to == number, name, sizeof to == 8 ? "an integer" : "a 32-bit integer",
              value);
    } else if constexpr (std::is_floating_point_v<T>) {
      require(PyFloat_Check(value.ptr()) || PyLong_Check(value.ptr()), name, "a number", value);
      to = static_cast<T>(py::cast<double>(value));
    } else if constexpr (std::is_same_v<T, std::string_view>) {
      require(PyUnicode_Check(value.ptr()), name, "a string", value);
      to = py::cast<std::string_view>(value);
    } else if constexpr (IsRecord<T>::value) {
      read_record(value, name, to);
    } else {
      read_sequence(value, name, to);
    }
  }

  // Of a field: a tuple of its own fields in their order, or a dict of them.
  template <typename Record>
  void read_record(py::handle value, const char* name, Record& to) {
    if (PyDict_Check(value.ptr())) {
      static Names names;
      Arguments of_record(name, value, names);
      to.fields(of_record);
      return of_record.finish();
    }
    Py_ssize_t i = 0;
    const auto next = [&](const char* field, auto& part) {
      require(PyTuple_Check(value.ptr()) && i < PyTuple_GET_SIZE(value.ptr()), name, "a record", value);
      read(PyTuple_GET_ITEM(value.ptr(), i++), field, part);
    };
    to.fields(next);
    require(i == PyTuple_GET_SIZE(value.ptr()), name, "a record", value);
  }

  template <typename Parts>
  void read_sequence(py::handle value, const char* name, Parts& to) {
    require(PyList_Check(value.ptr()) || PyTuple_Check(value.ptr()), name, "a list", value);
    const auto size = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(value.ptr()));
    if constexpr (!std::is_array_v<Parts>) to.resize(size);
    require(size == std::size(to), name, "a list of its length", value);
    for (std::size_t i = 0; i < size; ++i) read(PySequence_Fast_GET_ITEM(value.ptr(), i), name, to[i]);
  }

  const char* function_;
  py::handle given_;
  Names& names_;
  std::size_t num_read_ = 0;
};

// The template arguments of a kernel's record for one dtype, which is that of the first, and those that a kernel is made for.
template <typename... T>
struct Types {};
template <typename... Each>
struct Dtypes {};

template <typename T>
constexpr const char* kDtype = nullptr;
template <>
inline constexpr const char* kDtype<float> = "float32";
template <>
inline constexpr const char* kDtype<double> = "float64";
template <>
inline constexpr const char* kDtype<BFloat16> = "bfloat16";
template <>
inline constexpr const char* kDtype<Float16> = "float16";
template <>
inline constexpr const char* kDtype<std::int32_t> = "int32";
template <>
inline constexpr const char* kDtype<std::int64_t> = "int64";
template <>
inline constexpr const char* kDtype<bool> = "bool";

// Reads a record and the last argument, num_threads for an int and otherwise the stream, and runs the kernel without the GIL.
template <typename Record, typename Last, typename Kernel>
py::object run(Arguments& at, const Kernel& kernel) {
  Record in{};
  in.fields(at);
  Last last;
  at(std::is_integral_v<Last> ? "num_threads" : "stream", last);
  at.finish();
  const auto call = [&] {
    const py::gil_scoped_release release;
    return kernel(in, last);
  };
  if constexpr (std::is_void_v<decltype(call())>)
    return call(), py::none();
  else
    return py::cast(call());
}

// NAME(*, FIELDS, num_threads or stream)
template <typename Record, typename Last, typename Kernel>
void define(py::module_& m, const char* name, const Kernel& kernel) {
  m.def(name, [name, kernel](const py::kwargs& given) {
    static Arguments::Names names;
    Arguments at(name, given, names);
    return run<Record, Last>(at, kernel);
  });
}

template <typename First, typename... Rest>
std::string name_of(Types<First, Rest...>) {
  return kDtype<First>;
}

template <template <typename...> class Record, typename Last, typename First, typename... Rest, typename Kernel>
bool run_if(std::string_view dtype, Types<First, Rest...>, Arguments& at, const Kernel& kernel, py::object& result) {
  if (dtype != kDtype<First>) return false;
  result = run<Record<First, Rest...>, Last>(at, kernel);
  return true;
}

// NAME(*, dtype, FIELDS, num_threads or stream), for a template of records
template <template <typename...> class Record, typename Last, typename... Each, typename Kernel>
void define(py::module_& m, const char* name, Dtypes<Each...>, const Kernel& kernel) {
  m.def(name, [name, kernel](const py::kwargs& given) {
    static Arguments::Names names;
    Arguments at(name, given, names);
    std::string_view dtype;
    at("dtype", dtype);
    py::object result;
    if (!(run_if<Record, Last>(dtype, Each{}, at, kernel, result) || ...))
      throw py::value_error(std::string(name) + " takes" + ((" " + name_of(Each{})) + ...) + ", got " + std::string(dtype));
    return result;
  });
}

// Tells Python the names of a record's fields, in order: _C.FIELDS[record].
template <std::size_t size>
void export_fields(py::module_& m, const char* record, const char* const (&names)[size]) {
  py::tuple fields(size);
  for (std::size_t i = 0; i < size; ++i) fields[i] = names[i];
  m.attr("FIELDS")[record] = fields;
}

void bind_attention(py::module_& m);
void bind_group_advantage(py::module_& m);
void bind_token_loss(py::module_& m);
void bind_pacs(py::module_& m);
void bind_generation(py::module_& m);
void bind_decoding(py::module_& m);
void bind_layer(py::module_& m);
void bind_linear(py::module_& m);

}  // namespace maxrl::bindings
