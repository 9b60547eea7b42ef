// The token loss on a CPU: each row of logits is read once, and its gradient written while the row
// is in the cache.
#include "../token_loss.h"

#include <vector>

#include "dispatch.h"
#include "huge_pages.h"
#include "softmax_row.h"

namespace maxrl::cpu {
namespace {

template <typename Element>
int64_t token_loss(const TokenLossCall<Element>& call, int num_threads) {
  using Real = RealOf<Element>;
  const TokenRows& tokens = call.inputs.tokens;
  if (const int64_t t = tokens.first_invalid_target(); t >= 0) return t;
  if (call.gradient.data != call.logits.data) advise_huge_pages(call.gradient, tokens.num_tokens);
  const int64_t grain = rows_per_piece(tokens.vocab_size),
                scratch = call.gradient.data ? scratch_size(tokens.vocab_size) : 0;
  std::vector<LossSums> partial((tokens.num_tokens + grain - 1) / grain);
  for_rows<Real>(tokens.num_tokens, grain, scratch, num_threads,
                 [&](auto vectors, int64_t begin, int64_t end, Real* own) {
                   LossSums sums{};
                   for (int64_t t = begin; t < end; ++t) {
                     Element* row_gradient = call.gradient.of(t);
                     if (!count_token(call.inputs, call.terms, t, sums)) {
                       if (row_gradient) std::fill_n(row_gradient, tokens.vocab_size, Element{});
                       continue;
                     }
                     SoftmaxRow<decltype(vectors), Element> row(call.logits, tokens, t, own);
                     const Softmax softmax = row.statistics();
                     const RowGrads grads = evaluate_row(call.inputs, call.terms, t, softmax, sums);
                     if (row_gradient) row.write_gradient(softmax, grads, row_gradient);
                   }
                   partial[begin / grain] = sums;
                 });
  LossSums total{};
  for (const LossSums& piece : partial) total.add(piece);
  std::copy_n(total.values, static_cast<int>(LossSums::kSize), call.sums);
  return -1;
}

const bool defined = define_kernel("token_loss", token_loss<float>, token_loss<double>,
                                   token_loss<BFloat16>, token_loss<Float16>);

}  // namespace
}  // namespace maxrl::cpu
