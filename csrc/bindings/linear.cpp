#include "bindings.h"

namespace maxrl::bindings {
namespace {

void check_sizes(std::int64_t in_size, std::int64_t out_size) {
  if (in_size < 16 || out_size < 16 || in_size % 16 || out_size % 16)
    throw py::value_error("a linear layer needs sizes that are multiples of 16");
}

}  // namespace

void bind_linear(py::module_& m) {
  m.def(
      "linear_cpu",
      [](std::int64_t num_rows, std::int64_t in_size, std::int64_t out_size, Address x, Address weight, Address bias,
         Address added, Address y, int num_threads) {
        check_sizes(in_size, out_size);
        const py::gil_scoped_release release;
        cpu::linear({num_rows, in_size, out_size, pointer<const float>(x), pointer<const float>(weight),
                     pointer<const float>(bias), pointer<const float>(added), pointer<float>(y)},
                    num_threads);
      },
      py::kw_only(), "num_rows"_a, "in_size"_a, "out_size"_a, "x"_a, "weight"_a, "bias"_a, "added"_a, "y"_a, "num_threads"_a);
  m.def(
      "linear_backward_cpu",
      [](std::int64_t num_rows, std::int64_t in_size, std::int64_t out_size, Address grad, Address x, Address weight,
         Address grad_x, Address grad_weight, Address grad_bias, int num_threads) {
        check_sizes(in_size, out_size);
        const py::gil_scoped_release release;
        cpu::linear_backward(
            {num_rows, in_size, out_size, pointer<const float>(grad), pointer<const float>(x), pointer<const float>(weight),
             pointer<float>(grad_x), pointer<float>(grad_weight), pointer<float>(grad_bias)},
            num_threads);
      },
      py::kw_only(), "num_rows"_a, "in_size"_a, "out_size"_a, "grad"_a, "x"_a, "weight"_a, "grad_x"_a, "grad_weight"_a,
      "grad_bias"_a, "num_threads"_a);
}

}  // namespace maxrl::bindings
