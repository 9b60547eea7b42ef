// The token loss on a GPU in one launch, with the sums of the metrics, in an order that depends
// only on the launch's shape.
#include "softmax_launch.cuh"

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
  __device__ __noinline__ RowGrads evaluate(State& sums, int64_t t, const Plan& plan,
                                            const Softmax& softmax) const {
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
    if (Cluster::rank() == 0)
      add_over_blocks<LossSums::kSize>(sum_of, workspace, blockIdx.x / size, gridDim.x / size);
  }
};

}  // namespace

template <typename Element, typename Real>
void token_loss(const TokenLossCall<Element, Real>& call, cudaStream_t stream) {
  const LossWork<Real> work{call.inputs, call.terms, call.sums};
  launch_rows(call.logits, call.inputs.tokens, call.gradient, work, stream);
}

const bool defined =
    define_kernel("token_loss", token_loss<float, float>, token_loss<double, double>,
                  token_loss<BFloat16, float>, token_loss<Float16, float>);

}  // namespace maxrl::cuda
