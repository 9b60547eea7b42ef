#include "bindings.h"

namespace maxrl::bindings {

#ifdef MAXRL_FAST_CUDA
namespace {

// The heads of RotateHeads: address, row stride and number.
using HeadsArgument = std::tuple<Address, std::int64_t, int>;

template <typename Element>
Heads<Element> heads_of(const HeadsArgument& given) {
  const auto [data, stride, count] = given;
  if (stride * sizeof(Element) % 16) throw py::value_error("rotate_heads needs row strides of whole 16 bytes");
  return {pointer<const Element>(data), stride, count};
}

// cos, sin, positions and the number of rows of the tables.
using TablesArgument = std::tuple<Address, Address, Address, std::int64_t>;

template <typename Element>
RotateHeads<Element> rotate_heads_of(std::int64_t num_rows, int head_dim, double eps, double direction, const HeadsArgument& q,
                                     const HeadsArgument& k, const HeadsArgument& v, Address q_norm, Address k_norm,
                                     const std::array<Address, 3>& to, const TablesArgument& tables) {
  const auto [cos, sin, positions, num_positions] = tables;
  check_alignment("rotate_heads",
                  {std::get<0>(q), std::get<0>(k), std::get<0>(v), q_norm, k_norm, to[0], to[1], to[2], cos, sin});
  return {num_rows,
          head_dim,
          static_cast<float>(eps),
          static_cast<float>(direction),
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
  check_alignment("swiglu", {gate, up, gate_stride * sizeof(Element), up_stride * sizeof(Element), out});
  return {num_rows,    size,      pointer<const Element>(gate), pointer<const Element>(up),
          gate_stride, up_stride, pointer<Element>(out)};
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
          cuda::rotate_heads(
              rotate_heads_of<decltype(element)>(num_rows, head_dim, eps, direction, q, k, v, q_norm, k_norm, to, tables),
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
          const auto forward = rotate_heads_of<Element>(num_rows, head_dim, eps, 1.0, q, k, {0, 0, 0}, q_norm, k_norm,
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
          cuda::swiglu(swiglu_of<decltype(element)>(num_rows, size, gate, up, gate_stride, up_stride, out),
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
          const auto forward = swiglu_of<Element>(num_rows, size, gate, up, gate_stride, up_stride, 0);
          cuda::swiglu_backward(SwiGluBackward<Element>{forward, pointer<const Element>(grad), pointer<Element>(grad_gate),
                                                        pointer<Element>(grad_up)},
                                reinterpret_cast<cudaStream_t>(stream));
        });
      },
      py::kw_only(), "dtype"_a, "num_rows"_a, "size"_a, "gate"_a, "up"_a, "gate_stride"_a, "up_stride"_a, "grad"_a,
      "grad_gate"_a, "grad_up"_a, "stream"_a);
}

}  // namespace
#endif

void bind_layer([[maybe_unused]] py::module_& m) {
#ifdef MAXRL_FAST_CUDA
  bind_norms(m);
  bind_heads(m);
  bind_swiglu(m);
#endif
}

}  // namespace maxrl::bindings
