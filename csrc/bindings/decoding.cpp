#include "bindings.h"

namespace maxrl::bindings {

void bind_decoding([[maybe_unused]] py::module_& m) {
#ifdef MAXRL_FAST_CUDA
  m.def(
      "decode_attention_cuda",
      [](std::string_view dtype, std::int64_t num_rows, std::int64_t limit, int heads, int kv_heads, int head_dim, Address q,
         Address k, Address v, std::int64_t q_stride, std::int64_t k_stride, std::int64_t v_stride, Address k_cache,
         Address v_cache, Address lengths, Address prompt_out, Address prompt_lse, std::int64_t lse_row_stride,
         std::int64_t lse_head_stride, int num_splits, Address partial, Address out, Address stream) {
        check_alignment("decode_attention", {q, k, v, k_cache, v_cache, prompt_out, out});
        const auto run = [&](auto element) {
          using Element = decltype(element);
          const DecodeAttention<Element> in{num_rows,
                                            limit,
                                            heads,
                                            kv_heads,
                                            head_dim,
                                            pointer<const Element>(q),
                                            pointer<const Element>(k),
                                            pointer<const Element>(v),
                                            q_stride,
                                            k_stride,
                                            v_stride,
                                            pointer<Element>(k_cache),
                                            pointer<Element>(v_cache),
                                            pointer<const std::int64_t>(lengths),
                                            pointer<const Element>(prompt_out),
                                            pointer<const float>(prompt_lse),
                                            lse_row_stride,
                                            lse_head_stride,
                                            num_splits,
                                            pointer<float>(partial),
                                            pointer<Element>(out)};
          cuda::decode_attention(in, reinterpret_cast<cudaStream_t>(stream));
        };
        with_element(dtype, run);
      },
      py::kw_only(), "dtype"_a, "num_rows"_a, "limit"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "q"_a, "k"_a, "v"_a,
      "q_stride"_a, "k_stride"_a, "v_stride"_a, "k_cache"_a, "v_cache"_a, "lengths"_a, "prompt_out"_a, "prompt_lse"_a,
      "lse_row_stride"_a, "lse_head_stride"_a, "num_splits"_a, "partial"_a, "out"_a, "stream"_a);
  m.def(
      "decode_sample_cuda",
      [](std::string_view dtype, std::int64_t num_rows, std::int64_t vocab_size, std::int64_t limit, Address logits,
         std::int64_t samples_per_logits, Address rows, double temperature, Address keys, Address stops, Address last,
         Address length, Address done, Address tokens, Address logprobs, Address stream) {
        const auto run = [&](auto element) {
          using Element = decltype(element);
          const DecodeSample<Element> in{num_rows,
                                         vocab_size,
                                         limit,
                                         pointer<const Element>(logits),
                                         samples_per_logits,
                                         pointer<const std::int64_t>(rows),
                                         temperature,
                                         pointer<const std::int64_t>(keys),
                                         pointer<const bool>(stops),
                                         pointer<std::int64_t>(last),
                                         pointer<std::int64_t>(length),
                                         pointer<bool>(done),
                                         pointer<std::int64_t>(tokens),
                                         pointer<float>(logprobs)};
          cuda::decode_sample(in, reinterpret_cast<cudaStream_t>(stream));
        };
        with_element(dtype, run);
      },
      py::kw_only(), "dtype"_a, "num_rows"_a, "vocab_size"_a, "limit"_a, "logits"_a, "samples_per_logits"_a, "rows"_a,
      "temperature"_a, "keys"_a, "stops"_a, "last"_a, "length"_a, "done"_a, "tokens"_a, "logprobs"_a, "stream"_a);
#endif
}

}  // namespace maxrl::bindings
