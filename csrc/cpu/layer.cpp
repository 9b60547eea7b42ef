// The elementwise parts of a decoder layer on a CPU. Numbers are read once and written once, and computed in float32, in double
// for doubles. Rows are cut into pieces that depend on the shapes alone; sums over rows are added up within each piece, then
// piece after piece. Results are therefore bitwise the same for any number of threads.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "../kernels.h"
#include "attention_vectors.h"
#include "dispatch.h"

namespace maxrl::cpu {
namespace {

constexpr int64_t kPieceNumbers = 1 << 12;  // of a piece, about: few, for short sums, but more work than starting it
constexpr int64_t kMostPieces = 64;  // where each has sums of its own

// Rows [begin, end) of pieces.
struct Pieces {
  int64_t num_rows, rows, count;

  Pieces(int64_t num_rows, int64_t row_size, int64_t most = INT64_MAX)
      : num_rows(num_rows),
        rows(std::max({int64_t{1}, kPieceNumbers / std::max<int64_t>(row_size, 1), (num_rows - 1) / most + 1})),
        count((num_rows + rows - 1) / rows) {}

  // work(piece, first row, end), compiled for the instructions of these vectors.
  template <typename Vectors, typename Work>
  void run(int num_threads, const Work& work) const {
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1) if (count > 1)
    for (int64_t piece = 0; piece < count; ++piece)
      compiled_for(Vectors{}, [&] { work(piece, piece * rows, std::min((piece + 1) * rows, num_rows)); });
  }
};

// use(first, count) for all vectors of a row; only the last can have fewer lanes.
template <typename Vectors, typename Use>
inline void for_vectors(int64_t size, const Use& use) {
  int64_t i = 0;
  for (; i + Vectors::kLanes <= size; i += Vectors::kLanes) use(i, int64_t{Vectors::kLanes});
  if (i < size) use(i, size - i);
}

template <typename Vectors>
inline typename Vectors::Real total(typename Vectors::Reals x) {
  using Real = typename Vectors::Real;
  if constexpr (sizeof x > 16) {
    using Half = cpu::Vectors<Real, Vectors::kLanes / 2>;
    typename Half::Reals halves[2];
    memcpy(&halves, &x, sizeof x);
    return total<Half>(halves[0] + halves[1]);
  } else {
    return Vectors::sum(x);
  }
}

// The RMS norm of x is x rate w, and its gradient in x is rate w g - slope x.
template <typename Real>
struct Norm {
  Real rate, slope;
  Norm(Real squares, Real product, int size, Real eps)  // sum of x^2, of w g x
      : rate(1 / std::sqrt(squares / size + eps)), slope(rate * rate * rate * product / size) {}
};

// Adds partial sums [pieces, size], in order; zeros without pieces.
template <typename Real>
void add_pieces(const Real* partials, int64_t pieces, int64_t size, Real* to) {
  std::fill(to, to + size, Real(0));
  for (int64_t piece = 0; piece < pieces; ++piece)
    for (int64_t i = 0; i < size; ++i) to[i] += partials[piece * size + i];
}

template <typename Vectors, typename Element>
inline void norm_row(const AddRmsNorm<Element, typename Vectors::Real>& in, int64_t start) {
  const Element *const x = in.x + start, *const delta = in.delta ? in.delta + start : nullptr;
  Element *const sum = delta ? in.sum + start : nullptr, *const normed = in.normed + start;
  auto squares = Vectors::all(0);
  for_vectors<Vectors>(in.size, [&](int64_t i, int64_t n) {
    auto value = load_lanes<Vectors>(x + i, n);
    if (delta) {
      store_lanes<Vectors>(sum + i, n, value + load_lanes<Vectors>(delta + i, n));
      value = load_lanes<Vectors>(sum + i, n);  // the norm is that of the sum as it is stored
    }
    squares += value * value;
  });
  const Norm norm(total<Vectors>(squares), typename Vectors::Real(0), in.size, in.eps);
  const Element* const values = delta ? sum : x;
  for_vectors<Vectors>(in.size, [&](int64_t i, int64_t n) {
    store_lanes<Vectors>(normed + i, n, load_lanes<Vectors>(values + i, n) * norm.rate * load_lanes<Vectors>(in.weight + i, n));
  });
}

template <typename Vectors, typename Element, typename Real = typename Vectors::Real>
inline void norm_backward_row(const AddRmsNormBackward<Element, Real>& in, int64_t start, Real* grad_weight) {
  const Element *const sum = in.sum + start, *const grad = in.grad_normed + start;
  const Element* const grad_sum = in.grad_sum ? in.grad_sum + start : nullptr;
  auto squares = Vectors::all(0), product = squares;
  for_vectors<Vectors>(in.size, [&](int64_t i, int64_t n) {
    const auto x = load_lanes<Vectors>(sum + i, n), g = load_lanes<Vectors>(grad + i, n);
    squares += x * x;
    product += load_lanes<Vectors>(in.weight + i, n) * g * x;
  });
  const Norm norm(total<Vectors>(squares), total<Vectors>(product), in.size, in.eps);
  for_vectors<Vectors>(in.size, [&](int64_t i, int64_t n) {
    const auto x = load_lanes<Vectors>(sum + i, n), g = load_lanes<Vectors>(grad + i, n);
    auto result = g * load_lanes<Vectors>(in.weight + i, n) * norm.rate - x * norm.slope;
    if (grad_sum) result += load_lanes<Vectors>(grad_sum + i, n);
    store_lanes<Vectors>(in.grad_x + start + i, n, result);
    store_lanes<Vectors>(grad_weight + i, n, load_lanes<Vectors>(grad_weight + i, n) + g * x * norm.rate);
  });
}

// The rotation at a token's position: pairs (low, high) of a head by the angles whose cos and sin these are.
template <typename Vectors>
struct Rotation {
  using Real = typename Vectors::Real;
  using Reals = typename Vectors::Reals;
  const float *cos, *sin;  // null: not a number, for a position that the tables lack
  Real direction;

