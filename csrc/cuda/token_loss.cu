// The token loss on a GPU in one launch, with the sums of the metrics, in an order that depends
// only on the launch's shape.
#include "softmax_launch.cuh"

namespace maxrl::cuda {
namespace {

struct LossWork {
  TokenLossInputs in;
  LossTerms terms;
  double* workspace;

  using State = LossSums;

  __device__ __noinline__ bool plan(State& sums, int64_t t) const {
    return count_token(in, terms, t, sums);
  }
  __device__ __noinline__ RowGrads evaluate(State& sums, int64_t t, const Softmax& softmax) const {
    return evaluate_row(in, terms, t, softmax, sums);
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

template <typename Element, typename Gradient>
void token_loss(const TokenLossCall<Element, Gradient>& call, cudaStream_t stream) {
  const LossWork work{call.inputs, call.terms, call.sums};
  launch_rows(call.logits, call.inputs.tokens, call.gradient, work, stream);
}

const bool defined =
    define_kernel("token_loss", token_loss<float, float>, token_loss<double, double>,
                  token_loss<BFloat16, BFloat16>, token_loss<Float16, Float16>) &&
    define_kernel("token_loss_in_bfloat16", token_loss<float, BFloat16>) &&
    define_kernel("token_loss_in_float16", token_loss<float, Float16>);

}  // namespace maxrl::cuda
