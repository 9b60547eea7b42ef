#include "bindings.h"

namespace maxrl::bindings {

void bind_layer(py::module_& m) {
  constexpr Dtypes<Types<float, float>, Types<double, double>, Types<BFloat16, float>> dtypes;
  define<AddRmsNorm, int>(m, "add_rms_norm_cpu", dtypes, [](auto& in, int n) { cpu::add_rms_norm(in, n); });
  define<AddRmsNormBackward, int>(m, "add_rms_norm_backward_cpu", dtypes,
                                  [](auto& in, int n) { cpu::add_rms_norm_backward(in, n); });
  define<RotateHeads, int>(m, "rotate_heads_cpu", dtypes, [](auto& in, int n) { cpu::rotate_heads(in, n); });
  define<RotateHeadsBackward, int>(m, "rotate_heads_backward_cpu", dtypes,
                                   [](auto& in, int n) { cpu::rotate_heads_backward(in, n); });
  define<SwiGlu, int>(m, "swiglu_cpu", dtypes, [](auto& in, int n) { cpu::swiglu(in, n); });
  define<SwiGluBackward, int>(m, "swiglu_backward_cpu", dtypes, [](auto& in, int n) { cpu::swiglu_backward(in, n); });
  define<ChosenRows, int>(m, "chosen_rows_backward_cpu", dtypes, [](auto& in, int n) { cpu::chosen_rows_backward(in, n); });

#ifdef MAXRL_FAST_CUDA
  constexpr Dtypes<Types<float>, Types<BFloat16>, Types<Float16>> on_gpu;
  using Stream = cudaStream_t;
  define<AddRmsNorm, Stream>(m, "add_rms_norm_cuda", on_gpu, [](auto& in, Stream s) { cuda::add_rms_norm(in, s); });
  define<AddRmsNormBackward, Stream>(m, "add_rms_norm_backward_cuda", on_gpu,
                                     [](auto& in, Stream s) { cuda::add_rms_norm_backward(in, s); });
  define<RotateHeads, Stream>(m, "rotate_heads_cuda", on_gpu, [](auto& in, Stream s) { cuda::rotate_heads(in, s); });
  define<RotateHeadsBackward, Stream>(m, "rotate_heads_backward_cuda", on_gpu,
                                      [](auto& in, Stream s) { cuda::rotate_heads_backward(in, s); });
  define<SwiGlu, Stream>(m, "swiglu_cuda", on_gpu, [](auto& in, Stream s) { cuda::swiglu(in, s); });
  define<SwiGluBackward, Stream>(m, "swiglu_backward_cuda", on_gpu, [](auto& in, Stream s) { cuda::swiglu_backward(in, s); });
#endif
}

}  // namespace maxrl::bindings
