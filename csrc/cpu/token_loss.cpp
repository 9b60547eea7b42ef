// The token loss on a CPU: each row of logits is read once, and its gradient written while the row is in the cache.
#include "../token_loss.h"

#include <vector>

#include "../kernels.h"
#include "dispatch.h"
#include "huge_pages.h"
#include "softmax_row.h"

namespace maxrl::cpu {
namespace {

template <typename Element, typename Real>
struct TokenLossWork {
  Rows<const Element> logits;
  const TokenLossInputs<Real>& in;
  const LossTerms& terms;
  Rows<Element> gradient;
  int64_t grain;
  LossSums* partial;  // one per piece

  template <typename Vectors>
  void run(int64_t begin, int64_t end, typename Vectors::Real* scratch) const {
    LossSums sums;
    sums.clear();
    for (int64_t t = begin; t < end; ++t) {
      Element* row_gradient = gradient.of(t);
      const RowPlan plan = plan_row(in, terms, t);
      sums.values[LossSums::kTokens] += plan.counts;
      sums.values[LossSums::kDropped] += plan.counts && !plan.must_read;
      if (!plan.must_read) {
        if (row_gradient) std::fill_n(row_gradient, in.rows.vocab_size, Element{});
        continue;
      }
      SoftmaxRow<Vectors, Element> row(logits.of(t), in.rows.vocab_size, in.rows.targets[t], in.rows.temperature_of(t),
                                       scratch);
      const Softmax softmax = row.statistics();
      const RowGrads grads = evaluate_row(in, terms, t, plan, softmax, sums);
      if (row_gradient) row.write_gradient(softmax, grads, row_gradient);
    }
    partial[begin / grain] = sums;
  }
};

}  // namespace

template <typename Element, typename Real>
int64_t token_loss(Rows<const Element> logits, const TokenLossInputs<Real>& in, const LossTerms& terms, Rows<Element> gradient,
                   double* sums, int num_threads) {
  for (int64_t t = 0; t < in.rows.num_tokens; ++t)
    if (!in.rows.is_target_valid(t) && (!in.mask || in.mask[t])) return t;
  if (gradient.data && gradient.data != logits.data)
    advise_huge_pages(gradient.data, in.rows.num_tokens * gradient.stride * static_cast<int64_t>(sizeof(Element)));
  const int64_t grain = rows_per_piece(in.rows.vocab_size);
  std::vector<LossSums> partial((in.rows.num_tokens + grain - 1) / grain);
  for_rows<Real>(in.rows.num_tokens, grain, gradient.data ? scratch_size(in.rows.vocab_size) : 0, num_threads,
                 TokenLossWork<Element, Real>{logits, in, terms, gradient, grain, partial.data()});
  LossSums total;
  total.clear();
  for (const LossSums& piece : partial) total.add(piece);
  std::copy_n(total.values, static_cast<int>(LossSums::kSize), sums);
  return -1;
}

#define MAXRL_INSTANTIATE(Element, Real) \
  template int64_t token_loss(Rows<const Element>, const TokenLossInputs<Real>&, const LossTerms&, Rows<Element>, double*, int);
MAXRL_INSTANTIATE(float, float)
MAXRL_INSTANTIATE(double, double)
MAXRL_INSTANTIATE(BFloat16, float)
MAXRL_INSTANTIATE(Float16, float)
#undef MAXRL_INSTANTIATE

}  // namespace maxrl::cpu
