// `races PART` launches the CUDA kernels of one part, compiled for the CPU, so that ThreadSanitizer
// sees their memory accesses (test_races.py). Sizes are the smallest ones that reach every barrier.
// Results are compared elsewhere.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "decoding.h"
#include "group_advantage.h"
#include "layer.h"
#include "log_ratio.h"
#include "token_loss.h"

namespace maxrl::cuda {  // the kernels of csrc/cuda, which no header declares

template <typename Element, typename Gradient>
void token_loss(const TokenLossCall<Element, Gradient>& call, cudaStream_t stream);
template <typename Gradient>
void divergence(const DivergenceRows<Gradient>& in, cudaStream_t stream);
template <typename Element>
void token_logprobs(const TokenLogprobs<Element>& call, cudaStream_t stream);
template <typename Element, typename Gradient>
void token_logprobs_backward(const TokenLogprobsBackward<Element, Gradient>& call,
                             cudaStream_t stream);
template <typename Element>
void scale(const ScaleCall<Element>& call, cudaStream_t stream);
template <typename Element>
void decode_attention(const DecodeAttention<Element>& in, cudaStream_t stream);
void decode_sample(const DecodeSample& in, cudaStream_t stream);
template <typename Element>
void add_rms_norm(const AddRmsNorm<Element>& in, cudaStream_t stream);
template <typename Element>
void add_rms_norm_backward(const AddRmsNormBackward<Element>& in, cudaStream_t stream);
template <typename Element>
void rotate_heads(const RotateHeads<Element>& in, cudaStream_t stream);
template <typename Element>
void rotate_heads_backward(const RotateHeadsBackward<Element>& in, cudaStream_t stream);
template <typename Element>
void swiglu(const SwiGlu<Element>& in, cudaStream_t stream);
template <typename Element>
void swiglu_backward(const SwiGluBackward<Element>& in, cudaStream_t stream);
template <typename Real>
void group_advantage(const GroupAdvantage<Real>& in, cudaStream_t stream);
template <typename Real>
void log_ratio_reward(const LogRatio<Real>& in, cudaStream_t stream);

}  // namespace maxrl::cuda

namespace {

using namespace maxrl;

std::mt19937 generator(0);

double normal() {
  static std::normal_distribution<double> distribution;
  return distribution(generator);
}

// `size` normal numbers, at an address that is a multiple of 16 bytes plus `shift` elements.
template <typename Element>
struct Array {
  std::vector<unsigned char> memory;
  Element* data;

