#include "bindings.h"

void maxrl::bindings::bind_decoding([[maybe_unused]] py::module_& m) {
#ifdef MAXRL_FAST_CUDA
  constexpr Dtypes<Types<float>, Types<BFloat16>, Types<Float16>> dtypes;
  using Stream = cudaStream_t;
  define<DecodeAttention, Stream>(m, "decode_attention_cuda", dtypes,
                                  [](auto& in, Stream s) { cuda::decode_attention(in, s); });
  define<DecodeSample, Stream>(m, "decode_sample_cuda", dtypes, [](auto& in, Stream s) { cuda::decode_sample(in, s); });
#endif
}
