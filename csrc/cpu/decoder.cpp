#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "dispatch.h"

namespace maxrl::cpu {
namespace {

template <typename Vectors>
void norm_row(const float* x, int64_t size, const float* weight, double eps, float* y) {
  using Reals = typename Vectors::Reals;
  Reals squares{};
  int64_t i = 0;
  for (; i + Vectors::kLanes <= size; i += Vectors::kLanes) {
    const Reals part = Vectors::read(x + i);
    squares += part * part;
  }
  float sum = Vectors::sum(squares);
  for (; i < size; ++i) sum += x[i] * x[i];
  const auto scale = static_cast<float>(1.0 / std::sqrt(sum / static_cast<double>(size) + eps));
  for (i = 0; i < size; ++i) y[i] = x[i] * scale * weight[i];
}

constexpr float kMasked = -std::numeric_limits<float>::infinity();  // the score of padding

// Replaces scores by their exponentials relative to the greatest score, and returns their sum.
template <typename Vectors>
float exponentials(float* scores, int64_t size) {
  auto top = Vectors::all(kMasked);
  for (int64_t j = 0; j < size; j += Vectors::kLanes)
    top = Vectors::greater(top, Vectors::read(scores + j));
  const auto base = Vectors::all(Vectors::greatest(top)),
             lowest = Vectors::all(Vectors::kLowestExponent);
  auto sum = Vectors::all(0);
  for (int64_t j = 0; j < size; j += Vectors::kLanes) {
    const auto e = Vectors::exponential(Vectors::greater(lowest, Vectors::read(scores + j) - base));
    Vectors::write(scores + j, e);
    sum += e;
  }
  return Vectors::sum(sum);
}

template <typename Vectors>
TileRow<Vectors> swiglu(TileRow<Vectors> gate, const TileRow<Vectors>& up) {
  for (int p = 0; p < gate.kParts; ++p) {
    auto& x = gate.part[p];
    const auto below =
        Vectors::greater(Vectors::all(Vectors::kLowestExponent), -Vectors::greater(x, -x));
    const auto e = Vectors::exponential(below), one = Vectors::all(1);
    x *= (x > 0 ? one : e) / (one + e);
    x *= up.part[p];
  }
  return gate;
}

}  // namespace

template <typename Layout>
void PackedMatrix::reset(Layout, int64_t out_size, int64_t in_size) {
  using Element = typename Layout::Element;
  const int64_t size = padded(out_size) * Layout::depth(in_size);
  if (out != out_size || in != in_size) panels = AlignedBytes::zeros<Element>(size);
  out = out_size;
  in = in_size;
}

template <typename Layout>
void PackedMatrix::pack(Layout, const float* weights, int64_t first, int64_t rows, int64_t step,
                        int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static, kPanel)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at =
        step == 1 ? first + row : row / kPanel * kPanel * step + first + row % kPanel;
    auto* const panel =
        panels.as<typename Layout::Element>() + at / kPanel * kPanel * Layout::depth(in);
    for (int64_t j = 0; j < in; ++j)
      panel[Layout::place(j, at % kPanel)] = Layout::from_float(weights[row * in + j]);
  }
}

template <typename Sink>
void PackedMatrix::multiply(Arithmetic arithmetic, int64_t num_rows, const float* from,
                            int64_t stride, BFloat16* rounded, const Sink& sink) const {
  with_numbers(arithmetic, [&](auto numbers) {
    using Numbers = decltype(numbers);
    Numbers::multiply(
        num_rows, [=](int64_t i) { return from + i * stride; }, in,
        panels.as<typename Numbers::Element>(), panels_of(out), Numbers::depth(in) * kPanel,
        rounded, sink);
  });
}

Decoder::Decoder(const DecoderOptions& options)
    : sizes_(options.sizes), qkv_size_((sizes_.heads + 2 * sizes_.kv_heads) * sizes_.head_dim),
      query_size_(sizes_.heads * sizes_.head_dim),
      cos_(options.cos, options.cos + options.positions * sizes_.head_dim / 2),
      sin_(options.sin, options.sin + options.positions * sizes_.head_dim / 2),
      layers_(sizes_.layers) {
  check_available(sizes_.arithmetic);
}

