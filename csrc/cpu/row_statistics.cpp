// Statistics of rows of logits on a CPU. A row is read from memory once: its most probable tokens are found block by block,
// while a block is in the L1 cache, and the mass is summed from the stored exponentials.
#include "../row_statistics.h"

#include <algorithm>

#include "../kernels.h"
#include "dispatch.h"
#include "softmax_row.h"

namespace maxrl::cpu {
namespace {

template <typename Element, typename Real>
struct StatisticsWork {
  Rows<const Element> logits;
  const TokenRows<Real>& in;
  const RowStatistics<Real>& out;

  template <typename Vectors>
  void run(int64_t begin, int64_t end, Real* scratch) const {
    for (int64_t t = begin; t < end; ++t) {
      const Element* z = logits.of(t);
      const int64_t target = in.targets[t];
      const int last = out.top_k - 1;
      TopTokens<Real, int64_t> top;
      const auto is_wanted = [&](Real logit) { return logit > top.logits[last] || top.tokens[last] == top.kNone; };
      const auto find_top = [&](int64_t from, int64_t to, Real greatest) {
        if (!is_wanted(greatest)) return;
        for (int64_t i = from; i < to; ++i) {
          const Real logit = static_cast<Real>(to_double(z[i]));
          if (is_wanted(logit)) top.insert(logit, i);
        }
      };
      SoftmaxRow<Vectors, Element> row(z, in.vocab_size, target, in.temperature_of(t), scratch);
      const Softmax softmax = row.statistics(find_top);
      top.insert(static_cast<Real>(to_double(z[target])), target);
      out.write_softmax(t, softmax);
      for (int k = 0; k < out.top_k; ++k)
        out.write_top(t, k, std::min(top.tokens[k], in.vocab_size - 1), top.logits[k], softmax);
      const double of_target = std::exp(softmax.logp + softmax.log_total);
      const double of_others = row.sum_of_at_least(out.min_p, softmax);
      out.write_mass(t, std::log(of_others + (of_target >= out.min_p ? of_target : 0.0)), softmax);
    }
  }
};

}  // namespace

template <typename Element, typename Real>
int64_t row_statistics(Rows<const Element> logits, const TokenRows<Real>& in, const RowStatistics<Real>& out, int num_threads) {
  for (int64_t t = 0; t < in.num_tokens; ++t)
    if (!in.is_target_valid(t)) return t;
  for_rows<Real>(in.num_tokens, rows_per_piece(in.vocab_size), scratch_size(in.vocab_size), num_threads,
                 StatisticsWork<Element, Real>{logits, in, out});
  return -1;
}

#define MAXRL_INSTANTIATE(Element, Real) \
  template int64_t row_statistics(Rows<const Element>, const TokenRows<Real>&, const RowStatistics<Real>&, int);
MAXRL_INSTANTIATE(float, float)
MAXRL_INSTANTIATE(double, double)
MAXRL_INSTANTIATE(BFloat16, float)
MAXRL_INSTANTIATE(Float16, float)
#undef MAXRL_INSTANTIATE

}  // namespace maxrl::cpu
