#include "../cpu/generation.h"

#include "keywords.h"

namespace maxrl::bindings {

using cpu::Decoder;
using cpu::Generation;
using py::literals::operator""_a;

std::string_view name_of(Arithmetic arithmetic) {
  return kNamesOf<Arithmetic>[static_cast<int>(arithmetic)];
}

// The record whose fields are the arguments of a function.
template <typename Record>
Record record_of(const char* function, const py::kwargs& given) {
  Keywords::Names names;
  Keywords at(function, given, names);
  Record record{};
  record.fields(at);
  at.finish();
  return record;
}

void bind_generation(py::module_& m) {
  m.def("bfloat16_arithmetics", [] {
    std::vector<std::string_view> names;
    for (const Arithmetic found : cpu::bfloat16_arithmetics()) names.push_back(name_of(found));
    return names;
  });
  m.def("fastest_for_bfloat16", [] { return name_of(cpu::fastest_for_bfloat16()); });
  py::class_<Decoder>(m, "CpuDecoder")
      .def(py::init([](const py::kwargs& given) {
        return std::make_unique<Decoder>(record_of<DecoderOptions>("CpuDecoder", given));
      }))
      .def("load",
           [](Decoder& decoder, const py::kwargs& given) {
             const auto weights = record_of<DecoderWeights>("load", given);
             const py::gil_scoped_release release;
             decoder.load(weights);
           })
      .def("forget", &Decoder::forget)
      .def_readonly("kept_bytes", &Decoder::kept_bytes)
      .def("cache_bytes", [](const Decoder& decoder, int64_t length) {
        return cpu::KeyValueCache::bytes(decoder.sizes(), length);
      });
  py::class_<Generation>(m, "CpuGeneration")
      .def(py::init([](Decoder& decoder, const py::kwargs& given) {
             return std::make_unique<Generation>(decoder,
                                                 record_of<GenerationJob>("CpuGeneration", given));
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
