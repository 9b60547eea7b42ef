#include "bindings.h"

void maxrl::bindings::bind_linear(py::module_& m) {
  define<Linear, int>(m, "linear_cpu", [](auto& in, int n) { cpu::linear(in, n); });
  define<LinearBackward, int>(m, "linear_backward_cpu", [](auto& in, int n) { cpu::linear_backward(in, n); });
}
