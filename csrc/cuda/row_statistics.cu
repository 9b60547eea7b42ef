// Statistics of rows of logits on a GPU. A block takes one row at a time and reads it twice: for the softmax, as the loss does,
// then for the most probable tokens and the mass. There is one block for each multiprocessor, so that the rows at work fit into
// the L2 cache, where the second read finds them: 132 rows of 151936 bfloat16 logits are 40 MB.
#include "../kernels.h"
#include "../row_statistics.h"
#include "softmax_rows.cuh"

namespace maxrl::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;

struct Greatest {
  template <typename Real>
  __device__ Real operator()(Real a, Real b) const {
    return a > b ? a : b;
  }
};
struct Least {
  __device__ int operator()(int a, int b) const { return a < b ? a : b; }
};

template <typename Real>
struct StatisticsWork {
  RowStatistics<Real> out;

  struct State {};
  struct Plan {};

  __device__ bool plan(State&, int64_t, Plan&) const { return true; }
  __device__ RowGrads evaluate(State&, int64_t t, const Plan&, const Softmax& softmax) const {
    out.write_softmax(t, softmax);
    return {0.0, 0.0};
  }
};

// What one thread finds in its part of a row.
template <typename Real>
struct ThreadStatistics {
  TopTokens<Real, int> top;
  Real kept = 0;  // the sum of 2^(z rate - base) over the logits of at least `least`

  __device__ void add(Real z, int token, Real least, Real rate, Real base) {
    top.insert(z, token);
    if (z >= least) kept += exponential2(at_least(fma(z, rate, -base), kLowestExponent<Real>));
  }
};

template <typename Real, typename Element>
__device__ ThreadStatistics<Real> statistics_of(const Element* row, const RowPart<Element>& part, int thread, Real least,
                                                Real rate, Real base) {
  const auto* chunks = reinterpret_cast<const Chunk<Element>*>(row + part.layout.head);
  ThreadStatistics<Real> mine;
  const auto add_one = [&](int i) { mine.add(to_real(row[i]), i, least, rate, base); };
  part.for_ends(thread, add_one);
  for (int c = part.first + thread; c < part.last; c += kThreads) {
    Chunk<Element> chunk;
    chunk.bits = chunks[c].bits;
    const Real greatest = greatest_of<Real>(chunk);
    if (greatest < least && greatest < mine.top.logits[kMaxTopTokens - 1]) continue;
#pragma unroll 1
    for (int i = 0; i < Chunk<Element>::kSize; ++i) add_one(part.start_of(c) + i);
  }
  return mine;
}

template <typename Element, typename Real>
__global__ void __launch_bounds__(kThreads, 1)
    row_statistics_kernel(const __grid_constant__ RowsTask<Element, Real, StatisticsWork<Real>> task) {
  __shared__ TeamMemory<Element, Real, StatisticsWork<Real>, kWarps> memory;
  __shared__ Real of_warps[kWarps];
  __shared__ double sums[kWarps];
  __shared__ int tokens[kWarps];
  const auto& out = task.work.out;
  const int thread = threadIdx.x;
  for (int64_t t = blockIdx.x; t < task.in.num_tokens; t += gridDim.x) {
    if (thread == 0) plan(task, memory.state, t, memory.rows[0]);
    __syncthreads();
    const auto& planned = memory.rows[0];
    const Element* row = task.logits.of(t);
    const RowPart<Element> part(row, task.in.vocab_size, 0, 1);
    Chunk<Element>* const not_kept = nullptr;
    const auto softmax_sums = sums_of<kThreads, false>(row, part, thread, planned.rate, planned.target, not_kept);
    store_sums(softmax_sums, memory.sums[0][thread / kWarp]);
    Real greatest = block_reduce(softmax_sums.greatest, of_warps, Greatest());  // whose barriers the sums need too
    if (thread < kWarp) resolve(task.work, memory, 0, 0, 1);
    __syncthreads();

    const Real of_target = static_cast<Real>(planned.at_target);
    greatest = of_target > greatest ? of_target : greatest;
    const Real least = static_cast<Real>(greatest + log(out.min_p) / planned.inverse_temperature);
    auto mine = statistics_of(row, part, thread, least, planned.rate, memory.resolved.base);
    const double kept = block_reduce(static_cast<double>(mine.kept), sums, Add());
    const Softmax& softmax = memory.resolved.softmax;
    if (thread == 0) {
      const double top = static_cast<double>(memory.resolved.base) / planned.rate;  // what 2^(z rate - base) is relative to
      out.write_mass(t, log(kept) + (top - softmax.top) * softmax.inverse_temperature, softmax);
    }
    for (int k = 0; k < out.top_k; ++k) {
      const Real logit = block_reduce(mine.top.logits[0], of_warps, Greatest());
      const int token = block_reduce(mine.top.logits[0] == logit ? mine.top.tokens[0] : INT32_MAX, tokens, Least());
      if (thread == 0) out.write_top(t, k, min(int64_t{token}, task.in.vocab_size - 1), logit, softmax);
      if (mine.top.tokens[0] == token) mine.top.drop_first();
    }
  }
}

}  // namespace

template <typename Element, typename Real>
void row_statistics(Rows<const Element> logits, const TokenRows<Real>& in, const RowStatistics<Real>& out,
                    cudaStream_t stream) {
  if (in.num_tokens == 0) return;
  if (in.vocab_size > INT32_MAX - kThreads * kAccess) throw std::invalid_argument("a row has too many logits");
  const bool has_clusters = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  const int64_t blocks = std::min<int64_t>(in.num_tokens, device_attribute(cudaDevAttrMultiProcessorCount));
  const RowsTask<Element, Real, StatisticsWork<Real>> task{logits, in, {nullptr, 0}, {out}};
  launch(row_statistics_kernel<Element, Real>, blocks, kThreads, 0, has_clusters ? 1 : 0, stream, task);
}

#define MAXRL_INSTANTIATE(Element, Real) \
  template void row_statistics(Rows<const Element>, const TokenRows<Real>&, const RowStatistics<Real>&, cudaStream_t);
MAXRL_INSTANTIATE(float, float)
MAXRL_INSTANTIATE(double, double)
MAXRL_INSTANTIATE(BFloat16, float)
MAXRL_INSTANTIATE(Float16, float)
#undef MAXRL_INSTANTIATE

}  // namespace maxrl::cuda
