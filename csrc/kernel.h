// How Python calls a kernel: by its name, with the fields of a record as keyword arguments.
//
// A kernel is a function of a record of addresses and sizes, and of the number of threads or the
// CUDA stream. The file that has it calls define_kernel; nothing else declares it. Only bindings/
// includes Python's headers, and no file torch's.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "element_types.h"

struct _object;  // of Python: PyObject

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

// Lists the fields of a record, whose names are those of the arguments. Fields of a record among
// them are arguments too, unless it is marked by kIsTuple: then it is one argument, a tuple.
#define MAXRL_FIELDS(...)                        \
  template <typename Visit>                      \
  void fields(Visit& at) {                       \
    visit_fields(at, #__VA_ARGS__, __VA_ARGS__); \
  }

// The names of an enumeration's values in Python, in their order.
template <typename Choice>
constexpr int kNamesOf = 0;

// Reads fields from keyword arguments, or from the dict or the tuple of a record. Errors name the
// function and the argument.
class Arguments {
 public:
  using Value = _object*;
  virtual ~Arguments() = default;

  template <typename T>
  void operator()(std::string_view name, T& to) {
    if constexpr (IsRecord<T>::value && !IsTuple<T>::value)
      to.fields(*this);
    else
      read(take(name), name, to);
  }
  virtual void finish() const = 0;  // refuses arguments that are no field
  virtual void release_gil() = 0;   // until the end of this object

 protected:
  using Name = std::string_view;
  virtual Value take(Name) = 0;
  virtual bool flag(Value, Name) const = 0;
  virtual int64_t integer(Value, Name, size_t bytes) const = 0;
  virtual double number(Value, Name) const = 0;
  virtual std::string_view text(Value, Name) const = 0;
  virtual size_t choice(Value, Name, const char* const* names, size_t count) const = 0;
  virtual size_t length(Value, Name) const = 0;  // of a list or a tuple
  virtual Value item(Value, size_t i) const = 0;
  virtual void in_record(Value, Name, const std::function<void(Arguments&)>& read) const = 0;
  virtual void require(bool fits, Value, Name, const char* wanted) const = 0;

 private:
  template <typename T, typename = void>
  struct IsRecord : std::false_type {};
  template <typename T>
  struct IsRecord<T, std::void_t<decltype(std::declval<T&>().fields(std::declval<Arguments&>()))>>
      : std::true_type {};
  template <typename T, typename = void>
  struct IsTuple : std::false_type {};
  template <typename T>
  struct IsTuple<T, std::void_t<decltype(T::kIsTuple)>> : std::true_type {};

  template <typename T>
  void read(Value value, std::string_view name, T& to) {
    if constexpr (std::is_same_v<T, bool>)
      to = flag(value, name);
    else if constexpr (std::is_pointer_v<T>)
      to = reinterpret_cast<T>(integer(value, name, sizeof to));
    else if constexpr (std::is_integral_v<T>)
      to = static_cast<T>(integer(value, name, sizeof to));
    else if constexpr (std::is_floating_point_v<T>)
      to = static_cast<T>(number(value, name));
    else if constexpr (std::is_same_v<T, std::string_view>)
      to = text(value, name);
    else if constexpr (std::is_enum_v<T>)
      to = static_cast<T>(choice(value, name, kNamesOf<T>, std::size(kNamesOf<T>)));
    else if constexpr (IsRecord<T>::value)
      in_record(value, name, [&to](Arguments& at) { to.fields(at); });
    else
      read_sequence(value, name, to);
  }

  template <typename Parts>
  void read_sequence(Value value, std::string_view name, Parts& to) {
    const size_t size = length(value, name);
    if constexpr (!std::is_array_v<Parts>) to.resize(size);
    require(size == std::size(to), value, name, "a list of its length");
    for (size_t i = 0; i < size; ++i) read(item(value, i), name, to[i]);
  }
};

using Result = std::variant<std::monostate, int64_t,
                            std::vector<int64_t>>;  // of a kernel: None, a number, numbers

struct Kernel {
  std::string name;
  const char* dtype;  // of the first type of its record, null for a record without types
  std::function<Result(Arguments&)> run;
};

inline std::vector<Kernel>& kernels() {
  static std::vector<Kernel> all;
  return all;
}

template <template <typename...> class Record, typename Element, typename... Rest>
const char* dtype_of(const Record<Element, Rest...>*) {
  return kDtype<Element>;
}
inline const char* dtype_of(const void*) { return nullptr; }

template <typename Returned, typename Record, typename Last>
bool define_for_dtype(const char* name, Returned (*kernel)(const Record&, Last)) {
  constexpr bool kOnCpu = std::is_same_v<Last, int>;
  const auto run = [kernel](Arguments& at) -> Result {
    Record in{};
    Last last;
    in.fields(at);
    at(kOnCpu ? "num_threads" : "stream", last);
    at.finish();
    at.release_gil();
    if constexpr (std::is_void_v<Returned>)
      return kernel(in, last), Result();
    else
      return kernel(in, last);
  };
  kernels().push_back({std::string(name) + (kOnCpu ? "_cpu" : "_cuda"),
                       dtype_of(static_cast<Record*>(nullptr)), run});
  return true;
}

// Makes the kernels of several dtypes one function of Python: NAME_cpu(*, dtype, FIELDS,
// num_threads) or NAME_cuda(*, ..., stream).
template <typename... Kernel>
bool define_kernel(const char* name, Kernel*... kernel) {
  return (define_for_dtype(name, kernel) && ...);
}

// Numbers of zeroed memory with which a CUDA kernel adds `size` sums over its blocks: the result, a
// counter, a row of each block.
constexpr int64_t kMaxSummingBlocks = 1024;
constexpr int64_t workspace_size(int64_t size) { return size + 1 + kMaxSummingBlocks * size; }

}  // namespace maxrl
