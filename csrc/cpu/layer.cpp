// The elementwise parts of a decoder layer on a CPU. Numbers are read once and written once, and
// computed in float32, in double for doubles. Rows are cut into pieces that depend on the shapes
// alone; sums over rows are added up within each piece, then piece after piece. Results are
// therefore bitwise the same for any number of threads.
#include "../layer.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "attention_vectors.h"
#include "dispatch.h"

namespace maxrl::cpu {
namespace {

constexpr int64_t kPieceNumbers =
    1 << 12;  // of a piece, about: few, for short sums, but more work than starting it
constexpr int64_t kMostPieces = 64;  // where each has its own sums

// use(Vectors{}) with at most the lanes of `Vectors`: as many as divide `size`, if any do.
template <typename Vectors, typename Use>
void with_fitting(int size, const Use& use) {
  if constexpr (sizeof(typename Vectors::Reals) > 16) {
    constexpr int kHalf = Vectors::kLanes / 2;
    if (size % Vectors::kLanes != 0 && size % (16 / sizeof(typename Vectors::Real)) == 0)
      return with_fitting<cpu::Vectors<typename Vectors::Real, kHalf>>(size, use);
  }
  use(Vectors{});
}

// The rows of a matrix, in pieces.
struct Pieces {
  int64_t num_rows, rows, count;

  Pieces(int64_t num_rows, int64_t row_size, int64_t most = INT64_MAX)
      : num_rows(num_rows),
        rows(std::max({int64_t{1}, kPieceNumbers / std::max<int64_t>(row_size, 1),
                       (num_rows - 1) / most + 1})),
        count((num_rows + rows - 1) / rows) {}

  template <typename Element, typename Work>
  void run_widest(int num_threads, const Work& work) const {
    with_widest<RealOf<Element>>(
        [&](auto vectors) { for_pieces(vectors, num_rows, rows, num_threads, work); });
  }
  // For vectors of which a row's parts have `size` numbers each.
  template <typename Element, typename Work>
  void run_fitting(int size, int num_threads, const Work& work) const {
    with_widest<RealOf<Element>>([&](auto widest) {
      with_fitting<decltype(widest)>(
          size, [&](auto vectors) { for_pieces(vectors, num_rows, rows, num_threads, work); });
    });
  }
};

// A vector's numbers of a row; only the last vector can have fewer than all lanes.
template <typename Vectors>
struct Span {
  int64_t first, count;

