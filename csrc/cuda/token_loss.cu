// The token loss on a GPU in one launch, with the sums of the metrics, in an order that depends only on the launch's shape.
#include "../kernels.h"
#include "softmax_rows.cuh"

namespace maxrl::cuda {
namespace {

template <typename Real>
struct LossWork {
  TokenLossInputs<Real> in;
  LossTerms terms;
  double* workspace;

  using State = LossSums;
  using Plan = RowPlan;

  __device__ __noinline__ bool plan(State& sums, int64_t t, Plan& plan) const {
    const RowPlan row = plan_row(in, terms, t);
    plan = row;
    sums.values[LossSums::kTokens] += row.counts;
    sums.values[LossSums::kDropped] += row.counts && !row.must_read;
    return row.must_read;
  }
  __device__ __noinline__ RowGrads evaluate(State& sums, int64_t t, const Plan& plan, const Softmax& softmax) const {
    return evaluate_row(in, terms, t, plan, softmax, sums);
  }
  template <int teams, typename StateOf>
  __device__ void finish(const StateOf& state_of) const {
    const auto sum_of = [&](int i) {
      double sum = 0.0;
      for (int team = 0; team < teams; ++team) sum += state_of(team).values[i];
      return sum;
    };
    // All blocks of a cluster have the same sums: the first adds them.
    const unsigned size = Cluster::size();
    if (Cluster::rank() == 0) add_over_blocks<LossSums::kSize>(sum_of, workspace, blockIdx.x / size, gridDim.x / size);
  }
};

}  // namespace

template <typename Element, typename Real>
void token_loss(Rows<const Element> logits, const TokenLossInputs<Real>& in, const LossTerms& terms, Rows<Element> gradient,
                double* workspace, cudaStream_t stream) {
  if (in.rows.num_tokens == 0) return;  // the workspace is 0 already
  launch_rows<Element, Real>(logits, in.rows, gradient, LossWork<Real>{in, terms, workspace}, stream);
}

#define MAXRL_INSTANTIATE(Element, Real)                                                                                \
  template void token_loss(Rows<const Element>, const TokenLossInputs<Real>&, const LossTerms&, Rows<Element>, double*, \
                           cudaStream_t);
MAXRL_INSTANTIATE(float, float)
MAXRL_INSTANTIATE(double, double)
MAXRL_INSTANTIATE(BFloat16, float)
MAXRL_INSTANTIATE(Float16, float)
#undef MAXRL_INSTANTIATE

}  // namespace maxrl::cuda