  template <typename Heads>
  Rotation(const Heads& in, int64_t row, Real direction) : cos(nullptr), sin(nullptr), direction(direction) {
    const int64_t position = in.positions ? in.positions[row] : row;
    if (position < 0 || position >= in.num_positions) return;
    cos = in.cos + position * (in.head_dim / 2);
    sin = in.sin + position * (in.head_dim / 2);
  }
  void rotate(int64_t i, int64_t n, Reals& low, Reals& high) const {
    const Reals c = load(cos, i, n), s = load(sin, i, n) * direction, x = low;
    low = x * c - high * s;
    high = high * c + x * s;
  }

 private:
  static Reals load(const float* table, int64_t i, int64_t n) {
    if (!table) return Vectors::all(std::numeric_limits<Real>::quiet_NaN());
    if constexpr (sizeof(Real) == 4) {
      return load_lanes<Vectors>(table + i, n);
    } else {
      auto x = Vectors::all(0);
      for (int64_t lane = 0; lane < n; ++lane) x[lane] = table[i + lane];
      return x;
    }
  }
};

// The sum of squares of a head.
template <typename Vectors, typename Element>
inline typename Vectors::Real squares_of(const Element* head, int64_t size) {
  auto squares = Vectors::all(0);
  for_vectors<Vectors>(size, [&](int64_t i, int64_t n) {
    const auto x = load_lanes<Vectors>(head + i, n);
    squares += x * x;
  });
  return total<Vectors>(squares);
}

template <typename Vectors, typename Element>
inline void rotate_row(const RotateHeads<Element, typename Vectors::Real>& in, int64_t row) {
  using Real = typename Vectors::Real;
  const Rotation<Vectors> rotation(in, row, in.direction);
  const int half = in.head_dim / 2;
  for (int which = 0; which < 2; ++which)
    for (int head = 0; head < in.from[which].count; ++head) {
      const Element* const x = in.from[which].data + row * in.from[which].stride + head * in.head_dim;
      const Element* const weight = in.norm[which];
      Element* const to = in.to[which] + row * in.to_stride[which] + head * in.head_dim;
      const Real rate = weight ? Norm(squares_of<Vectors>(x, in.head_dim), Real(0), in.head_dim, in.eps).rate : Real(1);
      for_vectors<Vectors>(half, [&](int64_t i, int64_t n) {
        auto low = load_lanes<Vectors>(x + i, n), high = load_lanes<Vectors>(x + half + i, n);
        if (weight) {
          low *= load_lanes<Vectors>(weight + i, n) * rate;
          high *= load_lanes<Vectors>(weight + half + i, n) * rate;
        }
        rotation.rotate(i, n, low, high);
        store_lanes<Vectors>(to + i, n, low);
        store_lanes<Vectors>(to + half + i, n, high);
      });
    }
}

// Values are copied.
template <typename Element, typename Real>
inline void copy_values(const RotateHeads<Element, Real>& in, int64_t row) {
  if (in.from[2].count)
    memcpy(in.to[2] + row * in.to_stride[2], in.from[2].data + row * in.from[2].stride,
           sizeof(Element) * in.from[2].count * in.head_dim);
}

template <typename Vectors, typename Element, typename Real = typename Vectors::Real>
inline void rotate_backward_row(const RotateHeadsBackward<Element, Real>& backward, int64_t row, Real* grad_norms) {
  const auto& in = backward.forward;
  const Rotation<Vectors> rotation(in, row, -in.direction);
  const int half = in.head_dim / 2;
  for (int which = 0; which < 2; ++which)
    for (int head = 0; head < in.from[which].count; ++head) {
      const Element* const x = in.from[which].data + row * in.from[which].stride + head * in.head_dim;
      const Element* const grad = backward.grad[which] + (row * in.from[which].count + head) * in.head_dim;
      const Element* const weight = in.norm[which];
      Element* const to = in.to[which] + row * in.to_stride[which] + head * in.head_dim;
      Real* const grad_norm = grad_norms + (which * in.from[0].count + head) * in.head_dim;
      // use(place, lanes, x, its norm's gradient), for both halves
      const auto for_both = [&](const auto& use) {
        for_vectors<Vectors>(half, [&](int64_t i, int64_t n) {
          auto low = load_lanes<Vectors>(grad + i, n), high = load_lanes<Vectors>(grad + half + i, n);
          rotation.rotate(i, n, low, high);
          use(i, n, load_lanes<Vectors>(x + i, n), low);
          use(half + i, n, load_lanes<Vectors>(x + half + i, n), high);
        });
      };
      auto products = Vectors::all(0);
      for_both([&](int64_t i, int64_t n, auto value, auto g) { products += load_lanes<Vectors>(weight + i, n) * g * value; });
      const Norm norm(squares_of<Vectors>(x, in.head_dim), total<Vectors>(products), in.head_dim, in.eps);
      for_both([&](int64_t i, int64_t n, auto value, auto g) {
        store_lanes<Vectors>(to + i, n, g * load_lanes<Vectors>(weight + i, n) * norm.rate - value * norm.slope);
        store_lanes<Vectors>(grad_norm + i, n, load_lanes<Vectors>(grad_norm + i, n) + g * value * norm.rate);
      });
    }
}

// sigmoid(x) and 1 - sigmoid(x), each to its own rounding error.
template <typename Vectors>
struct Sigmoid {
  using Reals = typename Vectors::Reals;
  Reals value, rest;
  explicit Sigmoid(Reals x) {
    const Reals one = Vectors::all(1);
    const Reals e = Vectors::exponential(Vectors::greater(-Vectors::greater(x, -x), Vectors::all(Vectors::kLowestExponent)));
    const Reals larger = one / (e + one), smaller = e * larger;
    // Selection by the sign's bits: a comparison of 64 bytes would become scalars when it is inlined (attention_vectors.h).
    using Integers = decltype(x > x);
    const Integers is_negative = bits_as<Integers>(x) >> (8 * sizeof(typename Vectors::Real) - 1);
    const Integers difference = (bits_as<Integers>(larger) ^ bits_as<Integers>(smaller)) & is_negative;
    value = bits_as<Reals>(bits_as<Integers>(larger) ^ difference);
    rest = bits_as<Reals>(bits_as<Integers>(smaller) ^ difference);
  }
};

template <typename Vectors, typename Element>
inline void swiglu_row(const SwiGlu<Element, typename Vectors::Real>& in, int64_t row) {
  const Element *const gate = in.gate + row * in.gate_stride, *const up = in.up + row * in.up_stride;
  Element* const out = in.out + row * in.size;
  for_vectors<Vectors>(in.size, [&](int64_t i, int64_t n) {
    const auto x = load_lanes<Vectors>(gate + i, n);
    store_lanes<Vectors>(out + i, n, x * Sigmoid<Vectors>(x).value * load_lanes<Vectors>(up + i, n));
  });
}

template <typename Vectors, typename Element>
inline void swiglu_backward_row(const SwiGluBackward<Element, typename Vectors::Real>& backward, int64_t row) {
  const auto& in = backward.forward;
  const Element *const gate = in.gate + row * in.gate_stride, *const up = in.up + row * in.up_stride;
  const Element* const grad = backward.grad + row * in.size;
  Element* const grad_gate = backward.grad_gate + row * backward.grad_stride;
  Element* const grad_up = backward.grad_up + row * backward.grad_stride;
  for_vectors<Vectors>(in.size, [&](int64_t i, int64_t n) {
    const auto x = load_lanes<Vectors>(gate + i, n);
    const Sigmoid<Vectors> sigmoid(x);
    const auto scaled = load_lanes<Vectors>(grad + i, n) * sigmoid.value;
    store_lanes<Vectors>(grad_gate + i, n, scaled * load_lanes<Vectors>(up + i, n) * (x * sigmoid.rest + Vectors::all(1)));
    store_lanes<Vectors>(grad_up + i, n, scaled * x);
  });
}

// use(Vectors{}) with at most the lanes of `Vectors`: as many as divide `size`, if any do.
template <typename Vectors, typename Use>
void with_lanes_for(int size, const Use& use) {
  if constexpr (sizeof(typename Vectors::Reals) > 16) {
    constexpr int kHalf = Vectors::kLanes / 2;
    if (size % Vectors::kLanes != 0 && size % (16 / sizeof(typename Vectors::Real)) == 0)
      return with_lanes_for<cpu::Vectors<typename Vectors::Real, kHalf>>(size, use);
  }
  use(Vectors{});
}

}  // namespace

