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
  const TokenRows& rows = call.inputs.tokens;
  if (!call.inputs.are_usable()) return 0;
  if (const int64_t row = rows.first_unusable(); row >= 0) return row;
  if (call.gradient.data != call.logits.data) advise_huge_pages(call.gradient, rows.num_rows);
  const int64_t grain = rows_per_piece(rows.vocab_size),
                scratch = call.gradient.data ? scratch_size(rows.vocab_size) : 0;
  std::vector<LossSums> partial((rows.num_rows + grain - 1) / grain);
  for_rows<Real>(
      rows.num_rows, grain, scratch, num_threads,
      [&](auto vectors, int64_t begin, int64_t end, Real* own) {
        LossSums sums{};
        for (int64_t r = begin; r < end; ++r) {
          Element* row_gradient = call.gradient.of(r);
          PlannedToken token;
          if (!plan_token(call.inputs, call.terms, r, sums, token)) {
            if (row_gradient) std::fill_n(row_gradient, rows.vocab_size, Element{});
            continue;
          }
          SoftmaxRow<decltype(vectors), Element> row(call.logits.of(r), rows, token.t, own);
          const Softmax softmax = row.statistics();
          const RowGrads grads = evaluate_row(call.inputs, call.terms, token, softmax, sums);
          if (row_gradient) row.write_gradient(softmax, grads, row_gradient);
        }
        partial[begin / grain] = sums;
      });
  LossSums total{};
  for (const LossSums& piece : partial) total.add(piece);
  std::copy_n(total.values, static_cast<int>(LossSums::kSize), call.sums);
  if (call.total) *call.total = static_cast<Real>(total.values[LossSums::kLoss]);
  return -1;
}

const bool defined =
    define_kernel("token_loss", token_loss<float>, token_loss<double>, token_loss<BFloat16>);

}  // namespace
}  // namespace maxrl::cpu
