#include "../cpu/generation.h"

#include <algorithm>

#include "../cpu/packed_product.h"
#include "bindings.h"

namespace maxrl::bindings {

using cpu::Decoder;
using cpu::Generation;

constexpr std::pair<std::string_view, Arithmetic> kArithmetics[] = {
    {"float32", Arithmetic::kFloat32},
    {"bfloat16, plain C++", Arithmetic::kPlainBFloat16},
    {"bfloat16, AVX512-BF16", Arithmetic::kAvx512BFloat16},
    {"bfloat16, AMX", Arithmetic::kAmx},
};

std::string_view name_of(Arithmetic wanted) {
  return std::find_if(std::begin(kArithmetics), std::end(kArithmetics), [&](auto& one) { return one.second == wanted; })->first;
}

// Refuses instructions that this machine does not have, which would end the process.
Arithmetic arithmetic_of(std::string_view name) {
  const Arithmetic chosen = choose("arithmetic", name, kArithmetics);
  const auto& found = cpu::bfloat16_arithmetics();
  if (chosen != Arithmetic::kFloat32 && std::find(found.begin(), found.end(), chosen) == found.end())
    throw py::value_error("this machine cannot compute in '" + std::string(name) + "'");
  return chosen;
}

void bind_generation(py::module_& m) {
  py::class_<LayerWeights>(m, "LayerWeights")
      .def(py::init([](Address input_norm, Address q, Address k, Address v, Address q_bias, Address k_bias, Address v_bias,
                       Address q_norm, Address k_norm, Address o, Address post_norm, Address gate, Address up, Address down) {
             const auto at = pointer<const float>;
             return LayerWeights{at(input_norm), at(q),      at(k), at(v),         at(q_bias), at(k_bias), at(v_bias),
                                 at(q_norm),     at(k_norm), at(o), at(post_norm), at(gate),   at(up),     at(down)};
           }),
           py::kw_only(), "input_norm"_a, "q"_a, "k"_a, "v"_a, "q_bias"_a, "k_bias"_a, "v_bias"_a, "q_norm"_a, "k_norm"_a,
           "o"_a, "post_norm"_a, "gate"_a, "up"_a, "down"_a);
  m.def("bfloat16_arithmetics", [] {
    std::vector<std::string_view> names;
    for (const Arithmetic found : cpu::bfloat16_arithmetics()) names.push_back(name_of(found));
    return names;
  });
  m.def("fastest_for_bfloat16", [] { return name_of(cpu::fastest_for_bfloat16()); });
  m.def(
      "packed_product_cpu",
      [](std::string_view arithmetic, std::int64_t m, std::int64_t n, std::int64_t k, Address a, Address b, Address c) {
        cpu::packed_product(arithmetic_of(arithmetic), m, n, k, pointer<const float>(a), pointer<const float>(b),
                            pointer<float>(c));
      },
      py::kw_only(), "arithmetic"_a, "m"_a, "n"_a, "k"_a, "a"_a, "b"_a, "c"_a);
  py::class_<Decoder>(m, "CpuDecoder")
      .def(py::init([](std::int64_t layers, std::int64_t hidden, std::int64_t intermediate, std::int64_t heads,
                       std::int64_t kv_heads, std::int64_t head_dim, std::int64_t vocab, double norm_eps,
                       std::string_view arithmetic, std::int64_t positions, Address cos, Address sin) {
             return std::make_unique<Decoder>(DecoderSizes{layers, hidden, intermediate, heads, kv_heads, head_dim, vocab,
                                                           norm_eps, arithmetic_of(arithmetic)},
                                              positions, pointer<const float>(cos), pointer<const float>(sin));
           }),
           py::kw_only(), "layers"_a, "hidden"_a, "intermediate"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "vocab"_a,
           "norm_eps"_a, "arithmetic"_a, "positions"_a, "cos"_a, "sin"_a)
      .def(
          "load",
          [](Decoder& decoder, Address embedding, Address norm, Address head, const std::vector<LayerWeights>& layers,
             int num_threads) {
            decoder.load({pointer<const float>(embedding), pointer<const float>(norm), pointer<const float>(head), layers},
                         num_threads);
          },
          py::kw_only(), "embedding"_a, "norm"_a, "head"_a, "layers"_a, "num_threads"_a)
      .def("cache_bytes",
           [](const Decoder& decoder, std::int64_t length) { return Generation::cache_bytes(decoder.sizes(), length); });
  py::class_<SamplingOptions>(m, "SamplingOptions")
      .def(py::init([](double temperature, std::int64_t top_k, double top_p, double min_p, std::vector<std::int64_t> stop_ids) {
             return SamplingOptions{temperature, top_k, top_p, min_p, std::move(stop_ids)};
           }),
           py::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "stop_ids"_a);
  py::class_<GenerationStatistics>(m, "GenerationStatistics")
      .def_readonly("prefill_seconds", &GenerationStatistics::prefill_seconds)
      .def_readonly("decode_seconds", &GenerationStatistics::decode_seconds)
      .def_readonly("steps", &GenerationStatistics::steps)
      .def_readonly("decoded_tokens", &GenerationStatistics::decoded_tokens)
      .def_readonly("prompt_tokens", &GenerationStatistics::prompt_tokens)
      .def_readonly("peak_cache_bytes", &GenerationStatistics::peak_cache_bytes);
  py::class_<Generation>(m, "CpuGeneration")
      .def(
          py::init([](const Decoder& decoder, std::int64_t num_prompts, std::int64_t num_samples, std::int64_t max_new_tokens,
                      std::int64_t num_slots, Address tokens, Address cu_seqlens, Address keys, const SamplingOptions& sampling,
                      Address responses, Address logprobs, Address lengths, Address truncated, int num_threads) {
            return std::make_unique<Generation>(
                decoder,
                GenerationJob{num_prompts, num_samples, max_new_tokens, num_slots, pointer<const std::int64_t>(tokens),
                              pointer<const std::int64_t>(cu_seqlens), pointer<const std::int64_t>(keys), sampling,
                              pointer<std::int64_t>(responses), pointer<float>(logprobs), pointer<std::int64_t>(lengths),
                              pointer<bool>(truncated)},
                num_threads);
          }),
          py::keep_alive<1, 2>(), py::kw_only(), "decoder"_a, "num_prompts"_a, "num_samples"_a, "max_new_tokens"_a,
          "num_slots"_a, "tokens"_a, "cu_seqlens"_a, "keys"_a, "sampling"_a, "responses"_a, "logprobs"_a, "lengths"_a,
          "truncated"_a, "num_threads"_a)
      .def("run", &Generation::run, "seconds"_a, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("statistics", &Generation::statistics);
}

}  // namespace maxrl::bindings
