// Log-probabilities and entropies of rows of logits on a GPU, and their backward pass.
#include "../kernels.h"
#include "softmax_rows.cuh"

namespace maxrl::cuda {
namespace {

template <typename Real>
struct ForwardWork {
  Real *logprobs, *entropy;

  struct State {};
  struct Plan {};

  __device__ bool plan(State&, int64_t, Plan&) const { return true; }
  __device__ RowGrads evaluate(State&, int64_t t, const Plan&, const Softmax& softmax) const {
    logprobs[t] = static_cast<Real>(softmax.logp);
    entropy[t] = static_cast<Real>(softmax.entropy);
    return {0.0, 0.0};
  }
  template <int teams, typename StateOf>
  __device__ void finish(const StateOf&) const {}
};

template <typename Real>
struct BackwardWork {
  const Real *grad_logprobs, *grad_entropy;

  struct State {};
  using Plan = RowGrads;

  __device__ bool plan(State&, int64_t t, Plan& grads) const {
    grads = {static_cast<double>(grad_logprobs[t]), static_cast<double>(grad_entropy[t])};
    return grads.grad_logp != 0.0 || grads.grad_entropy != 0.0;
  }
  __device__ RowGrads evaluate(State&, int64_t, const Plan& grads, const Softmax&) const { return grads; }
  template <int teams, typename StateOf>
  __device__ void finish(const StateOf&) const {}
};

// One block per row, in place; the scale is read on the device.
template <typename Element, typename Real>
__global__ void scale_rows(Rows<Element> matrix, int64_t num_rows, int64_t row_size, const double* scale) {
  const double factor = *scale;
  if (factor == 1.0) return;
  for (int64_t r = blockIdx.x; r < num_rows; r += gridDim.x)
    for (int64_t i = threadIdx.x; i < row_size; i += blockDim.x) {
      Element* element = matrix.of(r) + i;
      *element = from_real<Element>(static_cast<Real>(to_real(*element) * factor));
    }
}

}  // namespace

template <typename Element, typename Real>
void token_logprobs(Rows<const Element> logits, const TokenRows<Real>& in, Real* logprobs, Real* entropy, cudaStream_t stream) {
  if (in.num_tokens == 0) return;
  launch_rows<Element, Real>(logits, in, Rows<Element>{nullptr, 0}, ForwardWork<Real>{logprobs, entropy}, stream);
}

template <typename Element, typename Real>
void token_logprobs_backward(Rows<const Element> logits, const TokenRows<Real>& in, const Real* grad_logprobs,
                             const Real* grad_entropy, Rows<Element> gradient, cudaStream_t stream) {
  if (in.num_tokens == 0) return;
  launch_rows<Element, Real>(logits, in, gradient, BackwardWork<Real>{grad_logprobs, grad_entropy}, stream);
}

template <typename Element, typename Real>
void scale(Rows<Element> matrix, int64_t num_rows, int64_t row_size, const double* scale, cudaStream_t stream) {
  if (num_rows == 0) return;
  constexpr int64_t kMostBlocks = 4096;
  launch(scale_rows<Element, Real>, std::min(num_rows, kMostBlocks), kRowThreads, 0, 0, stream, matrix, num_rows, row_size,
         scale);
}

#define MAXRL_INSTANTIATE(Element, Real)                                                                                      \
  template void token_logprobs(Rows<const Element>, const TokenRows<Real>&, Real*, Real*, cudaStream_t);                      \
  template void token_logprobs_backward(Rows<const Element>, const TokenRows<Real>&, const Real*, const Real*, Rows<Element>, \
                                        cudaStream_t);                                                                        \
  template void scale<Element, Real>(Rows<Element>, int64_t, int64_t, const double*, cudaStream_t);
MAXRL_INSTANTIATE(float, float)
MAXRL_INSTANTIATE(double, double)
MAXRL_INSTANTIATE(BFloat16, float)
MAXRL_INSTANTIATE(Float16, float)
#undef MAXRL_INSTANTIATE

}  // namespace maxrl::cuda