template <typename Element, typename Real>
void add_rms_norm(const AddRmsNorm<Element, Real>& in, int num_threads) {
  with_widest<Real>([&](auto vectors) {
    using Vectors = decltype(vectors);
    Pieces(in.num_rows, in.size).template run<Vectors>(num_threads, [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) norm_row<Vectors>(in, row * in.size);
    });
  });
}

template <typename Element, typename Real>
void add_rms_norm_backward(const AddRmsNormBackward<Element, Real>& in, int num_threads) {
  const Pieces pieces(in.num_rows, in.size, kMostPieces);
  std::vector<Real> partials(pieces.count * in.size);
  with_widest<Real>([&](auto vectors) {
    using Vectors = decltype(vectors);
    pieces.template run<Vectors>(num_threads, [&](int64_t piece, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        norm_backward_row<Vectors>(in, row * in.size, partials.data() + piece * in.size);
    });
  });
  add_pieces(partials.data(), pieces.count, in.size, in.grad_weight);
}

template <typename Element, typename Real>
void rotate_heads(const RotateHeads<Element, Real>& in, int num_threads) {
  const Pieces pieces(in.num_rows, int64_t{in.from[0].count + in.from[1].count + in.from[2].count} * in.head_dim);
  with_widest<Real>([&](auto widest) {
    with_lanes_for<decltype(widest)>(in.head_dim / 2, [&](auto vectors) {
      using Vectors = decltype(vectors);
      pieces.template run<Vectors>(num_threads, [&](int64_t, int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          rotate_row<Vectors>(in, row);
          copy_values(in, row);
        }
      });
    });
  });
}

