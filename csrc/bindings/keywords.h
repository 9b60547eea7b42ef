// The arguments of a function of Python, as kernels read them (kernel.h).
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../kernel.h"

namespace maxrl::bindings {

namespace py = pybind11;

class Keywords final : public Arguments {
 public:
  // The names as Python's strings, in the order of the fields, which every call of a function
  // shares.
  using Names = std::vector<py::object>;

  // given: a dict, or a tuple of the fields in their order
  Keywords(std::string_view function, py::handle given, Names& names)
      : function_(function), given_(given), names_(names) {}

  void finish() const override {
    if (PyTuple_Check(given_.ptr())) {
      if (num_read_ != PyTuple_GET_SIZE(given_.ptr()))
        fail("too many fields in ", py::repr(given_));
      return;
    }
    if (PyDict_Size(given_.ptr()) == num_read_) return;
    for (const auto& [name, value] : py::reinterpret_borrow<py::dict>(given_)) {
      bool is_known = false;
      for (const py::object& known : names_) is_known |= known.equal(name);
      if (!is_known) fail("unknown argument ", py::str(name));
    }
  }
  void release_gil() override { released_.emplace(); }

 protected:
  Value take(Name name) override {
    const Py_ssize_t i = num_read_++;
    if (PyTuple_Check(given_.ptr())) {
      if (i >= PyTuple_GET_SIZE(given_.ptr())) fail("missing argument ", name);
      return PyTuple_GET_ITEM(given_.ptr(), i);
    }
    if (i == static_cast<Py_ssize_t>(names_.size())) names_.push_back(interned(name));
    PyObject* const value = PyDict_GetItemWithError(given_.ptr(), names_[i].ptr());
    if (!value) fail("missing argument ", name);
    return value;
  }

  bool flag(Value value, Name name) const override {
    require(PyBool_Check(value), value, name, "a bool");
    return value == Py_True;
  }
  int64_t integer(Value value, Name name, size_t bytes) const override {
    int overflow = 0;
    const bool is_integer = PyLong_Check(value);
    const int64_t number = is_integer ? PyLong_AsLongLongAndOverflow(value, &overflow) : 0;
    const bool fits =
        is_integer && !overflow && (bytes == 8 || number == static_cast<int32_t>(number));
    require(fits, value, name, bytes == 8 ? "an integer" : "a 32-bit integer");
    return number;
  }
  double number(Value value, Name name) const override {
    require(PyFloat_Check(value) || PyLong_Check(value), value, name, "a number");
    return py::cast<double>(py::handle(value));
  }
  std::string_view text(Value value, Name name) const override {
    require(PyUnicode_Check(value), value, name, "a string");
    return py::cast<std::string_view>(py::handle(value));
  }
  size_t choice(Value value, Name name, const char* const* names, size_t count) const override {
    const std::string_view chosen = text(value, name);
    for (size_t i = 0; i < count; ++i)
      if (chosen == names[i]) return i;
    throw py::value_error(std::string(function_) + ": unknown " + std::string(name) + " '" +
                          std::string(chosen) + "'");
  }
  size_t length(Value value, Name name) const override {
    require(PyList_Check(value) || PyTuple_Check(value), value, name, "a list");
    return static_cast<size_t>(PySequence_Fast_GET_SIZE(value));
  }
  Value item(Value value, size_t i) const override { return PySequence_Fast_GET_ITEM(value, i); }
  void in_record(Value value, Name name,
                 const std::function<void(Arguments&)>& read) const override {
    require(PyDict_Check(value) || PyTuple_Check(value), value, name, "a record");
    Names names;
    Keywords fields(name, value, names);
    read(fields);
    fields.finish();
  }
  void require(bool fits, Value value, Name name, const char* wanted) const override {
    if (!fits) fail(std::string(name) + " must be " + wanted + ", got ", py::repr(value));
  }

 private:
  static py::object interned(Name name) {
    PyObject* text = PyUnicode_FromStringAndSize(name.data(), static_cast<Py_ssize_t>(name.size()));
    PyUnicode_InternInPlace(&text);
    return py::reinterpret_steal<py::object>(text);
  }
  template <typename Text>
  [[noreturn]] void fail(const std::string& what, const Text& which) const {
    throw py::type_error(std::string(function_) + ": " + what + std::string(which));
  }

  const std::string_view function_;
  const py::handle given_;
  Names& names_;
  Py_ssize_t num_read_ = 0;
  std::optional<py::gil_scoped_release> released_;
};

}  // namespace maxrl::bindings
