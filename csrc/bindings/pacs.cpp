#include "bindings.h"

namespace maxrl::bindings {
namespace {

PacsOptions pacs_options(std::string_view score, bool balanced) {
  using namespace std::string_view_literals;
  return {choose<Score>(
              "score", score,
              {{"rloo"sv, Score::kRloo}, {"grpo"sv, Score::kGrpo}, {"dr_grpo"sv, Score::kDrGrpo}, {"naive"sv, Score::kNaive}}),
          balanced};
}

// Pacs and LogRatio as addresses, before Real is known.
struct PacsArguments {
  std::int64_t num_rollouts, num_groups, group_size;
  Address offsets, proxies, labels, denominators;
  double denominator;
  PacsOptions options;
  Address loss, metrics, cross_entropy, gradient;
  template <typename Real>
  Pacs<Real> typed() const {
    return {num_rollouts,
            num_groups,
            group_size,
            pointer<const std::int64_t>(offsets),
            pointer<const Real>(proxies),
            pointer<const Real>(labels),
            pointer<const double>(denominators),
            denominator,
            options,
            pointer<Real>(loss),
            pointer<double>(metrics),
            pointer<Real>(cross_entropy),
            pointer<Real>(gradient)};
  }
};

struct LogRatioArguments {
  std::int64_t num_tokens, num_sequences;
  Address cu_seqlens, mask;
  double beta;
  template <typename Real>
  LogRatio<Real> typed() const {
    return {num_tokens, num_sequences, pointer<const std::int64_t>(cu_seqlens), pointer<const bool>(mask), beta};
  }
};

template <typename Use>
auto with_real(std::string_view dtype, const Use& use) {
  if (dtype == "float32") return use(float{});
  if (dtype == "float64") return use(double{});
  throw py::value_error("unknown dtype '" + std::string(dtype) + "'");
}

}  // namespace

void bind_pacs(py::module_& m) {
  export_fields(m, "PacsMetrics", PacsMetrics::kNames);
  py::class_<PacsArguments>(m, "Pacs").def(
      py::init([](std::int64_t num_rollouts, std::int64_t num_groups, std::int64_t group_size, Address offsets, Address proxies,
                  Address labels, Address denominators, double denominator, std::string_view score, bool balanced, Address loss,
                  Address metrics, Address cross_entropy, Address gradient) {
        return PacsArguments{num_rollouts, num_groups,  group_size,
                             offsets,      proxies,     labels,
                             denominators, denominator, pacs_options(score, balanced),
                             loss,         metrics,     cross_entropy,
                             gradient};
      }),
      py::kw_only(), "num_rollouts"_a, "num_groups"_a, "group_size"_a, "offsets"_a, "proxies"_a, "labels"_a, "denominators"_a,
      "denominator"_a, "score"_a, "balanced"_a, "loss"_a, "metrics"_a, "cross_entropy"_a, "gradient"_a);
  py::class_<LogRatioArguments>(m, "LogRatio")
      .def(py::init([](std::int64_t num_tokens, std::int64_t num_sequences, Address cu_seqlens, Address mask, double beta) {
             return LogRatioArguments{num_tokens, num_sequences, cu_seqlens, mask, beta};
           }),
           py::kw_only(), "num_tokens"_a, "num_sequences"_a, "cu_seqlens"_a, "mask"_a, "beta"_a);

  m.def(
      "pacs_loss_cpu",
      [](std::string_view dtype, const PacsArguments& pacs, int num_threads) {
        return with_real(dtype, [&](auto real) {
          const py::gil_scoped_release release;
          return cpu::pacs_loss(pacs.typed<decltype(real)>(), num_threads);
        });
      },
      py::kw_only(), "dtype"_a, "pacs"_a, "num_threads"_a);
  m.def(
      "log_ratio_reward_cpu",
      [](std::string_view dtype, const LogRatioArguments& sequences, Address logprobs, Address ref_logprobs, Address proxies,
         int num_threads) {
        with_real(dtype, [&](auto real) {
          using Real = decltype(real);
          const py::gil_scoped_release release;
          cpu::log_ratio_reward(sequences.typed<Real>(), pointer<const Real>(logprobs), pointer<const Real>(ref_logprobs),
                                pointer<Real>(proxies), num_threads);
        });
      },
      py::kw_only(), "dtype"_a, "sequences"_a, "logprobs"_a, "ref_logprobs"_a, "proxies"_a, "num_threads"_a);
  m.def(
      "log_ratio_reward_backward_cpu",
      [](std::string_view dtype, const LogRatioArguments& sequences, Address grad_proxies, Address gradient, int num_threads) {
        with_real(dtype, [&](auto real) {
          using Real = decltype(real);
          const py::gil_scoped_release release;
          cpu::log_ratio_reward_backward(sequences.typed<Real>(), pointer<const Real>(grad_proxies), pointer<Real>(gradient),
                                         num_threads);
        });
      },
      py::kw_only(), "dtype"_a, "sequences"_a, "grad_proxies"_a, "gradient"_a, "num_threads"_a);

#ifdef MAXRL_FAST_CUDA
  m.attr("PACS_WORKSPACE") = cuda::pacs_workspace();
  m.def(
      "pacs_loss_cuda",
      [](std::string_view dtype, const PacsArguments& pacs, Address workspace, Address stream) {
        with_real(dtype, [&](auto real) {
          cuda::pacs_loss(pacs.typed<decltype(real)>(), pointer<double>(workspace), reinterpret_cast<cudaStream_t>(stream));
        });
      },
      py::kw_only(), "dtype"_a, "pacs"_a, "workspace"_a, "stream"_a);
  m.def(
      "log_ratio_reward_cuda",
      [](std::string_view dtype, const LogRatioArguments& sequences, Address logprobs, Address ref_logprobs, Address proxies,
         Address stream) {
        with_real(dtype, [&](auto real) {
          using Real = decltype(real);
          cuda::log_ratio_reward(sequences.typed<Real>(), pointer<const Real>(logprobs), pointer<const Real>(ref_logprobs),
                                 pointer<Real>(proxies), reinterpret_cast<cudaStream_t>(stream));
        });
      },
      py::kw_only(), "dtype"_a, "sequences"_a, "logprobs"_a, "ref_logprobs"_a, "proxies"_a, "stream"_a);
  m.def(
      "log_ratio_reward_backward_cuda",
      [](std::string_view dtype, const LogRatioArguments& sequences, Address grad_proxies, Address gradient, Address stream) {
        with_real(dtype, [&](auto real) {
          using Real = decltype(real);
          cuda::log_ratio_reward_backward(sequences.typed<Real>(), pointer<const Real>(grad_proxies), pointer<Real>(gradient),
                                          reinterpret_cast<cudaStream_t>(stream));
        });
      },
      py::kw_only(), "dtype"_a, "sequences"_a, "grad_proxies"_a, "gradient"_a, "stream"_a);
#endif
}

}  // namespace maxrl::bindings