void Decoder::load(const DecoderWeights& weights) {
  forget();
  with_layout(sizes_.arithmetic, [&](auto layout) {
    const int64_t hidden = sizes_.hidden, key_size = sizes_.kv_heads * sizes_.head_dim,
                  intermediate = sizes_.intermediate;
    const auto pack = [&](PackedMatrix& matrix, const float* from, int64_t first, int64_t rows,
                          int64_t step) {
      matrix.pack(layout, from, first, rows, step, weights.num_threads);
    };
    const auto pack_whole = [&](PackedMatrix& matrix, const float* from, int64_t out, int64_t in) {
      matrix.reset(layout, out, in);
      pack(matrix, from, 0, out, 1);
    };
    embedding_.assign(weights.embedding, weights.embedding + sizes_.vocab * hidden);
    norm_.assign(weights.norm, weights.norm + hidden);
    pack_whole(head_, weights.head, sizes_.vocab, hidden);
    for (int64_t index = 0; index < sizes_.layers; ++index) {
      const LayerWeights& from = weights.layers[index];
      Layer& layer = layers_[index];
      layer.input_norm.assign(from.input_norm, from.input_norm + hidden);
      layer.post_norm.assign(from.post_norm, from.post_norm + hidden);
      if (from.q_norm) layer.q_norm.assign(from.q_norm, from.q_norm + sizes_.head_dim);
      if (from.k_norm) layer.k_norm.assign(from.k_norm, from.k_norm + sizes_.head_dim);
      layer.qkv.reset(layout, qkv_size_, hidden);
      pack(layer.qkv, from.q, 0, query_size_, 1);
      pack(layer.qkv, from.k, query_size_, key_size, 1);
      pack(layer.qkv, from.v, query_size_ + key_size, key_size, 1);
      if (from.q_bias) {
        layer.qkv.bias = AlignedBytes::zeros<float>(padded(qkv_size_));
        float* const bias = layer.qkv.bias.as<float>();
        std::copy_n(from.q_bias, query_size_, bias);
        std::copy_n(from.k_bias, key_size, bias + query_size_);
        std::copy_n(from.v_bias, key_size, bias + query_size_ + key_size);
      }
      pack_whole(layer.o, from.o, hidden, query_size_);
      layer.gate_up.reset(layout, 2 * padded(intermediate), hidden);
      pack(layer.gate_up, from.gate, 0, intermediate, 2);
      pack(layer.gate_up, from.up, kPanel, intermediate, 2);
      pack_whole(layer.down, from.down, hidden, intermediate);
    }
  });
}

void Decoder::prepare(Workspace& workspace, int64_t longest_prompt, int64_t max_new_tokens) const {
  const auto make = [](AlignedBytes& memory, int64_t rows, int64_t stride) {
    memory = AlignedBytes::zeros<float>(rows * stride);
  };
  make(workspace.hidden, kMaxRows, row_stride(sizes_.hidden));
  make(workspace.normed, kMaxRows, row_stride(sizes_.hidden));
  make(workspace.qkv, kMaxRows, row_stride(qkv_size_));
  make(workspace.attended, kMaxRows, row_stride(query_size_));
  make(workspace.gate_up, kMaxRows, row_stride(2 * padded(sizes_.intermediate)));
  make(workspace.activated, kMaxRows, row_stride(sizes_.intermediate));
  make(workspace.logits, kMaxRows, row_stride(sizes_.vocab));
  make(workspace.scores, kMaxQueries, padded(longest_prompt) + padded(max_new_tokens));
  make(workspace.mixed, kMaxQueries, padded(sizes_.head_dim));
  if (is_bfloat16(sizes_.arithmetic)) {
    const int64_t tokens = std::max(longest_prompt, max_new_tokens);
    const int64_t of_rows =
        kMaxRows * bfloat16_stride(std::max({sizes_.hidden, sizes_.intermediate, query_size_}));
    workspace.rounded = AlignedBytes::zeros<BFloat16>(
        std::max(of_rows, kMaxQueries * bfloat16_stride(std::max(tokens, sizes_.head_dim))));
  }
}

