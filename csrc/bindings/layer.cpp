#include "bindings.h"

namespace maxrl::bindings {

namespace {

// The heads of RotateHeads: address, row stride and number.
using HeadsArgument = std::tuple<Address, std::int64_t, int>;

template <typename Element>
Heads<Element> heads_of(const HeadsArgument& given) {
  const auto [data, stride, count] = given;
  return {pointer<const Element>(data), stride, count};
}

// cos, sin, positions and the number of rows of the tables.
using TablesArgument = std::tuple<Address, Address, Address, std::int64_t>;

template <typename Element, typename Real>
RotateHeads<Element, Real> rotate_heads_of(std::int64_t num_rows, int head_dim, double eps, double direction,
                                           const HeadsArgument& q, const HeadsArgument& k, const HeadsArgument& v,
                                           Address q_norm, Address k_norm, const std::array<Address, 3>& to,
                                           const TablesArgument& tables) {
  const auto [cos, sin, positions, num_positions] = tables;
  return {num_rows,
          head_dim,
          static_cast<Real>(eps),
          static_cast<Real>(direction),
          {heads_of<Element>(q), heads_of<Element>(k), heads_of<Element>(v)},
          {pointer<const Element>(q_norm), pointer<const Element>(k_norm)},
          {pointer<Element>(to[0]), pointer<Element>(to[1]), pointer<Element>(to[2])},
          pointer<const float>(cos),
          pointer<const float>(sin),
          pointer<const std::int64_t>(positions),
          num_positions};
}

template <typename Element>
SwiGlu<Element> swiglu_of(std::int64_t num_rows, int size, Address gate, Address up, std::int64_t gate_stride,
                          std::int64_t up_stride, Address out) {
  return {num_rows,    size,      pointer<const Element>(gate), pointer<const Element>(up),
          gate_stride, up_stride, pointer<Element>(out)};
}

// Calls `run` with an element of this dtype and a number of the type of its sums.
template <typename Run>
void with_numbers(std::string_view dtype, const Run& run) {
  const py::gil_scoped_release release;
  if (dtype == "float32") return run(float{}, float{});
  if (dtype == "float64") return run(double{}, double{});
  if (dtype == "bfloat16") return run(BFloat16{}, float{});
  throw std::invalid_argument("a layer's kernels on a CPU take float32, float64 and bfloat16, got " + std::string(dtype));
}

// Strides of RotateHeads's results, where 0 stands for contiguous ones.
using Strides = std::array<std::int64_t, 3>;

struct ResultStrides {
  std::int64_t values[3];
};
template <typename Element, typename Real>
ResultStrides strides_of(const RotateHeads<Element, Real>& in, const Strides& given) {
  ResultStrides strides;
  for (int i = 0; i < 3; ++i) strides.values[i] = given[i] ? given[i] : std::int64_t{in.from[i].count} * in.head_dim;
  return strides;
}

void bind_norms_on_cpu(py::module_& m) {
  m.def(
      "add_rms_norm_cpu",
      [](std::string_view dtype, std::int64_t num_rows, int size, double eps, Address x, Address delta, Address weight,
         Address sum, Address normed, int num_threads) {
        with_numbers(dtype, [&](auto element, auto number) {
          using Element = decltype(element);
          using Real = decltype(number);
          cpu::add_rms_norm(AddRmsNorm<Element, Real>{num_rows, size, static_cast<Real>(eps), pointer<const Element>(x),
                                                      pointer<const Element>(delta), pointer<const Element>(weight),
                                                      pointer<Element>(sum), pointer<Element>(normed)},
                            num_threads);
        });
      },
      py::kw_only(), "dtype"_a, "num_rows"_a, "size"_a, "eps"_a, "x"_a, "delta"_a, "weight"_a, "sum"_a, "normed"_a,
      "num_threads"_a);
  m.def(
      "add_rms_norm_backward_cpu",
      [](std::string_view dtype, std::int64_t num_rows, int size, double eps, Address sum, Address weight, Address grad_sum,
         Address grad_normed, Address grad_x, std::int64_t num_partials, Address grad_weight, int num_threads) {
        with_numbers(dtype, [&](auto element, auto number) {
          using Element = decltype(element);
          using Real = decltype(number);
          cpu::add_rms_norm_backward(
              AddRmsNormBackward<Element, Real>{num_rows, size, static_cast<Real>(eps), pointer<const Element>(sum),
                                                pointer<const Element>(weight), pointer<const Element>(grad_sum),
                                                pointer<const Element>(grad_normed), pointer<Element>(grad_x), num_partials,
                                                pointer<Real>(grad_weight)},
              num_threads);
        });
      },
      py::kw_only(), "dtype"_a, "num_rows"_a, "size"_a, "eps"_a, "sum"_a, "weight"_a, "grad_sum"_a, "grad_normed"_a, "grad_x"_a,
      "num_partials"_a, "grad_weight"_a, "num_threads"_a);
  m.def(
      "chosen_rows_backward_cpu",
      [](std::string_view dtype, std::int64_t num_rows, std::int64_t num_chosen, int size, Address rows, Address grad,
         Address to, int num_threads) {
        with_numbers(dtype, [&](auto element, auto number) {
          using Element = decltype(element);
          cpu::chosen_rows_backward<Element, decltype(number)>({num_rows, num_chosen, size, pointer<const std::int64_t>(rows),
                                                                pointer<const Element>(grad), pointer<Element>(to)},
                                                               num_threads);
        });
      },
      py::kw_only(), "dtype"_a, "num_rows"_a, "num_chosen"_a, "size"_a, "rows"_a, "grad"_a, "to"_a, "num_threads"_a);
}

void bind_heads_on_cpu(py::module_& m) {
  m.def(
      "rotate_heads_cpu",
      [](std::string_view dtype, std::int64_t num_rows, int head_dim, double eps, double direction, const HeadsArgument& q,
         const HeadsArgument& k, const HeadsArgument& v, Address q_norm, Address k_norm, const std::array<Address, 3>& to,
         const TablesArgument& tables, const Strides& to_strides, int num_threads) {
        with_numbers(dtype, [&](auto element, auto number) {
          const auto in = rotate_heads_of<decltype(element), decltype(number)>(num_rows, head_dim, eps, direction, q, k, v,
                                                                               q_norm, k_norm, to, tables);
          cpu::rotate_heads(in, strides_of(in, to_strides).values, num_threads);
        });
      },
      py::kw_only(), "dtype"_a, "num_rows"_a, "head_dim"_a, "eps"_a, "direction"_a, "q"_a, "k"_a, "v"_a, "q_norm"_a, "k_norm"_a,
      "to"_a, "tables"_a, "to_strides"_a = Strides{}, "num_threads"_a);
  m.def(
      "rotate_heads_backward_cpu",
      [](std::string_view dtype, std::int64_t num_rows, int head_dim, double eps, const HeadsArgument& q,
         const HeadsArgument& k, const HeadsArgument& v, Address q_norm, Address k_norm, const std::array<Address, 3>& to,
         const std::array<Address, 2>& grad, const TablesArgument& tables, std::int64_t num_partials, Address grad_norm,
         const Strides& to_strides, int num_threads) {
        with_numbers(dtype, [&](auto element, auto number) {
          using Element = decltype(element);
          using Real = decltype(number);
          const auto in = rotate_heads_of<Element, Real>(num_rows, head_dim, eps, 1.0, q, k, v, q_norm, k_norm, to, tables);
          cpu::rotate_heads_backward(
              RotateHeadsBackward<Element, Real>{in,
                                                 {pointer<const Element>(grad[0]), pointer<const Element>(grad[1])},
                                                 num_partials,
                                                 pointer<Real>(grad_norm)},
              strides_of(in, to_strides).values, num_threads);
        });
      },
      py::kw_only(), "dtype"_a, "num_rows"_a, "head_dim"_a, "eps"_a, "q"_a, "k"_a, "v"_a, "q_norm"_a, "k_norm"_a, "to"_a,
      "grad"_a, "tables"_a, "num_partials"_a, "grad_norm"_a, "to_strides"_a, "num_threads"_a);
}

void bind_swiglu_on_cpu(py::module_& m) {
  m.def(
      "swiglu_cpu",
      [](std::string_view dtype, std::int64_t num_rows, int size, Address gate, Address up, std::int64_t gate_stride,
         std::int64_t up_stride, Address out, int num_threads) {
        with_numbers(dtype, [&](auto element, auto number) {
          cpu::swiglu<decltype(element), decltype(number)>(
              swiglu_of<decltype(element)>(num_rows, size, gate, up, gate_stride, up_stride, out), num_threads);
        });
      },
      py::kw_only(), "dtype"_a, "num_rows"_a, "size"_a, "gate"_a, "up"_a, "gate_stride"_a, "up_stride"_a, "out"_a,
      "num_threads"_a);
  m.def(
      "swiglu_backward_cpu",
      [](std::string_view dtype, std::int64_t num_rows, int size, Address gate, Address up, std::int64_t gate_stride,
         std::int64_t up_stride, Address grad, Address grad_gate, Address grad_up, std::int64_t grad_stride, int num_threads) {
        with_numbers(dtype, [&](auto element, auto number) {
          using Element = decltype(element);
          const auto forward = swiglu_of<Element>(num_rows, size, gate, up, gate_stride, up_stride, 0);
          cpu::swiglu_backward<Element, decltype(number)>(
              {forward, pointer<const Element>(grad), pointer<Element>(grad_gate), pointer<Element>(grad_up)},
              grad_stride ? grad_stride : size, num_threads);
        });
      },
      py::kw_only(), "dtype"_a, "num_rows"_a, "size"_a, "gate"_a, "up"_a, "gate_stride"_a, "up_stride"_a, "grad"_a,
      "grad_gate"_a, "grad_up"_a, "grad_stride"_a = 0, "num_threads"_a);
}

#ifdef MAXRL_FAST_CUDA
void check_heads(const std::array<HeadsArgument, 3>& heads, std::size_t element_size, const std::array<Address, 3>& to,
                 const TablesArgument& tables, Address q_norm, Address k_norm) {
  for (const auto& [data, stride, count] : heads) {
    check_alignment("rotate_heads", {data});
    if (count && stride * element_size % 16) throw py::value_error("rotate_heads needs row strides of whole 16 bytes");
  }
  check_alignment("rotate_heads", {q_norm, k_norm, to[0], to[1], to[2], std::get<0>(tables), std::get<1>(tables)});
}

void bind_norms(py::module_& m) {
  m.def(
      "add_rms_norm_cuda",
      [](std::string_view dtype, std::int64_t num_rows, int size, double eps, Address x, Address delta, Address weight,
         Address sum, Address normed, Address stream) {
        check_alignment("add_rms_norm", {x, delta, weight, sum, normed});
        with_element(dtype, [&](auto element) {
          using Element = decltype(element);
          cuda::add_rms_norm(AddRmsNorm<Element>{num_rows, size, static_cast<float>(eps), pointer<const Element>(x),
                                                 pointer<const Element>(delta), pointer<const Element>(weight),
                                                 pointer<Element>(sum), pointer<Element>(normed)},
                             reinterpret_cast<cudaStream_t>(stream));
        });
      },
      py::kw_only(), "dtype"_a, "num_rows"_a, "size"_a, "eps"_a, "x"_a, "delta"_a, "weight"_a, "sum"_a, "normed"_a, "stream"_a);
  m.def(
      "add_rms_norm_backward_cuda",
      [](std::string_view dtype, std::int64_t num_rows, int size, double eps, Address sum, Address weight, Address grad_sum,
         Address grad_normed, Address grad_x, std::int64_t num_partials, Address grad_weight, Address stream) {
        check_alignment("add_rms_norm_backward", {sum, weight, grad_sum, grad_normed, grad_x});
        with_element(dtype, [&](auto element) {
          using Element = decltype(element);
          cuda::add_rms_norm_backward(
              AddRmsNormBackward<Element>{num_rows, size, static_cast<float>(eps), pointer<const Element>(sum),
                                          pointer<const Element>(weight), pointer<const Element>(grad_sum),
                                          pointer<const Element>(grad_normed), pointer<Element>(grad_x), num_partials,
                                          pointer<float>(grad_weight)},
              reinterpret_cast<cudaStream_t>(stream));
        });
      },
      py::kw_only(), "dtype"_a, "num_rows"_a, "size"_a, "eps"_a, "sum"_a, "weight"_a, "grad_sum"_a, "grad_normed"_a, "grad_x"_a,
      "num_partials"_a, "grad_weight"_a, "stream"_a);
}

void bind_heads(py::module_& m) {
  m.def(
      "rotate_heads_cuda",
      [](std::string_view dtype, std::int64_t num_rows, int head_dim, double eps, double direction, const HeadsArgument& q,
         const HeadsArgument& k, const HeadsArgument& v, Address q_norm, Address k_norm, const std::array<Address, 3>& to,
         const TablesArgument& tables, Address stream) {
        with_element(dtype, [&](auto element) {
          using Element = decltype(element);
          check_heads({q, k, v}, sizeof(Element), to, tables, q_norm, k_norm);
          cuda::rotate_heads(
              rotate_heads_of<Element, float>(num_rows, head_dim, eps, direction, q, k, v, q_norm, k_norm, to, tables),
              reinterpret_cast<cudaStream_t>(stream));
        });
      },
      py::kw_only(), "dtype"_a, "num_rows"_a, "head_dim"_a, "eps"_a, "direction"_a, "q"_a, "k"_a, "v"_a, "q_norm"_a, "k_norm"_a,
      "to"_a, "tables"_a, "stream"_a);
  m.def(
      "rotate_heads_backward_cuda",
      [](std::string_view dtype, std::int64_t num_rows, int head_dim, double eps, const HeadsArgument& q,
         const HeadsArgument& k, Address q_norm, Address k_norm, const std::array<Address, 2>& to,
         const std::array<Address, 2>& grad, const TablesArgument& tables, std::int64_t num_partials, Address grad_norm,
         Address stream) {
        check_alignment("rotate_heads_backward", {grad[0], grad[1]});
        with_element(dtype, [&](auto element) {
          using Element = decltype(element);
          check_heads({q, k, HeadsArgument{0, 0, 0}}, sizeof(Element), {to[0], to[1], 0}, tables, q_norm, k_norm);
          const auto forward = rotate_heads_of<Element, float>(num_rows, head_dim, eps, 1.0, q, k, {0, 0, 0}, q_norm, k_norm,
                                                               {to[0], to[1], 0}, tables);
          cuda::rotate_heads_backward(
              RotateHeadsBackward<Element>{forward,
                                           {pointer<const Element>(grad[0]), pointer<const Element>(grad[1])},
                                           num_partials,
                                           pointer<float>(grad_norm)},
              reinterpret_cast<cudaStream_t>(stream));
        });
      },
      py::kw_only(), "dtype"_a, "num_rows"_a, "head_dim"_a, "eps"_a, "q"_a, "k"_a, "q_norm"_a, "k_norm"_a, "to"_a, "grad"_a,
      "tables"_a, "num_partials"_a, "grad_norm"_a, "stream"_a);
}

void bind_swiglu(py::module_& m) {
  m.def(
      "swiglu_cuda",
      [](std::string_view dtype, std::int64_t num_rows, int size, Address gate, Address up, std::int64_t gate_stride,
         std::int64_t up_stride, Address out, Address stream) {
        with_element(dtype, [&](auto element) {
          using Element = decltype(element);
          check_alignment("swiglu", {gate, up, gate_stride * sizeof(Element), up_stride * sizeof(Element), out});
          cuda::swiglu(swiglu_of<Element>(num_rows, size, gate, up, gate_stride, up_stride, out),
                       reinterpret_cast<cudaStream_t>(stream));
        });
      },
      py::kw_only(), "dtype"_a, "num_rows"_a, "size"_a, "gate"_a, "up"_a, "gate_stride"_a, "up_stride"_a, "out"_a, "stream"_a);
  m.def(
      "swiglu_backward_cuda",
      [](std::string_view dtype, std::int64_t num_rows, int size, Address gate, Address up, std::int64_t gate_stride,
         std::int64_t up_stride, Address grad, Address grad_gate, Address grad_up, Address stream) {
        check_alignment("swiglu_backward", {grad, grad_gate, grad_up});
        with_element(dtype, [&](auto element) {
          using Element = decltype(element);
          check_alignment("swiglu", {gate, up, gate_stride * sizeof(Element), up_stride * sizeof(Element)});
          const auto forward = swiglu_of<Element>(num_rows, size, gate, up, gate_stride, up_stride, 0);
          cuda::swiglu_backward(SwiGluBackward<Element>{forward, pointer<const Element>(grad), pointer<Element>(grad_gate),
                                                        pointer<Element>(grad_up)},
                                reinterpret_cast<cudaStream_t>(stream));
        });
      },
      py::kw_only(), "dtype"_a, "num_rows"_a, "size"_a, "gate"_a, "up"_a, "gate_stride"_a, "up_stride"_a, "grad"_a,
      "grad_gate"_a, "grad_up"_a, "stream"_a);
}

#endif

}  // namespace

void bind_layer(py::module_& m) {
  bind_norms_on_cpu(m);
  bind_heads_on_cpu(m);
  bind_swiglu_on_cpu(m);
#ifdef MAXRL_FAST_CUDA
  bind_norms(m);
  bind_heads(m);
  bind_swiglu(m);
#endif
}

}  // namespace maxrl::bindings
