#include "bindings.h"

namespace maxrl::bindings {
namespace {

// The element type of logits, and the type of the numbers beside them.
template <typename Element_, typename Real_>
struct LogitTypes {
  using Element = Element_;
  using Real = Real_;
};

template <typename Use>
auto with_logit_types(std::string_view dtype, const Use& use) {
  if (dtype == "float32") return use(LogitTypes<float, float>{});
  if (dtype == "float64") return use(LogitTypes<double, double>{});
  if (dtype == "bfloat16") return use(LogitTypes<BFloat16, float>{});
  if (dtype == "float16") return use(LogitTypes<Float16, float>{});
  throw py::value_error("unknown dtype '" + std::string(dtype) + "'");
}

// A matrix as an address, before its element type is known.
struct Matrix {
  Address data;
  std::int64_t stride;
  template <typename Element>
  Rows<Element> rows() const {
    return {pointer<Element>(data), stride};
  }
};

// TokenRows and TokenLossInputs as addresses, before Real is known.
struct Tokens {
  std::int64_t num_tokens, vocab_size;
  Address targets, temperatures;
  double temperature;
  template <typename Real>
  TokenRows<Real> rows() const {
    return {num_tokens, vocab_size, pointer<const std::int64_t>(targets), pointer<const Real>(temperatures), temperature};
  }
};

struct Sequences {
  std::int64_t num_sequences;
  Address cu_seqlens, advantages;
  bool advantages_per_token;
  Address importance_weights;
  bool importance_per_token;
  Address old_logprobs, ref_logprobs, sequence_log_ratio, mask, sequence_tokens, denominator;
  template <typename Real>
  TokenLossInputs<Real> inputs(const Tokens& tokens) const {
    return {tokens.rows<Real>(),
            num_sequences,
            pointer<const std::int64_t>(cu_seqlens),
            pointer<const Real>(advantages),
            advantages_per_token,
            pointer<const Real>(importance_weights),
            importance_per_token,
            pointer<const Real>(old_logprobs),
            pointer<const Real>(ref_logprobs),
            pointer<const Real>(sequence_log_ratio),
            pointer<const bool>(mask),
            pointer<const std::int64_t>(sequence_tokens),
            pointer<const double>(denominator)};
  }
};

Loss loss_of(std::string_view name) {
  for (int i = 0; i < static_cast<int>(Loss::kCount); ++i)
    if (kLossNames[i] == name) return static_cast<Loss>(i);
  throw py::value_error("unknown loss '" + std::string(name) + "'");
}

LossTerms loss_terms(std::string_view loss, double clip_low, double clip_high, double dual_clip, std::string_view kl,
                     double kl_coef, double entropy_coef) {
  using namespace std::string_view_literals;
  return {loss_of(loss),
          clip_low,
          clip_high,
          dual_clip,
          choose<Divergence>(
              "kl", kl,
              {{"k1"sv, Divergence::kK1}, {"k2"sv, Divergence::kK2}, {"k3"sv, Divergence::kK3}, {"k3+"sv, Divergence::kK3Plus}}),
          kl_coef,
          entropy_coef};
}

}  // namespace

void bind_token_loss(py::module_& m) {
  py::class_<LossTerms>(m, "LossTerms")
      .def(py::init(&loss_terms), py::kw_only(), py::arg(LossTerms::kNames[0]), py::arg(LossTerms::kNames[1]),
           py::arg(LossTerms::kNames[2]), py::arg(LossTerms::kNames[3]), py::arg(LossTerms::kNames[4]),
           py::arg(LossTerms::kNames[5]), py::arg(LossTerms::kNames[6]));
  py::class_<Matrix>(m, "Matrix").def(py::init([](Address data, std::int64_t stride) { return Matrix{data, stride}; }));
  py::class_<Tokens>(m, "Tokens")
      .def(py::init([](std::int64_t num_tokens, std::int64_t vocab_size, Address targets, Address temperatures,
                       double temperature) { return Tokens{num_tokens, vocab_size, targets, temperatures, temperature}; }),
           py::kw_only(), "num_tokens"_a, "vocab_size"_a, "targets"_a, "temperatures"_a, "temperature"_a);
  py::class_<Sequences>(m, "Sequences")
      .def(py::init([](std::int64_t num_sequences, Address cu_seqlens, Address advantages, bool advantages_per_token,
                       Address importance_weights, bool importance_per_token, Address old_logprobs, Address ref_logprobs,
                       Address sequence_log_ratio, Address mask, Address sequence_tokens, Address denominator) {
             return Sequences{num_sequences,        cu_seqlens,   advantages,   advantages_per_token, importance_weights,
                              importance_per_token, old_logprobs, ref_logprobs, sequence_log_ratio,   mask,
                              sequence_tokens,      denominator};
           }),
           py::kw_only(), "num_sequences"_a, "cu_seqlens"_a, "advantages"_a, "advantages_per_token"_a, "importance_weights"_a,
           "importance_per_token"_a, "old_logprobs"_a, "ref_logprobs"_a, "sequence_log_ratio"_a, "mask"_a,
           "sequence_tokens"_a, "denominator"_a);
  export_fields(m, "Loss", kLossNames);
  export_fields(m, "LossTerms", LossTerms::kNames);
  export_fields(m, "LossSums", LossSums::kNames);
  m.attr("MAX_LOG_RATIO") = kMaxLogRatio;

  m.def(
      "token_loss_cpu",
      [](std::string_view dtype, const Matrix& logits, const Tokens& tokens, const Sequences& sequences, const LossTerms& terms,
         const Matrix& gradient, Address sums, int num_threads) {
        return with_logit_types(dtype, [&](auto types) {
          using Element = typename decltype(types)::Element;
          const py::gil_scoped_release release;
          return cpu::token_loss(logits.rows<const Element>(), sequences.inputs<typename decltype(types)::Real>(tokens), terms,
                                 gradient.rows<Element>(), pointer<double>(sums), num_threads);
        });
      },
      py::kw_only(), "dtype"_a, "logits"_a, "tokens"_a, "sequences"_a, "terms"_a, "gradient"_a, "sums"_a, "num_threads"_a);
  m.def(
      "token_logprobs_cpu",
      [](std::string_view dtype, const Matrix& logits, const Tokens& tokens, Address logprobs, Address entropy,
         int num_threads) {
        return with_logit_types(dtype, [&](auto types) {
          using Real = typename decltype(types)::Real;
          const py::gil_scoped_release release;
          return cpu::token_logprobs(logits.rows<const typename decltype(types)::Element>(), tokens.rows<Real>(),
                                     pointer<Real>(logprobs), pointer<Real>(entropy), num_threads);
        });
      },
      py::kw_only(), "dtype"_a, "logits"_a, "tokens"_a, "logprobs"_a, "entropy"_a, "num_threads"_a);
  m.def(
      "token_logprobs_backward_cpu",
      [](std::string_view dtype, const Matrix& logits, const Tokens& tokens, Address grad_logprobs, Address grad_entropy,
         const Matrix& gradient, int num_threads) {
        with_logit_types(dtype, [&](auto types) {
          using Element = typename decltype(types)::Element;
          using Real = typename decltype(types)::Real;
          const py::gil_scoped_release release;
          cpu::token_logprobs_backward(logits.rows<const Element>(), tokens.rows<Real>(), pointer<const Real>(grad_logprobs),
                                       pointer<const Real>(grad_entropy), gradient.rows<Element>(), num_threads);
        });
      },
      py::kw_only(), "dtype"_a, "logits"_a, "tokens"_a, "grad_logprobs"_a, "grad_entropy"_a, "gradient"_a, "num_threads"_a);
#ifdef MAXRL_FAST_CUDA
  m.attr("LOSS_WORKSPACE") = cuda::loss_workspace();
  m.def(
      "token_loss_cuda",
      [](std::string_view dtype, const Matrix& logits, const Tokens& tokens, const Sequences& sequences, const LossTerms& terms,
         const Matrix& gradient, Address sums, Address stream) {
        with_logit_types(dtype, [&](auto types) {
          using Element = typename decltype(types)::Element;
          cuda::token_loss(logits.rows<const Element>(), sequences.inputs<typename decltype(types)::Real>(tokens), terms,
                           gradient.rows<Element>(), pointer<double>(sums), reinterpret_cast<cudaStream_t>(stream));
        });
      },
      py::kw_only(), "dtype"_a, "logits"_a, "tokens"_a, "sequences"_a, "terms"_a, "gradient"_a, "sums"_a, "stream"_a);
  m.def(
      "token_logprobs_cuda",
      [](std::string_view dtype, const Matrix& logits, const Tokens& tokens, Address logprobs, Address entropy,
         Address stream) {
        with_logit_types(dtype, [&](auto types) {
          using Real = typename decltype(types)::Real;
          cuda::token_logprobs(logits.rows<const typename decltype(types)::Element>(), tokens.rows<Real>(),
                               pointer<Real>(logprobs), pointer<Real>(entropy), reinterpret_cast<cudaStream_t>(stream));
        });
      },
      py::kw_only(), "dtype"_a, "logits"_a, "tokens"_a, "logprobs"_a, "entropy"_a, "stream"_a);
  m.def(
      "token_logprobs_backward_cuda",
      [](std::string_view dtype, const Matrix& logits, const Tokens& tokens, Address grad_logprobs, Address grad_entropy,
         const Matrix& gradient, Address stream) {
        with_logit_types(dtype, [&](auto types) {
          using Element = typename decltype(types)::Element;
          using Real = typename decltype(types)::Real;
          cuda::token_logprobs_backward(logits.rows<const Element>(), tokens.rows<Real>(), pointer<const Real>(grad_logprobs),
                                        pointer<const Real>(grad_entropy), gradient.rows<Element>(),
                                        reinterpret_cast<cudaStream_t>(stream));
        });
      },
      py::kw_only(), "dtype"_a, "logits"_a, "tokens"_a, "grad_logprobs"_a, "grad_entropy"_a, "gradient"_a, "stream"_a);
  m.def(
      "scale_cuda",
      [](std::string_view dtype, const Matrix& matrix, std::int64_t num_rows, std::int64_t row_size, Address scale,
         Address stream) {
        with_logit_types(dtype, [&](auto types) {
          using Element = typename decltype(types)::Element;
          cuda::scale<Element, typename decltype(types)::Real>(
              matrix.rows<Element>(), num_rows, row_size, pointer<const double>(scale), reinterpret_cast<cudaStream_t>(stream));
        });
      },
      py::kw_only(), "dtype"_a, "matrix"_a, "num_rows"_a, "row_size"_a, "scale"_a, "stream"_a);
#endif
}

}  // namespace maxrl::bindings
