// Log-probabilities and entropies of rows of logits on a CPU, and their backward pass.
#include "dispatch.h"
#include "softmax_row.h"

namespace maxrl::cpu {
namespace {

template <typename Element>
int64_t token_logprobs(const TokenLogprobs<Element>& call, int num_threads) {
  using Real = RealOf<Element>;
  const TokenRows& in = call.tokens;
  if (const int64_t row = in.first_unusable(); row >= 0) return row;
  for_rows<Real>(in.num_rows, rows_per_piece(in.vocab_size), 0, num_threads,
                 [&](auto vectors, int64_t, int64_t r, Real*) {
                   const int64_t t = in.token_of(r);
                   if (!in.counts(t)) return;
                   SoftmaxRow<decltype(vectors), Element> row(call.logits.of(r), in, t, nullptr);
                   const Softmax softmax = row.statistics();
                   call.logprobs[r] = static_cast<Real>(softmax.logp);
                   call.entropy[r] = static_cast<Real>(softmax.entropy);
                 });
  return -1;
}

template <typename Element>
void token_logprobs_backward(const TokenLogprobsBackward<Element>& call, int num_threads) {
  using Real = RealOf<Element>;
  const TokenRows& in = call.tokens;
  if (call.gradient.data != call.logits.data) advise_huge_pages(call.gradient, in.num_rows);
  for_rows<Real>(in.num_rows, rows_per_piece(in.vocab_size), scratch_size(in.vocab_size),
                 num_threads, [&](auto vectors, int64_t, int64_t r, Real* own) {
                   const RowGrads grads{call.grad_logprobs[r], call.grad_entropy[r]};
                   if (grads.grad_logp == 0.0 && grads.grad_entropy == 0.0)
                     return void(std::fill_n(call.gradient.of(r), in.vocab_size, Element{}));
                   SoftmaxRow<decltype(vectors), Element> row(call.logits.of(r), in, in.token_of(r),
                                                              own);
                   row.write_gradient(row.statistics(), grads, call.gradient.of(r));
                 });
}

template <typename Element>
bool define() {
  return define_kernel("token_logprobs", token_logprobs<Element>) &&
         define_kernel("token_logprobs_backward", token_logprobs_backward<Element>);
}
const bool defined = define<float>() && define<double>() && define<BFloat16>();

}  // namespace
}  // namespace maxrl::cpu
