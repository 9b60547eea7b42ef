// The divergence of a policy from a teacher on a GPU, a block for each row, which reads both logits
// twice, for jsd three times, and writes the gradient.
#include "softmax_rows.cuh"

namespace maxrl::cuda {
namespace {

constexpr int kThreads = 384, kTogether = 2;  // chunks of each side on their way to a thread
constexpr int kSize = Chunk<float>::kSize, kStep = kThreads * kTogether;  // kStep: chunks
constexpr float kMaxUp = 80.0f;  // e^up is finite; smaller probabilities add nothing to jsd

// A thread's sums over one side's logits, as in ThreadSoftmax.
struct Side {
  float limit = kLowest<float>, base = 0, total = 0;
  float cross = 0;  // the sum of 2^x (z - the other side's z)

  __device__ void add(float z, float other, float rate) {
    if (z > limit) {
      const float factor = total > 0 ? exponential2(base - z * rate) : 0.0f;
      total *= factor;
      cross *= factor;
      base = z * rate;
      limit = z + kMostExponent / rate;
    }
    const float e = exponential2(at_least(fmaf(z, rate, -base), kLowestExponent<float>));
    total += e;
    if (e > 0) cross = fmaf(e, z - other, cross);  // 0 times an infinite difference would be NaN
  }
};

// One side's log2 of the sum of 2^(z rate), in two parts, and the mean of z - other.
struct SideOfRow {
  float base, log_total;
  double mean;

  template <typename Add>
  __device__ SideOfRow(const Side& mine, float* of_warps, const Add& add) {
    const bool has_any = mine.limit != kLowest<float>;
    base = block_reduce(has_any ? mine.base : kLowest<float>, of_warps,
                        [](float a, float b) { return a > b ? a : b; });
    const float factor = has_any ? exponential2(mine.base - base) : 0.0f;
    const double total = add(mine.total * factor);
    log_total = static_cast<float>(log2(total));
    mean = add(mine.cross * factor) / total;
  }
  __device__ double log_sum() const { return static_cast<double>(base) + log_total; }
  __device__ float log_of(float z, float rate) const { return fmaf(z, rate, -base) - log_total; }
};

// A row of logits of both sides, read by the whole block.
struct Pairs {
  const float *policy, *teacher;
  int size;

