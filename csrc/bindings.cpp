// Every function takes addresses (and, for CUDA, the stream) as integers and allocates nothing.
// Callers go through maxrl_fast/ops, which checks tensors and passes the current stream.
#include <pybind11/pybind11.h>

#include "kernels.h"

namespace py = pybind11;
using py::literals::operator""_a;

namespace {

template <typename T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

template <typename Real>
void bind_rank_transform(py::module_& m, const char* cpu_name, [[maybe_unused]] const char* cuda_name) {
  m.def(
      cpu_name,
      [](std::uintptr_t rewards, std::uintptr_t weights, std::uintptr_t advantages, std::int64_t num_groups,
         std::int64_t group_size, bool centred) {
        maxrl::cpu::rank_transform(pointer<const Real>(rewards), pointer<const double>(weights), pointer<Real>(advantages),
                                   num_groups, group_size, centred);
      },
      py::kw_only(), "rewards"_a, "weights"_a, "advantages"_a, "num_groups"_a, "group_size"_a, "centred"_a,
      py::call_guard<py::gil_scoped_release>());
#ifdef MAXRL_FAST_CUDA
  m.def(
      cuda_name,
      [](std::uintptr_t rewards, std::uintptr_t weights, std::uintptr_t advantages, std::int64_t num_groups,
         std::int64_t group_size, bool centred, std::uintptr_t stream) {
        maxrl::cuda::rank_transform(pointer<const Real>(rewards), pointer<const double>(weights), pointer<Real>(advantages),
                                    num_groups, group_size, centred, reinterpret_cast<cudaStream_t>(stream));
      },
      py::kw_only(), "rewards"_a, "weights"_a, "advantages"_a, "num_groups"_a, "group_size"_a, "centred"_a, "stream"_a);
#endif
}

}  // namespace

PYBIND11_MODULE(_C, m) {
#ifdef MAXRL_FAST_CUDA
  m.attr("cuda") = true;
#else
  m.attr("cuda") = false;
#endif
  bind_rank_transform<float>(m, "rank_transform_cpu_float32", "rank_transform_cuda_float32");
  bind_rank_transform<double>(m, "rank_transform_cpu_float64", "rank_transform_cuda_float64");
}
