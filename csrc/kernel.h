// How Python calls a kernel: by its name and dtype, with a packed record.
//
// A kernel is a function of a record of addresses and sizes, and of the number of threads or the
// CUDA stream. The file that has it calls define_kernel; nothing else declares it. Python packs the
// record's fields one after another, in their order and without gaps, with codes of its module
// struct. Only bindings/ includes Python's headers, and no file torch's.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "element_types.h"

namespace maxrl {

// at("a", a), at("b", b), ... for the names "a, b, ...".
template <typename Visit, typename... Field>
void visit_fields(Visit& at, std::string_view names, Field&... fields) {
  const auto next = [&names] {
    const std::string_view name = names.substr(0, names.find(','));
    names.remove_prefix(std::min(names.size(), name.size() + 2));
    return name;
  };
  (at(next(), fields), ...);
}

// Lists the fields of a record, whose names are those of the arguments. The fields of a record
// among them are arguments too, or of one with MAXRL_TUPLE one argument, a tuple.
#define MAXRL_RECORD(is_tuple, ...)              \
  static constexpr bool kIsTuple = is_tuple;     \
  template <typename Visit>                      \
  void fields(Visit& at) {                       \
    visit_fields(at, #__VA_ARGS__, __VA_ARGS__); \
  }
#define MAXRL_FIELDS(...) MAXRL_RECORD(false, __VA_ARGS__)
#define MAXRL_TUPLE(...) MAXRL_RECORD(true, __VA_ARGS__)

// The names of an enumeration's values in Python, in their order.
template <typename Choice>
constexpr int kNamesOf = 0;

// The names, in order, and codes of a record's arguments. The code of an enumeration is followed by
// its values' names, each after a "|".
struct Fields {
  std::vector<std::pair<std::string, std::string>> all;

  template <typename T>
  void operator()(std::string_view name, T& field) {
    if constexpr (std::is_class_v<T>) {
      if constexpr (!T::kIsTuple) return field.fields(*this);
    }
    all.emplace_back(name, code_of(field));
  }

  template <typename T>
  static std::string code_of(T& field) {
    std::string code;
    if constexpr (std::is_array_v<T>) {
      for (auto& item : field) code += code_of(item);
    } else if constexpr (std::is_class_v<T>) {
      Fields parts;
      field.fields(parts);
      for (const auto& part : parts.all) code += part.second;
    } else if constexpr (std::is_enum_v<T>) {
      code = "i";
      for (const char* name : kNamesOf<T>) code += std::string("|") + name;
    } else {
      code = std::is_pointer_v<T>          ? "Q"
             : std::is_same_v<T, bool>     ? "?"
             : std::is_floating_point_v<T> ? "d"
             : sizeof(T) == 8              ? "q"
                                           : "i";
    }
    return code;
  }
};

// What is left of a packed record.
struct Packed {
  std::string_view rest;

  template <typename T>
  void operator()(std::string_view name, T& to) {
    if constexpr (std::is_array_v<T>) {
      for (auto& item : to) (*this)(name, item);
    } else if constexpr (std::is_class_v<T>) {
      to.fields(*this);
    } else {
      using Given = std::conditional_t<std::is_floating_point_v<T>, double, T>;
      Given given;
      if (rest.size() < sizeof given) throw std::invalid_argument("the packed record is too short");
      std::memcpy(&given, rest.data(), sizeof given);
      rest.remove_prefix(sizeof given);
      to = static_cast<T>(given);
    }
  }
};

template <typename Record>
Record unpacked(std::string_view packed) {
  Record record{};
  Packed at{packed};
  record.fields(at);
  if (!at.rest.empty()) throw std::invalid_argument("the packed record is too long");
  return record;
}

template <typename Record>
Fields fields_of() {
  Record record{};
  Fields fields;
  record.fields(fields);
  return fields;
}

struct Kernel {
  std::string name;
  const char* dtype;  // of the first type of its record, "" for a record without types
  Fields fields;
  // of the packed record and the last argument: a number, -1 for nothing
  std::function<int64_t(std::string_view, int64_t)> run;
};

inline std::vector<Kernel>& kernels() {
  static std::vector<Kernel> all;
  return all;
}

template <template <typename...> class Record, typename Element, typename... Rest>
const char* dtype_of(const Record<Element, Rest...>*) {
  return kDtype<Element>;
}
inline const char* dtype_of(const void*) { return ""; }

template <typename Returned, typename Record, typename Last>
bool define_for_dtype(const char* name, Returned (*kernel)(const Record&, Last)) {
  constexpr bool kOnCpu = std::is_same_v<Last, int>;
  const auto run = [kernel](std::string_view packed, int64_t given) -> int64_t {
    const auto record = unpacked<Record>(packed);
    Last last;
    if constexpr (kOnCpu)
      last = static_cast<int>(given);
    else
      last = reinterpret_cast<Last>(given);
    if constexpr (std::is_void_v<Returned>)
      return kernel(record, last), -1;
    else
      return kernel(record, last);
  };
  kernels().push_back({std::string(name) + (kOnCpu ? "_cpu" : "_cuda"),
                       dtype_of(static_cast<Record*>(nullptr)), fields_of<Record>(), run});
  return true;
}

// Makes the kernels of several dtypes one function of Python: NAME_cpu(dtype, record, num_threads)
// or NAME_cuda(dtype, record, stream).
template <typename... Kernel>
bool define_kernel(const char* name, Kernel*... kernel) {
  return (define_for_dtype(name, kernel) && ...);
}

// Numbers of zeroed memory with which a CUDA kernel adds `size` sums over its blocks: the result, a
// counter, a row of each block.
constexpr int64_t kMaxSummingBlocks = 1024;
constexpr int64_t workspace_size(int64_t size) { return size + 1 + kMaxSummingBlocks * size; }

}  // namespace maxrl