  __device__ int num_chunks() const { return size / kSize; }
  __device__ static int chunk_of(int first, int k) {
    return first + k * kThreads + static_cast<int>(threadIdx.x);
  }
  // This thread's element after the last chunk.
  __device__ int rest() const { return num_chunks() * kSize + static_cast<int>(threadIdx.x); }
  // Calls use(the policy's logit, the teacher's) for this thread's elements, and writes what it
  // returns to `gradient`, if there is one, which may lie over the policy's row or over its first
  // half: a barrier comes between reading some logits and writing over them or earlier ones.
  template <typename Gradient = void, typename Use>
  __device__ void for_each(const Use& use, Gradient* gradient = nullptr) const {
    constexpr bool kWrites = !std::is_void_v<Gradient>;
    for (int first = 0; first < num_chunks(); first += kStep) {
      Chunk<float> p[kTogether], q[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k)
        if (const int c = chunk_of(first, k); c < num_chunks()) {
          p[k] = Chunk<float>(policy + kSize * c);
          q[k] = Chunk<float>(teacher + kSize * c);
        }
      if constexpr (kWrites) __syncthreads();
#pragma unroll
      for (int k = 0; k < kTogether; ++k)
        if (const int c = chunk_of(first, k); c < num_chunks()) {
          float values[kSize];
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[i] = use(p[k].elements[i], q[k].elements[i]);
          if constexpr (kWrites)
            rounded<Gradient>(values).template write<kSize>(gradient + kSize * c);
        }
    }
    float last = 0.0f;
    if (rest() < size) last = use(policy[rest()], teacher[rest()]);
    if constexpr (kWrites) {
      __syncthreads();
      if (rest() < size) gradient[rest()] = from_real<Gradient>(last);
    }
  }
};

// log(a / (share b + (1 - share) a)) for up = log2(b / a): 0 where a = b, and NaN where up is.
__device__ inline float over_mixture(float up, float share) {
  const float raised = at_least(static_cast<float>(kLn2) * up, -kMaxUp);
  return -log1pf(share * expm1f(-at_least(-raised, -kMaxUp)));
}

template <typename Gradient, TeacherDivergence kind>  // all kinds in one would spill registers
__global__ void __launch_bounds__(kThreads, 2)
    divergence_of_rows(const __grid_constant__ DivergenceRows<Gradient> in) {
  constexpr bool kReverse = kind == TeacherDivergence::kReverse;
  constexpr bool kForward = kind == TeacherDivergence::kForward;
  __shared__ float of_warps[kThreads / kWarp];
  __shared__ double sums_of_warps[kThreads / kWarp];
  const auto add = [&](double x) { return block_reduce(x, sums_of_warps, Add{}); };
  const int64_t row = blockIdx.x;
  const Pairs pairs{in.policy.of(row), in.teacher.of(row), static_cast<int>(in.vocab_size)};
  const float beta = static_cast<float>(in.beta), share = static_cast<float>(1 - in.beta),
              tau = in.temperature[row], rate = tau > 0 ? static_cast<float>(kLog2E) / tau : NAN;
  Side mine_p, mine_q;
  pairs.for_each([&](float zp, float zq) {
    mine_p.add(zp, zq, rate);
    mine_q.add(zq, zp, rate);
    return 0.0f;
  });
  const SideOfRow p(mine_p, of_warps, add), q(mine_q, of_warps, add);
  double value, mean = 0.0;  // mean: what the gradient subtracts
  if constexpr (kReverse) {
    value = mean = kLn2 * (rate * p.mean - (p.log_sum() - q.log_sum()));
  } else if constexpr (kForward) {
    value = kLn2 * (rate * q.mean - (q.log_sum() - p.log_sum()));
  } else {
    float of_policy = 0.0f, of_teacher = 0.0f;
    pairs.for_each([&](float zp, float zq) {
      const float log_p = p.log_of(zp, rate), log_q = q.log_of(zq, rate), up = log_q - log_p;
      of_policy = fmaf(exponential2(log_p), over_mixture(up, beta), of_policy);
      of_teacher = fmaf(exponential2(log_q), over_mixture(-up, share), of_teacher);
      return 0.0f;
    });
    mean = add(of_policy);
    value = (1 - in.beta) * mean + in.beta * add(of_teacher);
  }
  if (threadIdx.x == 0) in.values[row] = value;
  if (!in.gradient.data) return;
  const float slope = static_cast<float>(in.coefficients[row] / tau), D = static_cast<float>(mean);
  const auto gradient_of = [&](float zp, float zq) {
    const float log_p = p.log_of(zp, rate), log_q = q.log_of(zq, rate), e = exponential2(log_p);
    if constexpr (kForward) return slope * (e - exponential2(log_q));
    if (e == 0) return 0.0f;
    if constexpr (kReverse)
      return slope * e * fmaf(static_cast<float>(kLn2), log_p - log_q, -D);
    else
      return slope * share * e * (over_mixture(log_q - log_p, beta) - D);
  };
  pairs.for_each(gradient_of, in.gradient.of(row));
}

}  // namespace

template <typename Gradient>
void divergence(const DivergenceRows<Gradient>& in, cudaStream_t stream) {
  if (in.num_rows == 0) return;
  check_alignment("the divergence", {in.policy.data, in.policy.of(1), in.teacher.data,
                                     in.teacher.of(1), in.gradient.data, in.gradient.of(1)});
  auto* kernel = in.divergence == TeacherDivergence::kReverse
                     ? divergence_of_rows<Gradient, TeacherDivergence::kReverse>
                 : in.divergence == TeacherDivergence::kForward
                     ? divergence_of_rows<Gradient, TeacherDivergence::kForward>
                     : divergence_of_rows<Gradient, TeacherDivergence::kJsd>;
  launch(kernel, in.num_rows, kThreads, 0, 0, stream, in);
}

const bool defined = define_kernel("divergence", divergence<float>, divergence<BFloat16>);

}  // namespace maxrl::cuda