template <typename Element, typename Real>
void rotate_heads_backward(const RotateHeadsBackward<Element, Real>& backward, int num_threads) {
  const auto& in = backward.forward;
  const int64_t size = int64_t{in.from[0].count + in.from[1].count} * in.head_dim;
  const Pieces pieces(in.num_rows, size, kMostPieces);
  std::vector<Real> partials(pieces.count * size);
  with_widest<Real>([&](auto widest) {
    with_lanes_for<decltype(widest)>(in.head_dim / 2, [&](auto vectors) {
      using Vectors = decltype(vectors);
      pieces.template run<Vectors>(num_threads, [&](int64_t piece, int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          rotate_backward_row<Vectors>(backward, row, partials.data() + piece * size);
          copy_values(in, row);
        }
      });
    });
  });
  std::vector<Real> of_heads(size);
  add_pieces(partials.data(), pieces.count, size, of_heads.data());
  add_pieces(of_heads.data(), in.from[0].count, in.head_dim, backward.grad_norm);
  add_pieces(of_heads.data() + int64_t{in.from[0].count} * in.head_dim, in.from[1].count, in.head_dim,
             backward.grad_norm + in.head_dim);
}

template <typename Element, typename Real>
void swiglu(const SwiGlu<Element, Real>& in, int num_threads) {
  with_widest<Real>([&](auto vectors) {
    using Vectors = decltype(vectors);
    Pieces(in.num_rows, in.size).template run<Vectors>(num_threads, [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) swiglu_row<Vectors>(in, row);
    });
  });
}

