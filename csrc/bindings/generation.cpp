#include "../cpu/generation.h"

#include <algorithm>

#include "../cpu/packed_product.h"
#include "bindings.h"

namespace maxrl::bindings {

using cpu::Decoder;
using cpu::Generation;

std::string_view name_of(Arithmetic arithmetic) { return kArithmeticNames[static_cast<int>(arithmetic)]; }

// Refuses instructions that this machine does not have, which would end the process.
Arithmetic checked(Arithmetic chosen) {
  const auto& found = cpu::bfloat16_arithmetics();
  if (chosen != Arithmetic::kFloat32 && std::find(found.begin(), found.end(), chosen) == found.end())
    throw py::value_error("this machine cannot compute in '" + std::string(name_of(chosen)) + "'");
  return chosen;
}

void bind_generation(py::module_& m) {
  m.def("bfloat16_arithmetics", [] {
    std::vector<std::string_view> names;
    for (const Arithmetic found : cpu::bfloat16_arithmetics()) names.push_back(name_of(found));
    return names;
  });
  m.def("fastest_for_bfloat16", [] { return name_of(cpu::fastest_for_bfloat16()); });
  m.def("packed_product_cpu", [](const py::kwargs& given) {
    static Arguments::Names names;
    Arguments at("packed_product_cpu", given, names);
    Arithmetic arithmetic;
    std::int64_t m, n, k;
    const float *a, *b;
    float* c;
    at("arithmetic", arithmetic, kArithmeticNames), at("m", m), at("n", n), at("k", k), at("a", a), at("b", b), at("c", c);
    at.finish();
    cpu::packed_product(checked(arithmetic), m, n, k, a, b, c);
  });
  py::class_<Decoder>(m, "CpuDecoder")
      .def(py::init([](const py::kwargs& given) {
        static Arguments::Names names;
        Arguments at("CpuDecoder", given, names);
        DecoderSizes sizes;
        std::int64_t positions;
        const float *cos, *sin;
        sizes.fields(at);
        at("positions", positions), at("cos", cos), at("sin", sin);
        at.finish();
        checked(sizes.arithmetic);
        return std::make_unique<Decoder>(sizes, positions, cos, sin);
      }))
      .def("load",
           [](Decoder& decoder, const py::kwargs& given) {
             static Arguments::Names names;
             Arguments at("load", given, names);
             return run<DecoderWeights, int>(at, [&](auto& weights, int n) { decoder.load(weights, n); });
           })
      .def("cache_bytes",
           [](const Decoder& decoder, std::int64_t length) { return Generation::cache_bytes(decoder.sizes(), length); });
  py::class_<GenerationStatistics>(m, "GenerationStatistics")
      .def_readonly("prefill_seconds", &GenerationStatistics::prefill_seconds)
      .def_readonly("decode_seconds", &GenerationStatistics::decode_seconds)
      .def_readonly("steps", &GenerationStatistics::steps)
      .def_readonly("decoded_tokens", &GenerationStatistics::decoded_tokens)
      .def_readonly("prompt_tokens", &GenerationStatistics::prompt_tokens)
      .def_readonly("peak_cache_bytes", &GenerationStatistics::peak_cache_bytes);
  py::class_<Generation>(m, "CpuGeneration")
      .def(py::init([](const Decoder& decoder, const py::kwargs& given) {
             static Arguments::Names names;
             Arguments at("CpuGeneration", given, names);
             GenerationJob job;
             int num_threads;
             job.fields(at);
             at("num_threads", num_threads);
             at.finish();
             return std::make_unique<Generation>(decoder, job, num_threads);
           }),
           py::keep_alive<1, 2>())
      .def("run", &Generation::run, "seconds"_a, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("statistics", &Generation::statistics);
}

}  // namespace maxrl::bindings
