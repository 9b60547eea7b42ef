// The token loss on a GPU in one launch, with the sums of the metrics, in an order that depends
// only on the launch's shape.
#include "softmax_launch.cuh"

namespace maxrl::cuda {
namespace {

template <typename Real>
struct LossWork {
  TokenLossInputs in;
  LossTerms terms;
  double* workspace;
  Real* total;

  using State = LossSums;
  using Token = PlannedToken;

  __device__ __noinline__ bool plan(State& sums, int64_t row, Token& token) const {
    return plan_token(in, terms, row, sums, token);
  }
  __device__ __noinline__ RowGrads evaluate(State& sums, int64_t, const Token& token,
                                            const Softmax& softmax) const {
    return evaluate_row(in, terms, token, softmax, sums);
  }
  template <int teams, typename StateOf>
  __device__ void finish(const StateOf& state_of) const {
    const auto sum_of = [&](int i) {
      double sum = 0.0;
      for (int team = 0; team < teams; ++team) sum += state_of(team).values()[i];
      return sum;
    };
    // All blocks of a cluster have the same sums: the first adds them.
    const unsigned size = Cluster::size();
    if (Cluster::rank() == 0)
      add_over_blocks<LossSums::kSize>(sum_of, workspace, blockIdx.x / size, gridDim.x / size,
                                       [this](int i, double sum) {
                                         if (total && i == 0) *total = static_cast<Real>(sum);
                                       });
  }
};

}  // namespace

template <typename Element, typename Gradient>
void token_loss(const TokenLossCall<Element, Gradient>& call, cudaStream_t stream) {
  const LossWork<RealOf<Element>> work{call.inputs, call.terms, call.sums, call.total};
  launch_rows(call.logits, call.inputs.tokens, call.gradient, work, stream);
}

const bool defined = define_kernel("token_loss", token_loss<float, float>,
                                   token_loss<double, double>, token_loss<BFloat16, BFloat16>) &&
                     define_kernel("token_loss_in_bfloat16", token_loss<float, BFloat16>);

}  // namespace maxrl::cuda