template <typename Element, typename Real>
void swiglu_backward(const SwiGluBackward<Element, Real>& in, int num_threads) {
  with_widest<Real>([&](auto vectors) {
    using Vectors = decltype(vectors);
    Pieces(in.forward.num_rows, in.forward.size).template run<Vectors>(num_threads, [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) swiglu_backward_row<Vectors>(in, row);
    });
  });
}

template <typename Element, typename Real>
void chosen_rows_backward(const ChosenRows<Element, Real>& in, int num_threads) {
  // Which rows of `grad` belong to row u: order[starts[u]], ..., ascending.
  std::vector<int64_t> starts(in.num_rows + 2), order(in.num_chosen);
  for (int64_t i = 0; i < in.num_chosen; ++i) {
    if (in.rows[i] < 0 || in.rows[i] >= in.num_rows) throw std::invalid_argument("a chosen row does not exist");
    ++starts[in.rows[i] + 2];
  }
  for (int64_t u = 0; u < in.num_rows; ++u) starts[u + 2] += starts[u + 1];
  for (int64_t i = 0; i < in.num_chosen; ++i) order[starts[in.rows[i] + 1]++] = i;
  with_widest<Real>([&](auto vectors) {
    using Vectors = decltype(vectors);
    Pieces(in.num_rows, in.size).template run<Vectors>(num_threads, [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t u = begin; u < end; ++u)
        for_vectors<Vectors>(in.size, [&](int64_t at, int64_t n) {
          auto sum = Vectors::all(0);
          for (int64_t i = starts[u]; i < starts[u + 1]; ++i) sum += load_lanes<Vectors>(in.grad + order[i] * in.size + at, n);
          store_lanes<Vectors>(in.to + u * in.size + at, n, sum);
        });
    });
  });
}

#define MAXRL_INSTANTIATE(Element, Real)                                               \
  template void add_rms_norm(const AddRmsNorm<Element, Real>&, int);                   \
  template void add_rms_norm_backward(const AddRmsNormBackward<Element, Real>&, int);  \
  template void rotate_heads(const RotateHeads<Element, Real>&, int);                  \
  template void rotate_heads_backward(const RotateHeadsBackward<Element, Real>&, int); \
  template void swiglu(const SwiGlu<Element, Real>&, int);                             \
  template void swiglu_backward(const SwiGluBackward<Element, Real>&, int);            \
  template void chosen_rows_backward(const ChosenRows<Element, Real>&, int);
MAXRL_INSTANTIATE(float, float)
MAXRL_INSTANTIATE(double, double)
MAXRL_INSTANTIATE(BFloat16, float)
#undef MAXRL_INSTANTIATE

}  // namespace maxrl::cpu