// Rotates queries, scaled by 1 / sqrt(head_dim), and keys, and writes keys and values to their
// caches.
template <typename Vectors>
void Decoder::rotate_and_store(const Layer& layer, int64_t index, const DecoderRow* rows,
                               int64_t num_rows, float* qkv) const {
  const int64_t dim = sizes_.head_dim, half = dim / 2;
  const auto query_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
  for (int64_t i = 0; i < num_rows; ++i) {
    float* const row = qkv + i * row_stride(qkv_size_);
    const float *const cos = cos_.data() + rows[i].position * half, *const sin =
                                                                        sin_.data() +
                                                                        rows[i].position * half;
    const auto rotate = [&](float* x, const std::vector<float>& norm, float scale) {
      if (!norm.empty()) norm_row<Vectors>(x, dim, norm.data(), sizes_.norm_eps, x);
      float* const upper = x + half;
#pragma GCC ivdep  // x and its upper half do not overlap
      for (int64_t d = 0; d < half; ++d) {
        const float x1 = x[d], x2 = upper[d];
        x[d] = (x1 * cos[d] - x2 * sin[d]) * scale;
        upper[d] = (x2 * cos[d] + x1 * sin[d]) * scale;
      }
    };
    float *const keys = row + query_size_, *const values = keys + sizes_.kv_heads * dim;
    for (int64_t head = 0; head < sizes_.heads; ++head)
      rotate(row + head * dim, layer.q_norm, query_scale);
    const bool is_own = rows[i].own != nullptr;
    KeyValueCache& cache = is_own ? *rows[i].own : *rows[i].prefix;
    const int64_t place = (is_own ? rows[i].own_length : rows[i].prefix_length) - 1;
    for (int64_t head = 0; head < sizes_.kv_heads; ++head) {
      rotate(keys + head * dim, layer.k_norm, 1.0f);
      cache.write(index, head, place, keys + head * dim, values + head * dim);
    }
  }
}

// Multiplies the queries of all rows that share a prefix, and of all heads that share keys, with
// the prefix's keys at once.
template <typename Numbers>
void Decoder::attend(int64_t layer, const DecoderRow* rows, int64_t num_rows, const float* qkv,
                     Workspace& workspace) const {
  constexpr int kRows = Numbers::kRows;
  const int64_t repeats = sizes_.heads / sizes_.kv_heads;
  for (int64_t begin = 0, end; begin < num_rows; begin = end) {
    for (end = begin + 1; end < num_rows && rows[end].prefix == rows[begin].prefix;) ++end;
    const int64_t queries = (end - begin) * repeats;
    for (int64_t head = 0; head < sizes_.kv_heads; ++head)
      for (int64_t first = 0; first < queries; first += kRows)
        attend_tile<Numbers>(layer, head, rows, begin * repeats + first,
                             static_cast<int>(std::min<int64_t>(kRows, queries - first)), qkv,
                             workspace);
  }
}

