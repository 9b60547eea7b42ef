// Log-probabilities and entropies of rows of logits on a CPU, and their backward pass.
#include "../kernels.h"
#include "dispatch.h"
#include "huge_pages.h"
#include "softmax_row.h"

namespace maxrl::cpu {
namespace {

template <typename Element, typename Real>
struct ForwardWork {
  Rows<const Element> logits;
  const TokenRows<Real>& in;
  Real *logprobs, *entropy;

  template <typename Vectors>
  void run(int64_t begin, int64_t end, Real*) const {
    for (int64_t t = begin; t < end; ++t) {
      SoftmaxRow<Vectors, Element> row(logits.of(t), in.vocab_size, in.targets[t], in.temperature_of(t), nullptr);
      const Softmax softmax = row.statistics();
      logprobs[t] = static_cast<Real>(softmax.logp);
      entropy[t] = static_cast<Real>(softmax.entropy);
    }
  }
};

template <typename Element, typename Real>
struct BackwardWork {
  Rows<const Element> logits;
  const TokenRows<Real>& in;
  const Real *grad_logprobs, *grad_entropy;
  Rows<Element> gradient;

  template <typename Vectors>
  void run(int64_t begin, int64_t end, Real* scratch) const {
    for (int64_t t = begin; t < end; ++t) {
      const RowGrads grads{grad_logprobs[t], grad_entropy[t]};
      if (grads.grad_logp == 0.0 && grads.grad_entropy == 0.0) {
        std::fill_n(gradient.of(t), in.vocab_size, Element{});
        continue;
      }
      SoftmaxRow<Vectors, Element> row(logits.of(t), in.vocab_size, in.targets[t], in.temperature_of(t), scratch);
      row.write_gradient(row.statistics(), grads, gradient.of(t));
    }
  }
};

}  // namespace

template <typename Element, typename Real>
int64_t token_logprobs(Rows<const Element> logits, const TokenRows<Real>& in, Real* logprobs, Real* entropy, int num_threads) {
  for (int64_t t = 0; t < in.num_tokens; ++t)
    if (!in.is_target_valid(t)) return t;
  for_rows<Real>(in.num_tokens, rows_per_piece(in.vocab_size), 0, num_threads,
                 ForwardWork<Element, Real>{logits, in, logprobs, entropy});
  return -1;
}

template <typename Element, typename Real>
void token_logprobs_backward(Rows<const Element> logits, const TokenRows<Real>& in, const Real* grad_logprobs,
                             const Real* grad_entropy, Rows<Element> gradient, int num_threads) {
  if (gradient.data != logits.data)
    advise_huge_pages(gradient.data, in.num_tokens * gradient.stride * static_cast<int64_t>(sizeof(Element)));
  for_rows<Real>(in.num_tokens, rows_per_piece(in.vocab_size), scratch_size(in.vocab_size), num_threads,
                 BackwardWork<Element, Real>{logits, in, grad_logprobs, grad_entropy, gradient});
}

#define MAXRL_INSTANTIATE(Element, Real)                                                                                      \
  template int64_t token_logprobs(Rows<const Element>, const TokenRows<Real>&, Real*, Real*, int);                            \
  template void token_logprobs_backward(Rows<const Element>, const TokenRows<Real>&, const Real*, const Real*, Rows<Element>, \
                                        int);
MAXRL_INSTANTIATE(float, float)
MAXRL_INSTANTIATE(double, double)
MAXRL_INSTANTIATE(BFloat16, float)
MAXRL_INSTANTIATE(Float16, float)
#undef MAXRL_INSTANTIATE

}  // namespace maxrl::cpu
