// Log-probabilities and entropies of rows of logits on a CPU, and their backward pass.
#include "dispatch.h"
#include "huge_pages.h"
#include "softmax_row.h"

namespace maxrl::cpu {
namespace {

template <typename Element>
int64_t token_logprobs(const TokenLogprobs<Element>& call, int num_threads) {
  using Real = RealOf<Element>;
  const TokenRows& in = call.tokens;
  if (const int64_t t = in.first_invalid_target(); t >= 0) return t;
  const int64_t grain = rows_per_piece(in.vocab_size);
  for_rows<Real>(
      in.num_tokens, grain, 0, num_threads, [&](auto vectors, int64_t begin, int64_t end, Real*) {
        for (int64_t t = begin; t < end; ++t) {
          const Softmax softmax =
              SoftmaxRow<decltype(vectors), Element>(call.logits, in, t, nullptr).statistics();
          call.logprobs[t] = static_cast<Real>(softmax.logp);
          call.entropy[t] = static_cast<Real>(softmax.entropy);
        }
      });
  return -1;
}

template <typename Element>
void token_logprobs_backward(const TokenLogprobsBackward<Element>& call, int num_threads) {
  using Real = RealOf<Element>;
  const TokenRows& in = call.tokens;
  if (call.gradient.data != call.logits.data) advise_huge_pages(call.gradient, in.num_tokens);
  const int64_t grain = rows_per_piece(in.vocab_size), scratch = scratch_size(in.vocab_size);
  for_rows<Real>(in.num_tokens, grain, scratch, num_threads,
                 [&](auto vectors, int64_t begin, int64_t end, Real* own) {
                   for (int64_t t = begin; t < end; ++t) {
                     const RowGrads grads{call.grad_logprobs[t], call.grad_entropy[t]};
                     if (grads.grad_logp == 0.0 && grads.grad_entropy == 0.0) {
                       std::fill_n(call.gradient.of(t), in.vocab_size, Element{});
                       continue;
                     }
                     SoftmaxRow<decltype(vectors), Element> row(call.logits, in, t, own);
                     row.write_gradient(row.statistics(), grads, call.gradient.of(t));
                   }
                 });
}

template <typename Element>
bool define() {
  return define_kernel("token_logprobs", token_logprobs<Element>) &&
         define_kernel("token_logprobs_backward", token_logprobs_backward<Element>);
}
const bool defined = define<float>() && define<double>() && define<BFloat16>() && define<Float16>();

}  // namespace
}  // namespace maxrl::cpu