// Attention of `count` queries of a key/value head. Query q belongs to row q / repeats and to query
// head q % repeats of this key/value head.
template <typename Numbers>
void Decoder::attend_tile(int64_t layer, int64_t head, const DecoderRow* rows, int64_t first,
                          int count, const float* qkv, Workspace& workspace) const {
  using Element = typename Numbers::Element;
  using Vectors = typename Numbers::Vectors;
  using Row = TileRow<Vectors>;
  BFloat16* const rounded = workspace.rounded.as<BFloat16>();
  const int64_t repeats = sizes_.heads / sizes_.kv_heads, dim = sizes_.head_dim,
                dim_panels = panels_of(dim);
  const auto row_of = [&](int64_t i) -> const DecoderRow& { return rows[(first + i) / repeats]; };
  const auto place_of = [&](int64_t i) { return (head * repeats + (first + i) % repeats) * dim; };
  const auto query_of = [&](int64_t i) {
    return qkv + (first + i) / repeats * row_stride(qkv_size_) + place_of(i);
  };

  int64_t longest = 0, longest_own = 0;
  for (int i = 0; i < count; ++i) {
    longest = std::max(longest, row_of(i).prefix_length);
    longest_own = std::max(longest_own, row_of(i).own_length);
  }
  const int64_t own_at = padded(longest), width = own_at + padded(longest_own);
  float* const scores =
      workspace.scores.as<float>();  // [count, width]: the prefix, then the row's own tokens
  const KeyValueCache& prefix = *row_of(0).prefix;
  const auto score = [&](int start, int queries, const KeyValueCache& cache, int64_t length,
                         int64_t at) {
    Numbers::multiply(
        queries, [&](int64_t i) { return query_of(start + i); }, dim,
        cache.keys<Element>(layer, head), panels_of(length), cache.keys_panel_stride(), rounded,
        [&](int64_t i, int64_t panel, const Row& row) {
          row.write(scores + (start + i) * width + at + panel * kPanel);
        });
  };
  const auto for_own = [&](const auto& use) {  // use(first query, number of queries, row)
    for (int i = 0, end; i < count; i = end) {
      for (end = i + 1; end < count && &row_of(end) == &row_of(i);) ++end;
      if (row_of(i).own) use(i, end - i, row_of(i));
    }
  };
  score(0, count, prefix, longest, 0);
  for_own([&](int start, int queries, const DecoderRow& of) {
    score(start, queries, *of.own, of.own_length, own_at);
  });

  float sums[kMaxQueries];
  for (int i = 0; i < count; ++i) {
    float* const row = scores + i * width;
    std::fill(row + row_of(i).prefix_length, row + own_at, kMasked);
    std::fill(row + own_at + row_of(i).own_length, row + width, kMasked);
    sums[i] = exponentials<Vectors>(row, width);
  }

  float* const mixed = workspace.mixed.as<float>();  // [count, padded(head_dim)]
  Numbers::multiply(
      count, [&](int64_t i) { return scores + i * width; }, longest,
      prefix.values<Element>(layer, head), dim_panels, prefix.values_panel_stride(), rounded,
      [&](int64_t i, int64_t panel, const Row& row) {
        row.write(mixed + (i * dim_panels + panel) * kPanel);
      });
  for_own([&](int start, int queries, const DecoderRow& of) {
    Numbers::multiply(
        queries, [&](int64_t i) { return scores + (start + i) * width + own_at; }, of.own_length,
        of.own->values<Element>(layer, head), dim_panels, of.own->values_panel_stride(), rounded,
        [&](int64_t i, int64_t panel, Row row) {
          float* const to = mixed + ((start + i) * dim_panels + panel) * kPanel;
          row += Row::read(to);
          row.write(to);
        });
  });
  for (int i = 0; i < count; ++i) {
    float* const to = workspace.attended.as<float>() +
                      (first + i) / repeats * row_stride(query_size_) + place_of(i);
    const float* const from = mixed + i * dim_panels * kPanel;
    for (int64_t d = 0; d < dim; ++d) to[d] = from[d] / sums[i];
  }
}

