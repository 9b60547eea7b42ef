// Log-probabilities and entropies of rows of logits on a GPU, and their backward pass.
#include "softmax_launch.cuh"

namespace maxrl::cuda {
namespace {

struct WithoutState {
  struct State {};
  struct Token {};
  template <int teams, typename StateOf>
  __device__ void finish(const StateOf&) const {}
};

template <typename Real>
struct ForwardWork : WithoutState {
  TokenRows in;
  Real *logprobs, *entropy;

  __device__ bool plan(State&, int64_t row, Token&) const { return in.counts(in.token_of(row)); }
  __device__ RowGrads evaluate(State&, int64_t row, const Token&, const Softmax& softmax) const {
    logprobs[row] = static_cast<Real>(softmax.logp);
    entropy[row] = static_cast<Real>(softmax.entropy);
    return {0.0, 0.0};
  }
};

template <typename Real>
struct BackwardWork : WithoutState {
  const Real *grad_logprobs, *grad_entropy;

  __device__ bool plan(State&, int64_t row, Token&) const {
    return grad_logprobs[row] != 0 || grad_entropy[row] != 0;
  }
  __device__ RowGrads evaluate(State&, int64_t row, const Token&, const Softmax&) const {
    return {static_cast<double>(grad_logprobs[row]), static_cast<double>(grad_entropy[row])};
  }
};

// One block per row, in place; the scale is read on the device.
template <typename Element>
__global__ void scale_rows(Rows<Element> matrix, int64_t num_rows, int64_t row_size,
                           const double* scale) {
  const double factor = *scale;
  if (factor == 1.0) return;
  for (int64_t r = blockIdx.x; r < num_rows; r += gridDim.x)
    for (int64_t i = threadIdx.x; i < row_size; i += blockDim.x) {
      Element* element = matrix.of(r) + i;
      *element = from_real<Element>(static_cast<RealOf<Element>>(to_real(*element) * factor));
    }
}

}  // namespace

template <typename Element>
void token_logprobs(const TokenLogprobs<Element>& call, cudaStream_t stream) {
  const ForwardWork<RealOf<Element>> work{{}, call.tokens, call.logprobs, call.entropy};
  launch_rows(call.logits, call.tokens, Rows<Element>{}, work, stream);
}

template <typename Element, typename Gradient>
void token_logprobs_backward(const TokenLogprobsBackward<Element, Gradient>& call,
                             cudaStream_t stream) {
  const BackwardWork<RealOf<Element>> work{{}, call.grad_logprobs, call.grad_entropy};
  launch_rows(call.logits, call.tokens, call.gradient, work, stream);
}

template <typename Element>
void scale(const ScaleCall<Element>& call, cudaStream_t stream) {
  if (call.num_rows == 0) return;
  constexpr int64_t kMostBlocks = 4096;
  launch(scale_rows<Element>, std::min(call.num_rows, kMostBlocks), kRowThreads, 0, 0, stream,
         call.matrix, call.num_rows, call.row_size, call.scale);
}

namespace {

template <typename Element>
bool define() {
  return define_kernel("token_logprobs", token_logprobs<Element>) &&
         define_kernel("token_logprobs_backward", token_logprobs_backward<Element, Element>) &&
         define_kernel("scale", scale<Element>);
}
const bool defined =
    define<float>() && define<double>() && define<BFloat16>() &&
    define_kernel("token_logprobs_backward_in_bfloat16", token_logprobs_backward<float, BFloat16>);

}  // namespace
}  // namespace maxrl::cuda
