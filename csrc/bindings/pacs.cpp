#include "bindings.h"

void maxrl::bindings::bind_pacs(py::module_& m) {
  export_fields(m, "PacsMetrics", PacsMetrics::kNames);
  m.attr("PACS_WORKSPACE") = workspace_size(PacsSums::kSize);
  constexpr Dtypes<Types<float>, Types<double>> dtypes;
  define<Pacs, int>(m, "pacs_loss_cpu", dtypes, [](auto& in, int n) { return cpu::pacs_loss(in, n); });
  define<LogRatio, int>(m, "log_ratio_reward_cpu", dtypes, [](auto& in, int n) { cpu::log_ratio_reward(in, n); });
  define<LogRatioBackward, int>(m, "log_ratio_reward_backward_cpu", dtypes,
                                [](auto& in, int n) { cpu::log_ratio_reward_backward(in, n); });
#ifdef MAXRL_FAST_CUDA
  using Stream = cudaStream_t;
  define<Pacs, Stream>(m, "pacs_loss_cuda", dtypes, [](auto& in, Stream s) { cuda::pacs_loss(in, s); });
  define<LogRatio, Stream>(m, "log_ratio_reward_cuda", dtypes, [](auto& in, Stream s) { cuda::log_ratio_reward(in, s); });
  define<LogRatioBackward, Stream>(m, "log_ratio_reward_backward_cuda", dtypes,
                                   [](auto& in, Stream s) { cuda::log_ratio_reward_backward(in, s); });
#endif
}