  template <typename Element>
  auto load(const Element* row) const {
    return load_lanes<Vectors>(row + first, count);
  }
  template <typename Element>
  void store(Element* row, typename Vectors::Reals x) const {
    store_lanes<Vectors>(row + first, count, x);
  }
};

// use(span) for all vectors of a row.
template <typename Vectors, typename Use>
inline void for_vectors(int64_t size, const Use& use) {
  int64_t i = 0;
  for (; i + Vectors::kLanes <= size; i += Vectors::kLanes) use(Span<Vectors>{i, Vectors::kLanes});
  if (i < size) use(Span<Vectors>{i, size - i});
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

// The rotation at a token's position: pairs (low, high) of a head by the angles whose cos and sin
// these are.
template <typename Vectors>
struct Rotation {
  using Real = typename Vectors::Real;
  using Reals = typename Vectors::Reals;
  const float *cos, *sin;  // null: not a number, for a position that the tables lack
  Real direction;

  template <typename Heads>
  Rotation(const Heads& in, int64_t row, Real direction)
      : cos(nullptr), sin(nullptr), direction(direction) {
    const int64_t angles = in.angles_of(row);
    if (angles < 0) return;
    cos = in.cos + angles;
    sin = in.sin + angles;
  }
  void rotate(Span<Vectors> at, Reals& low, Reals& high) const {
    const Reals c = load(cos, at), s = load(sin, at) * direction, x = low;
    low = x * c - high * s;
    high = high * c + x * s;
  }

 private:
  static Reals load(const float* table, Span<Vectors> at) {
    if (!table) return Vectors::all(std::numeric_limits<Real>::quiet_NaN());
    if constexpr (sizeof(Real) == 4) {
      return at.load(table);
    } else {
      auto x = Vectors::all(0);
      for (int64_t lane = 0; lane < at.count; ++lane) x[lane] = table[at.first + lane];
      return x;
    }
  }
};

template <typename Vectors, typename Element>
inline typename Vectors::Real squares_of(const Element* head, int64_t size) {
  auto squares = Vectors::all(0);
  for_vectors<Vectors>(size, [&](auto at) {
    const auto x = at.load(head);
    squares += x * x;
  });
  return total<Vectors>(squares);
}

template <typename Element>
inline void copy_values(const RotateHeads<Element>& in, int64_t row) {
  if (in.from[2].count)
    memcpy(in.target(2, row, 0), in.source(2, row, 0),
           sizeof(Element) * in.from[2].count * in.head_dim);
}

// sigmoid(x) and 1 - sigmoid(x), each to its own rounding error.
template <typename Vectors>
struct Sigmoid {
  using Reals = typename Vectors::Reals;
  Reals value, rest;
  explicit Sigmoid(Reals x) {
    const Reals one = Vectors::all(1);
    const Reals e = Vectors::exponential(
        Vectors::greater(-Vectors::greater(x, -x), Vectors::all(Vectors::kLowestExponent)));
    const Reals larger = one / (e + one), smaller = e * larger;
    value = where_negative(x, smaller, larger);
    rest = where_negative(x, larger, smaller);
  }
};

template <typename Element>
void add_rms_norm(const AddRmsNorm<Element>& in, int num_threads) {
  const Pieces pieces(in.num_rows, in.size);
  pieces.run_widest<Element>(num_threads, [&](auto vectors, int64_t, int64_t row) {
    using Vectors = decltype(vectors);
    const int64_t start = row * in.size;
    const Element *const x = in.x + start, *const delta = in.delta ? in.delta + start : nullptr;
    Element* const sum = delta ? in.sum + start : nullptr;
    auto squares = Vectors::all(0);
    for_vectors<Vectors>(in.size, [&](auto at) {
      auto value = at.load(x);
      if (delta) {
        at.store(sum, value + at.load(delta));
        value = at.load(sum);  // the norm is that of the sum as it is stored
      }
      squares += value * value;
    });
    const Norm norm(total<Vectors>(squares), RealOf<Element>(0), in.size, in.eps);
    const Element* const values = delta ? sum : x;
    for_vectors<Vectors>(in.size, [&](auto at) {
      at.store(in.normed + start, at.load(values) * norm.rate * at.load(in.weight));
    });
  });
}

template <typename Element>
void add_rms_norm_backward(const AddRmsNormBackward<Element>& in, int num_threads) {
  const Pieces pieces(in.num_rows, in.size, kMostPieces);
  std::vector<RealOf<Element>> partials(pieces.count * in.size);
  pieces.run_widest<Element>(num_threads, [&](auto vectors, int64_t piece, int64_t row) {
    using Vectors = decltype(vectors);
    const int64_t start = row * in.size;
    const Element *const sum = in.sum + start, *const grad = in.grad_normed + start;
    const Element* const grad_sum = in.grad_sum ? in.grad_sum + start : nullptr;
    auto* const grad_weight = partials.data() + piece * in.size;
    auto squares = Vectors::all(0), product = squares;
    for_vectors<Vectors>(in.size, [&](auto at) {
      const auto x = at.load(sum), g = at.load(grad);
      squares += x * x;
      product += at.load(in.weight) * g * x;
    });
    const Norm norm(total<Vectors>(squares), total<Vectors>(product), in.size, in.eps);
    for_vectors<Vectors>(in.size, [&](auto at) {
      const auto x = at.load(sum), g = at.load(grad);
      auto result = g * at.load(in.weight) * norm.rate - x * norm.slope;
      if (grad_sum) result += at.load(grad_sum);
      at.store(in.grad_x + start, result);
      at.store(grad_weight, at.load(grad_weight) + g * x * norm.rate);
    });
  });
  add_pieces(partials.data(), pieces.count, in.size, in.grad_weight);
}

template <typename Element>
void rotate_heads(const RotateHeads<Element>& in, int num_threads) {
  const int half = in.head_dim / 2;
  const Pieces pieces(
      in.num_rows, int64_t{in.from[0].count + in.from[1].count + in.from[2].count} * in.head_dim);
  pieces.run_fitting<Element>(half, num_threads, [&](auto vectors, int64_t, int64_t row) {
    using Vectors = decltype(vectors);
    using Real = RealOf<Element>;
    const Rotation<Vectors> rotation(in, row, in.direction);
    for (int which = 0; which < 2; ++which)
      for (int head = 0; head < in.from[which].count; ++head) {
        const Element *const x = in.source(which, row, head), *const weight = in.norm[which];
        Element* const to = in.target(which, row, head);
        const Real rate =
            weight ? Norm(squares_of<Vectors>(x, in.head_dim), Real(0), in.head_dim, in.eps).rate
                   : Real(1);
        for_vectors<Vectors>(half, [&](auto at) {
          auto low = at.load(x), high = at.load(x + half);
          if (weight) {
            low *= at.load(weight) * rate;
            high *= at.load(weight + half) * rate;
          }
          rotation.rotate(at, low, high);
          at.store(to, low);
          at.store(to + half, high);
        });
      }
    copy_values(in, row);
  });
}

template <typename Element>
void rotate_heads_backward(const RotateHeadsBackward<Element>& backward, int num_threads) {
  const auto& in = backward.forward;
  const int half = in.head_dim / 2;
  const int64_t size = int64_t{in.from[0].count + in.from[1].count} * in.head_dim;
  const Pieces pieces(in.num_rows, size, kMostPieces);
  std::vector<RealOf<Element>> partials(pieces.count * size), of_heads(size);
  pieces.run_fitting<Element>(half, num_threads, [&](auto vectors, int64_t piece, int64_t row) {
    using Vectors = decltype(vectors);
    const Rotation<Vectors> rotation(in, row, -in.direction);
    for (int which = 0; which < 2; ++which)
      for (int head = 0; head < in.from[which].count; ++head) {
        const Element *const x = in.source(which, row, head), *const weight = in.norm[which];
        const Element* const grad =
            backward.grad[which] + (row * in.from[which].count + head) * in.head_dim;
        Element* const to = in.target(which, row, head);
        auto* const grad_norm =
            partials.data() + piece * size + (which * in.from[0].count + head) * in.head_dim;
        // use(span, x, its norm's gradient), for both halves
        const auto for_both = [&](const auto& use) {
          for_vectors<Vectors>(half, [&](auto at) {
            auto low = at.load(grad), high = at.load(grad + half);
            rotation.rotate(at, low, high);
            use(at, at.load(x), low);
            at.first += half;
            use(at, at.load(x), high);
          });
        };
        auto products = Vectors::all(0);
        for_both([&](auto at, auto value, auto g) { products += at.load(weight) * g * value; });
        const Norm norm(squares_of<Vectors>(x, in.head_dim), total<Vectors>(products), in.head_dim,
                        in.eps);
        for_both([&](auto at, auto value, auto g) {
          at.store(to, g * at.load(weight) * norm.rate - value * norm.slope);
          at.store(grad_norm, at.load(grad_norm) + g * value * norm.rate);
        });
      }
    copy_values(in, row);
  });
  add_pieces(partials.data(), pieces.count, size, of_heads.data());
  add_pieces(of_heads.data(), in.from[0].count, in.head_dim, backward.grad_norm);
  add_pieces(of_heads.data() + int64_t{in.from[0].count} * in.head_dim, in.from[1].count,
             in.head_dim, backward.grad_norm + in.head_dim);
}

template <typename Element>
void swiglu(const SwiGlu<Element>& in, int num_threads) {
  const Pieces pieces(in.num_rows, in.size);
  pieces.run_widest<Element>(num_threads, [&](auto vectors, int64_t, int64_t row) {
    using Vectors = decltype(vectors);
    for_vectors<Vectors>(in.size, [&](auto at) {
      const auto x = at.load(in.gate + row * in.gate_stride);
      at.store(in.out + row * in.size,
               x * Sigmoid<Vectors>(x).value * at.load(in.up + row * in.up_stride));
    });
  });
}

template <typename Element>
void swiglu_backward(const SwiGluBackward<Element>& backward, int num_threads) {
  const auto& in = backward.forward;
  const Pieces pieces(in.num_rows, in.size);
  pieces.run_widest<Element>(num_threads, [&](auto vectors, int64_t, int64_t row) {
    using Vectors = decltype(vectors);
    for_vectors<Vectors>(in.size, [&](auto at) {
      const auto x = at.load(in.gate + row * in.gate_stride);
      const Sigmoid<Vectors> sigmoid(x);
      const auto scaled = at.load(backward.grad + row * in.size) * sigmoid.value;
      at.store(backward.grad_gate + row * backward.grad_stride,
               scaled * at.load(in.up + row * in.up_stride) * (x * sigmoid.rest + Vectors::all(1)));
      at.store(backward.grad_up + row * backward.grad_stride, scaled * x);
    });
  });
}

template <typename Element>
void chosen_rows_backward(const ChosenRows<Element>& in, int num_threads) {
  // Which rows of `grad` belong to row u: order[starts[u]], ..., ascending.
  std::vector<int64_t> starts(in.num_rows + 2), order(in.num_chosen);
  for (int64_t i = 0; i < in.num_chosen; ++i) {
    if (in.rows[i] < 0 || in.rows[i] >= in.num_rows)
      throw std::invalid_argument("a chosen row does not exist");
    ++starts[in.rows[i] + 2];
  }
  for (int64_t u = 0; u < in.num_rows; ++u) starts[u + 2] += starts[u + 1];
  for (int64_t i = 0; i < in.num_chosen; ++i) order[starts[in.rows[i] + 1]++] = i;
  const Pieces pieces(in.num_rows, in.size);
  pieces.run_widest<Element>(num_threads, [&](auto vectors, int64_t, int64_t u) {
    using Vectors = decltype(vectors);
    for_vectors<Vectors>(in.size, [&](auto at) {
      auto sum = Vectors::all(0);
      for (int64_t i = starts[u]; i < starts[u + 1]; ++i)
        sum += at.load(in.grad + order[i] * in.size);
      at.store(in.to + u * in.size, sum);
    });
  });
}

template <typename Element>
bool define() {
  return define_kernel("add_rms_norm", add_rms_norm<Element>) &&
         define_kernel("add_rms_norm_backward", add_rms_norm_backward<Element>) &&
         define_kernel("rotate_heads", rotate_heads<Element>) &&
         define_kernel("rotate_heads_backward", rotate_heads_backward<Element>) &&
         define_kernel("swiglu", swiglu<Element>) &&
         define_kernel("swiglu_backward", swiglu_backward<Element>) &&
         define_kernel("chosen_rows_backward", chosen_rows_backward<Element>);
}
const bool defined = define<float>() && define<double>() && define<BFloat16>();

}  // namespace
}  // namespace maxrl::cpu
