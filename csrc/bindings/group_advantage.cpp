#include "bindings.h"

void maxrl::bindings::bind_group_advantage(py::module_& m) {
  constexpr Dtypes<Types<float, float>, Types<double, double>, Types<BFloat16, BFloat16>, Types<std::int32_t, float>,
                   Types<std::int64_t, float>, Types<bool, float>>
      dtypes;
  define<Groups, int>(m, "distinct_group_sizes_cpu", [](auto& in, int) { return cpu::distinct_group_sizes(in); });
  define<GroupAdvantage, int>(m, "group_advantage_cpu", dtypes, [](auto& in, int n) {
    return cpu::group_advantage(in.rewards, in.groups, in.tables, in.formula, in.advantages, n);
  });
#ifdef MAXRL_FAST_CUDA
  define<GroupAdvantage, cudaStream_t>(m, "group_advantage_cuda", dtypes, [](auto& in, cudaStream_t s) {
    cuda::group_advantage(in.rewards, in.groups, in.tables, in.formula, in.advantages, s);
  });
#endif
}
