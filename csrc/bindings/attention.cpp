#include "bindings.h"

namespace maxrl::bindings {
namespace {

// SharedPromptAttention as addresses, before its element type is known.
struct AttentionArguments {
  SharedPromptStream stream;
  std::int64_t heads, key_heads, head_dim;
  Address q, k, v, o, lse, grad, grad_q, grad_k, grad_v;

  template <typename Element, typename Real>
  SharedPromptAttention<Element, Real> typed() const {
    return {stream,
            heads,
            key_heads,
            head_dim,
            pointer<const Element>(q),
            pointer<const Element>(k),
            pointer<const Element>(v),
            pointer<Element>(o),
            pointer<Real>(lse),
            pointer<const Element>(grad),
            pointer<Element>(grad_q),
            pointer<Element>(grad_k),
            pointer<Element>(grad_v)};
  }
};

template <typename Use>
void with_attention(std::string_view dtype, const AttentionArguments& given, const Use& use) {
  if (given.head_dim < 1 || given.head_dim > 256 || given.key_heads < 1 || given.heads % given.key_heads)
    throw py::value_error("attention needs heads of 1 to 256, and a number of them that is a multiple of the key heads");
  const py::gil_scoped_release release;
  if (dtype == "float32") return use(given.typed<float, float>());
  if (dtype == "float64") return use(given.typed<double, double>());
  if (dtype == "bfloat16") return use(given.typed<BFloat16, float>());
  throw std::invalid_argument("unknown dtype '" + std::string(dtype) + "'");
}

}  // namespace

void bind_attention(py::module_& m) {
  py::class_<SharedPromptStream>(m, "SharedPromptStream")
      .def(py::init([](std::int64_t num_tokens, std::int64_t num_sequences, std::int64_t num_responses, Address lengths,
                       Address response_lengths, Address answers) {
             return SharedPromptStream{num_tokens,
                                       num_sequences,
                                       num_responses,
                                       pointer<const std::int64_t>(lengths),
                                       pointer<const std::int64_t>(response_lengths),
                                       pointer<const std::int64_t>(answers)};
           }),
           py::kw_only(), "num_tokens"_a, "num_sequences"_a, "num_responses"_a, "lengths"_a, "response_lengths"_a, "answers"_a);
  m.def(
      "shared_prompt_attention_cpu",
      [](std::string_view dtype, const SharedPromptStream& stream, std::int64_t heads, std::int64_t key_heads,
         std::int64_t head_dim, Address q, Address k, Address v, Address o, Address lse, int num_threads) {
        with_attention(dtype, {stream, heads, key_heads, head_dim, q, k, v, o, lse, 0, 0, 0, 0},
                       [&](const auto& in) { cpu::shared_prompt_attention(in, num_threads); });
      },
      py::kw_only(), "dtype"_a, "stream"_a, "heads"_a, "key_heads"_a, "head_dim"_a, "q"_a, "k"_a, "v"_a, "o"_a, "lse"_a,
      "num_threads"_a);
  m.def(
      "shared_prompt_attention_backward_cpu",
      [](std::string_view dtype, const SharedPromptStream& stream, std::int64_t heads, std::int64_t key_heads,
         std::int64_t head_dim, Address q, Address k, Address v, Address o, Address lse, Address grad, Address grad_q,
         Address grad_k, Address grad_v, int num_threads) {
        with_attention(dtype, {stream, heads, key_heads, head_dim, q, k, v, o, lse, grad, grad_q, grad_k, grad_v},
                       [&](const auto& in) { cpu::shared_prompt_attention_backward(in, num_threads); });
      },
      py::kw_only(), "dtype"_a, "stream"_a, "heads"_a, "key_heads"_a, "head_dim"_a, "q"_a, "k"_a, "v"_a, "o"_a, "lse"_a,
      "grad"_a, "grad_q"_a, "grad_k"_a, "grad_v"_a, "num_threads"_a);
}

}  // namespace maxrl::bindings
