#include "bindings.h"

void maxrl::bindings::bind_token_loss(py::module_& m) {
  export_fields(m, "Loss", kLossNames);
  export_fields(m, "LossSums", LossSums::kNames);
  m.attr("MAX_LOG_RATIO") = kMaxLogRatio;
  constexpr Dtypes<Types<float, float>, Types<double, double>, Types<BFloat16, float>, Types<Float16, float>> dtypes;
  define<TokenLossCall, int>(m, "token_loss_cpu", dtypes, [](auto& in, int n) {
    return cpu::token_loss(in.logits, in.inputs, in.terms, in.gradient, in.sums, n);
  });
  define<TokenLogprobs, int>(m, "token_logprobs_cpu", dtypes, [](auto& in, int n) {
    return cpu::token_logprobs(in.logits, in.tokens, in.logprobs, in.entropy, n);
  });
  define<TokenLogprobsBackward, int>(m, "token_logprobs_backward_cpu", dtypes, [](auto& in, int n) {
    cpu::token_logprobs_backward(in.logits, in.tokens, in.grad_logprobs, in.grad_entropy, in.gradient, n);
  });
#ifdef MAXRL_FAST_CUDA
  using Stream = cudaStream_t;
  m.attr("LOSS_WORKSPACE") = cuda::loss_workspace();
  define<TokenLossCall, Stream>(m, "token_loss_cuda", dtypes, [](auto& in, Stream s) {
    cuda::token_loss(in.logits, in.inputs, in.terms, in.gradient, in.sums, s);
  });
  define<TokenLogprobs, Stream>(m, "token_logprobs_cuda", dtypes, [](auto& in, Stream s) {
    cuda::token_logprobs(in.logits, in.tokens, in.logprobs, in.entropy, s);
  });
  define<TokenLogprobsBackward, Stream>(m, "token_logprobs_backward_cuda", dtypes, [](auto& in, Stream s) {
    cuda::token_logprobs_backward(in.logits, in.tokens, in.grad_logprobs, in.grad_entropy, in.gradient, s);
  });
  define<ScaleCall, Stream>(m, "scale_cuda", dtypes, [](auto& in, Stream s) {
    using In = std::decay_t<decltype(in)>;
    cuda::scale<typename In::Element, typename In::Real>(in.matrix, in.num_rows, in.row_size, in.scale, s);
  });
#endif
}
