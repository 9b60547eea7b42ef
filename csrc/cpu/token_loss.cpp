// The token loss on a CPU: each row of logits is read once, and its gradient written while the row
// is in the cache.
#include "../token_loss.h"

#include <vector>

#include "dispatch.h"
#include "softmax_row.h"

namespace maxrl::cpu {
namespace {

template <typename Element>
int64_t token_loss(const TokenLossCall<Element>& call, int num_threads) {
  using Real = RealOf<Element>;
  const TokenRows& rows = call.inputs.tokens;
  if (!call.inputs.are_usable()) return 0;
  if (const int64_t row = rows.first_unusable(); row >= 0) return row;
  if (call.gradient.data != call.logits.data) advise_huge_pages(call.gradient, rows.num_rows);
  const int64_t grain = rows_per_piece(rows.vocab_size),
                scratch = call.gradient.data ? scratch_size(rows.vocab_size) : 0;
  std::vector<LossSums> partial((rows.num_rows + grain - 1) / grain);
  for_rows<Real>(rows.num_rows, grain, scratch, num_threads,
                 [&](auto vectors, int64_t piece, int64_t r, Real* own) {
                   Element* const gradient = call.gradient.of(r);
                   PlannedToken token;
                   if (!plan_token(call.inputs, call.terms, r, partial[piece], token)) {
                     if (gradient) std::fill_n(gradient, rows.vocab_size, Element{});
                     return;
                   }
                   SoftmaxRow<decltype(vectors), Element> row(call.logits.of(r), rows, token.t,
                                                              own);
                   const Softmax softmax = row.statistics();
                   const RowGrads grads =
                       evaluate_row(call.inputs, call.terms, token, softmax, partial[piece]);
                   if (gradient) row.write_gradient(softmax, grads, gradient);
                 });
  std::fill_n(call.sums, static_cast<int>(LossSums::kSize), 0.0);
  for (const LossSums& piece : partial)
    for (int i = 0; i < LossSums::kSize; ++i) call.sums[i] += piece.values()[i];
  if (call.total) *call.total = static_cast<Real>(*call.sums);
  return -1;
}

const bool defined =
    define_kernel("token_loss", token_loss<float>, token_loss<double>, token_loss<BFloat16>);

}  // namespace
}  // namespace maxrl::cpu