  explicit Array(int64_t size, int64_t shift = 0) : memory((size + shift) * sizeof(Element) + 16) {
    const uintptr_t aligned = (reinterpret_cast<uintptr_t>(memory.data()) + 15) / 16 * 16;
    data = reinterpret_cast<Element*>(aligned) + shift;
    for (int64_t i = 0; i < size; ++i) data[i] = from_double<Element>(2.0 * normal());
  }
};

std::vector<int64_t> integers(int64_t size, int64_t end) {
  std::vector<int64_t> values(size);
  for (int64_t& value : values) value = static_cast<int64_t>(generator() % end);
  return values;
}

struct Flags {  // std::vector<bool> has no array
  std::vector<char> values;
  explicit Flags(int64_t size, bool value = false) : values(size, value) {}
  bool* data() { return reinterpret_cast<bool*>(values.data()); }
};

Numbers numbers(const std::vector<double>& values) { return {values.data(), true, 0.0}; }

// Returns the sums and the gradient.
template <typename Element, typename Gradient = Element>
std::vector<double> token_loss(int64_t num_tokens, int64_t vocab_size, bool in_place, int64_t shift,
                               double entropy_coef = 0.05) {
  generator.seed(0);
  const int64_t stride = vocab_size + 3;
  constexpr int64_t kTimes = sizeof(Element) / sizeof(Gradient);
  Array<Element> logits(num_tokens * stride, shift), gradient(num_tokens * stride, shift);
  const std::vector<int64_t> targets = integers(num_tokens, vocab_size);
  const std::vector<double> old(num_tokens, -3.0), ref(num_tokens, -3.1);
  std::vector<double> advantages(num_tokens, 1.0);
  advantages.back() = -2.0;
  Flags mask(num_tokens, true);
  mask.values[0] = mask.values[num_tokens / 2] = false;
  const int64_t bounds[]{0, num_tokens};
  TokenLossInputs in{};
  in.tokens = {num_tokens, vocab_size,     num_tokens,           0,
               nullptr,    targets.data(), {nullptr, true, 0.7}, mask.data()};
  in.num_sequences = 1;
  in.cu_seqlens = bounds;
  in.advantages = numbers(advantages);
  in.advantages_by_token = true;
  in.old_logprobs = numbers(old);
  in.ref_logprobs = numbers(ref);
  in.importance_weights.constant = 1.0;
  in.denominator.constant = static_cast<double>(num_tokens);
  const LossTerms terms{Loss::kPpo, 0.2, 0.2, 3.0, Divergence::kK3, 0.1, entropy_coef};
  std::vector<double> workspace(workspace_size(LossSums::kSize));
  auto* to = reinterpret_cast<Gradient*>(in_place ? logits.data : gradient.data);
  cuda::token_loss(
      TokenLossCall<Element, Gradient>{
          {logits.data, stride}, in, terms, {to, kTimes * stride}, workspace.data(), nullptr},
      nullptr);
  std::vector<double> results(workspace.begin(), workspace.begin() + LossSums::kSize);
  for (int64_t row = 0; row < num_tokens; ++row)
    for (int64_t i = 0; i < vocab_size; ++i)
      results.push_back(to_double(to[row * kTimes * stride + i]));
  return results;
}

// Compares softmax_pipeline.cuh on clusters of at most `blocks` with softmax_rows.cuh.
template <typename Element, typename Gradient = Element>
void pipelined(const std::string& blocks, int64_t num_tokens, int64_t vocab_size, int64_t shift,
               double entropy_coef) {
  std::vector<double> results[2];
  for (const int i : {0, 1}) {
    setenv("MAXRL_EMULATED_CAPABILITY", (i ? "9/" + blocks : "10").c_str(), 1);
    results[i] = token_loss<Element, Gradient>(num_tokens, vocab_size, true, shift, entropy_coef);
  }
  for (size_t i = 0; i < results[0].size(); ++i) {
    const double a = results[0][i], b = results[1][i];
    const double most = i < LossSums::kSize ? 2e-6 : 0x1p-7;  // bfloat16 rounds by 2^-8
    if (std::abs(a - b) <= most * std::abs(a) + 1e-9) continue;
    std::fprintf(stderr, "the kernels differ: result %zu is %g and %g\n", i, a, b);
    std::exit(1);
  }
}

template <typename Gradient>
void divergence(int64_t vocab_size) {
  const int64_t num_rows = 2, stride = 4032;
  constexpr int64_t kTimes = sizeof(float) / sizeof(Gradient);
  const float temperature[num_rows]{0.7f, 1.0f};
  const double coefficients[num_rows]{0.5, 1.0};
  double values[num_rows];
  for (const auto kind :
       {TeacherDivergence::kReverse, TeacherDivergence::kForward, TeacherDivergence::kJsd}) {
    const Array<float> policy(num_rows * stride), teacher(num_rows * stride);
    DivergenceRows<Gradient> in{{policy.data, stride}, {teacher.data, stride}};
    in.gradient = {reinterpret_cast<Gradient*>(policy.data), kTimes * stride};
    in.num_rows = num_rows;
    in.vocab_size = vocab_size;
    in.temperature = temperature;
    in.coefficients = coefficients;
    in.values = values;
    in.divergence = kind;
    in.beta = 0.3;
    cuda::divergence(in, nullptr);
  }
}

void token_logprobs() {
  const int64_t num_tokens = 4, vocab_size = 5003;
  Array<float> logits(num_tokens * vocab_size);
  const std::vector<int64_t> targets = integers(num_tokens, vocab_size);
  std::vector<float> logprobs(num_tokens), entropy(num_tokens), grads{1.0f, 0.0f, 0.5f, -1.0f};
  const TokenRows rows{num_tokens, vocab_size,     num_tokens,           0,
                       nullptr,    targets.data(), {nullptr, true, 1.0}, nullptr};
  const Rows<const float> from{logits.data, vocab_size};
  const Rows<float> to{logits.data, vocab_size};
  cuda::token_logprobs(TokenLogprobs<float>{from, rows, logprobs.data(), entropy.data()}, nullptr);
  cuda::token_logprobs_backward(
      TokenLogprobsBackward<float>{from, rows, grads.data(), grads.data(), to}, nullptr);
  const double factor = 2.0;
  cuda::scale(ScaleCall<float>{to, num_tokens, vocab_size, &factor}, nullptr);
}

void decode_attention() {
  const int64_t rows = 5, limit = 40;
  const int heads = 8, kv_heads = 2, head_dim = 64;
  const int64_t queries = rows * heads * head_dim, keys = rows * kv_heads * head_dim;
  Array<BFloat16> q(queries), k(keys), v(keys), k_cache(keys * limit), v_cache(keys * limit),
      prompt(queries), out(queries);
  const std::vector<int64_t> lengths{1, 40, 17, 2, 33};
  const std::vector<float> prompt_lse(rows * heads, 1.0f);
  for (const int num_splits : {1, 3}) {
    std::vector<float> partial(rows * heads * num_splits * (head_dim + 2));
    DecodeAttention<BFloat16> in;
    in = {rows,
          limit,
          heads,
          kv_heads,
          head_dim,
          q.data,
          k.data,
          v.data,
          heads * head_dim,
          kv_heads * head_dim,
          kv_heads * head_dim,
          k_cache.data,
          v_cache.data,
          lengths.data(),
          prompt.data,
          prompt_lse.data(),
          heads,
          1,
          num_splits,
          partial.data(),
          out.data};
    cuda::decode_attention(in, nullptr);
  }
}

void decode_sample() {
  const int64_t rows = 4, limit = 9;
  const std::vector<int64_t> chosen{3, 0, 2, 1};
  for (const int64_t vocab_size : {32, 9001})
    for (const double temperature : {0.0, 0.7}) {
      const Array<float> logits(rows / 2 * vocab_size);
      const std::vector<int64_t> keys = integers(rows, 1 << 30);
      std::vector<int64_t> last(rows), length(rows, 2), tokens(rows * limit);
      std::vector<float> logprobs(rows * limit);
      Flags stops(vocab_size), done(rows);
      done.values[2] = true;
      cuda::decode_sample(DecodeSample{rows, vocab_size, limit, logits.data, 2, chosen.data(),
                                       temperature, keys.data(), stops.data(), last.data(),
                                       length.data(), done.data(), tokens.data(), logprobs.data()},
                          nullptr);
    }
}

// Rows of two warps for the sums; several rows for each partial sum.
void layer() {
  const int64_t rows = 5;
  const int size = 520;
  const Array<float> x(rows * size), delta(rows * size), weight(size), grad(rows * size);
  Array<float> sum(rows * size), out(rows * size), partials(3 * size);
  cuda::add_rms_norm(
      AddRmsNorm<float>{rows, size, 1e-6f, x.data, delta.data, weight.data, sum.data, out.data},
      nullptr);
  cuda::add_rms_norm_backward(
      AddRmsNormBackward<float>{rows, size, 1e-6f, sum.data, weight.data, grad.data, grad.data,
                                out.data, 3, partials.data},
      nullptr);
  const SwiGlu<float> halves{rows, size / 2, x.data, x.data + size / 2, size, size, out.data};
  cuda::swiglu(halves, nullptr);
  cuda::swiglu_backward(SwiGluBackward<float>{halves, grad.data, out.data, sum.data, size / 2},
                        nullptr);

  const int dim = 40, heads = 3, kv_heads = 1;  // a packed row has 5 heads
  const int64_t packed = 5 * dim, of_q = rows * heads * dim;
  const Array<float> qkv(rows * packed), table(rows * dim / 2), norm(dim), grad_q(of_q);
  Array<float> q(of_q), k(rows * dim), v(rows * dim), of_norms(2 * 4 * dim);
  const std::vector<int64_t> positions = integers(rows, rows);
  RotateHeads<float> rotation;
  rotation = {rows,
              dim,
              1e-6f,
              1.0f,
              {{qkv.data, packed, heads},
               {qkv.data + heads * dim, packed, kv_heads},
               {qkv.data + 4 * dim, packed, 1}},
              {norm.data, norm.data},
              {q.data, k.data, v.data},
              {of_q / rows, dim, dim},
              table.data,
              table.data,
              positions.data(),
              rows};
  cuda::rotate_heads(rotation, nullptr);
  rotation.from[2].count = 0;
  cuda::rotate_heads_backward(
      RotateHeadsBackward<float>{rotation, {grad_q.data, grad_q.data}, 2, of_norms.data}, nullptr);
}

void group_advantage() {
  for (const bool is_rank : {true, false})
    for (const int64_t size : {5, 40, 300}) {
      const int64_t num_groups = 3, total = num_groups * size;
      std::vector<float> rewards(total), advantages(total);
      for (float& reward : rewards) reward = static_cast<float>(generator() % 7);
      const Array<double> table(2 * size);
      GroupAdvantage<float> in{};
      in.num_groups = num_groups;
      in.group_size = size;
      in.rewards = rewards.data();
      in.tables = is_rank ? table.data : nullptr;
      in.centred = true;
      in.scale = Scale::kStd;
      in.ddof = 1;
      in.advantages = advantages.data();
      cuda::group_advantage(in, nullptr);
    }
}

void log_ratio() {
  const std::vector<int64_t> cu_seqlens{0, 300, 300, 700};
  const Array<float> logprobs(700), ref(700), grads(3);
  std::vector<float> sums(3), grad_logprobs(700);
  LogRatio<float> in{3,        cu_seqlens.data(), nullptr, 0.5,    logprobs.data,
                     ref.data, sums.data(),       nullptr, nullptr};
  cuda::log_ratio_reward(in, nullptr);
  in.grad_proxies = grads.data;
  in.gradient = grad_logprobs.data();
  cuda::log_ratio_reward(in, nullptr);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string part = argc == 2 ? argv[1] : "";
  if (part == "token_loss") {
    token_loss<float>(20, 300, false, 0);  // a warp for each row
    token_loss<BFloat16>(5, 5001, true, 1);  // a block
    token_loss<float, BFloat16>(20, 301, true, 0);
    setenv("MAXRL_EMULATED_CAPABILITY", "8", 1);
    token_loss<float, BFloat16>(4, 60001, true, 0);  // rows are read twice
  } else if (part == "token_loss_in_clusters") {
    setenv("MAXRL_EMULATED_CAPABILITY", "10", 1);
    token_loss<BFloat16>(5, 45001, true, 0);
  } else if (part == "token_loss_pipelined") {
    pipelined<BFloat16>("1", 11, 9001, 1, 0.05);
    pipelined<float, BFloat16>("2", 10, 20001, 0, 0.0);
  } else if (part == "divergence") {
    for (const int64_t vocab_size : {3, 4005}) {
      divergence<float>(vocab_size);
      divergence<BFloat16>(vocab_size);
    }
  } else if (part == "token_logprobs") {
    token_logprobs();
  } else if (part == "decode_attention") {
    decode_attention();
  } else if (part == "decode_sample") {
    decode_sample();
  } else if (part == "group_advantage") {
    group_advantage();
  } else if (part == "log_ratio") {
    log_ratio();
  } else if (part == "layer") {
    layer();
  } else {
    std::fprintf(stderr, "usage: races PART, got '%s'\n", part.c_str());
    return 2;
  }
}
