// Every function takes addresses (and, for CUDA, the stream) as integers and allocates no tensor.
// Callers go through maxrl_fast/ops, which checks tensors and passes the current stream.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <initializer_list>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "../kernels.h"

namespace maxrl::bindings {

namespace py = pybind11;
using py::literals::operator""_a;

using Address = std::uintptr_t;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

template <typename Choice, std::size_t size>
inline Choice choose(const char* option, std::string_view name, const std::pair<std::string_view, Choice> (&choices)[size]) {
  for (const auto& [known, choice] : choices)
    if (known == name) return choice;
  throw py::value_error(std::string("unknown ") + option + " '" + std::string(name) + "'");
}

#ifdef MAXRL_FAST_CUDA
// Calls `run` with an element of this dtype.
template <typename Run>
void with_element(std::string_view dtype, const Run& run) {
  if (dtype == "float32") return run(float{});
  if (dtype == "bfloat16") return run(BFloat16{});
  if (dtype == "float16") return run(Float16{});
  throw py::value_error("unknown dtype '" + std::string(dtype) + "'");
}

inline void check_alignment(const char* kernel, std::initializer_list<Address> addresses) {
  for (const Address address : addresses)
    if (address % 16) throw py::value_error(std::string(kernel) + " needs tensors aligned to 16 bytes");
}
#endif

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