void Decoder::forward(const DecoderRow* rows, int64_t num_rows, int64_t first,
                      Workspace& workspace) const {
  const TileRegisters tiles(sizes_.arithmetic);
  const int64_t stride = row_stride(sizes_.hidden),
                activated_stride = row_stride(sizes_.intermediate);
  float *x = workspace.hidden.as<float>(), *const y = workspace.normed.as<float>(),
        *qkv = workspace.qkv.as<float>();
  float *const attended = workspace.attended.as<float>(), *const activated =
                                                              workspace.activated.as<float>();
  for (int64_t i = 0; i < num_rows; ++i)
    std::copy_n(embedding_.data() + rows[i].token * sizes_.hidden, sizes_.hidden, x + i * stride);

  // Multiplies the rows of `from` with a matrix.
  const auto multiply = [&](const float* from, int64_t from_stride, const PackedMatrix& matrix,
                            const auto& sink) {
    matrix.multiply(sizes_.arithmetic, num_rows, from, from_stride,
                    workspace.rounded.as<BFloat16>(), sink);
  };
  const auto add_to_hidden = [&](int64_t i, int64_t panel, auto row) {
    float* const to = x + i * stride + panel * kPanel;
    row += row.read(to);
    row.write(to);
  };
  const auto norm = [&](const std::vector<float>& weight) {
    with_widest_floats([&](auto vectors) {
      for (int64_t i = 0; i < num_rows; ++i)
        norm_row<decltype(vectors)>(x + i * stride, sizes_.hidden, weight.data(), sizes_.norm_eps,
                                    y + i * stride);
    });
  };

  for (int64_t index = 0; index < sizes_.layers; ++index) {
    const Layer& layer = layers_[index];
    norm(layer.input_norm);
    const float* const bias = layer.qkv.bias.as<float>();
    multiply(y, stride, layer.qkv, [&](int64_t i, int64_t panel, auto row) {
      if (bias) row += row.read(bias + panel * kPanel);
      row.write(qkv + i * row_stride(qkv_size_) + panel * kPanel);
    });
    with_widest_floats([&](auto vectors) {
      rotate_and_store<decltype(vectors)>(layer, index, rows, num_rows, qkv);
    });
    if (index + 1 == sizes_.layers) {  // no one reads the outputs of the other rows
      rows += first;
      num_rows -= first;
      x += first * stride;
      qkv += first * row_stride(qkv_size_);
      if (num_rows == 0) return;
    }
    with_numbers(sizes_.arithmetic, [&](auto numbers) {
      attend<decltype(numbers)>(index, rows, num_rows, qkv, workspace);
    });
    multiply(attended, row_stride(query_size_), layer.o, add_to_hidden);
    norm(layer.post_norm);
    multiply(y, stride, layer.gate_up, [&](int64_t i, int64_t panel, const auto& row) {
      row.write(workspace.gate_up.as<float>() + i * row_stride(layer.gate_up.out) + panel * kPanel);
    });
    // Not fused with the multiplication: the constants of the exponential would cause register
    // spills there.
    with_widest_floats([&](auto vectors) {
      using Row = TileRow<decltype(vectors)>;
      for (int64_t i = 0; i < num_rows; ++i)
        for (int64_t panel = 0; panel < panels_of(sizes_.intermediate); ++panel) {
          const float* const from = workspace.gate_up.as<float>() +
                                    i * row_stride(layer.gate_up.out) + 2 * panel * kPanel;
          swiglu(Row::read(from), Row::read(from + kPanel))
              .write(activated + i * activated_stride + panel * kPanel);
        }
    });
    multiply(activated, activated_stride, layer.down, add_to_hidden);
  }
  norm(norm_);
  multiply(y, stride, head_, [&](int64_t i, int64_t panel, const auto& row) {
    row.write(workspace.logits.as<float>() + i * row_stride(sizes_.vocab) + panel * kPanel);
  });
}

namespace {

// One of the multiplications by itself, for tests: c [m, n] = a [m, k] b [n, k]^T.
struct PackedProduct {
  Arithmetic arithmetic;
  int64_t m, n, k;
  const float *a, *b;
  float* c;

  MAXRL_FIELDS(arithmetic, m, n, k, a, b, c)
};

void packed_product(const PackedProduct& in, int num_threads) {
  check_available(in.arithmetic);
  const TileRegisters tiles(in.arithmetic);
  PackedMatrix matrix;
  with_layout(in.arithmetic, [&](auto layout) {
    matrix.reset(layout, in.n, in.k);
    matrix.pack(layout, in.b, 0, in.n, 1, num_threads);
  });
  std::vector<BFloat16> rounded((in.m + kMaxBFloat16Rows) * bfloat16_stride(in.k));
  matrix.multiply(in.arithmetic, in.m, in.a, in.k, rounded.data(),
                  [&](int64_t i, int64_t panel, const auto& row) {
                    float columns[kPanel];
                    row.write(columns);
                    const int64_t first = panel * kPanel;
                    std::copy_n(columns, std::min(kPanel, in.n - first), in.c + i * in.n + first);
                  });
}

const bool defined = define_kernel("packed_product", packed_product);

}  // namespace
}  // namespace maxrl::cpu
