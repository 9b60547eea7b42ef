#include "../cpu/generation.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace maxrl::bindings {

namespace py = pybind11;
using cpu::Decoder;
using cpu::Generation;
using py::literals::operator""_a;

std::string_view name_of(Arithmetic arithmetic) {
  return kNamesOf<Arithmetic>[static_cast<int>(arithmetic)];
}

void bind_generation(py::module_& m) {
  m.def("bfloat16_arithmetics", [] {
    std::vector<std::string_view> names;
    for (const Arithmetic found : cpu::bfloat16_arithmetics()) names.push_back(name_of(found));
    return names;
  });
  m.def("fastest_for_bfloat16", [] { return name_of(cpu::fastest_for_bfloat16()); });
  py::class_<Decoder>(m, "CpuDecoder")
      .def(py::init([](std::string_view options) {
        return std::make_unique<Decoder>(unpacked<DecoderOptions>(options));
      }))
      .def("load",
           [](Decoder& decoder, std::string_view packed,
              const std::vector<std::string_view>& layers) {
             auto weights = unpacked<DecoderWeights>(packed);
             for (const std::string_view layer : layers)
               weights.layers.push_back(unpacked<LayerWeights>(layer));
             const py::gil_scoped_release release;
             decoder.load(weights);
           })
      .def("forget", &Decoder::forget)
      .def_readonly("kept_bytes", &Decoder::kept_bytes)
      .def("cache_bytes", [](const Decoder& decoder, int64_t length) {
        return cpu::KeyValueCache::bytes(decoder.sizes(), length);
      });
  py::class_<Generation>(m, "CpuGeneration")
      .def(py::init([](Decoder& decoder, std::string_view packed, std::vector<int64_t> stop_ids) {
             auto job = unpacked<GenerationJob>(packed);
             job.sampling.stop_ids = std::move(stop_ids);
             return std::make_unique<Generation>(decoder, job);
           }),
           py::keep_alive<1, 2>())
      .def("run", &Generation::run, "seconds"_a, py::call_guard<py::gil_scoped_release>())
      .def("take_turns", &Generation::take_turns)
      .def_property_readonly("all_wait", &Generation::all_wait)
      .def("feed", &Generation::feed, "sample"_a, "tokens"_a)
      .def_property_readonly("statistics", [](const Generation& generation) {
        py::dict statistics;
        const auto add = [&](std::string_view name, const auto& value) {
          statistics[py::str(name.data(), name.size())] = value;
        };
        GenerationStatistics(generation.statistics()).fields(add);
        return statistics;
      });
}

}  // namespace maxrl::bindings
