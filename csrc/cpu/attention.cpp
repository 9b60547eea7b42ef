// Attention over a forest of prefixes, on a CPU: one online softmax over the keys of the segments
// above and a segment's own.
//
// The trees are cut between segments into pieces with about equally many pairs of a query and a
// key; cuts depend on lengths alone. A task is a piece and some or all key heads. It packs the keys
// and values of the piece, and of the segments above it, into memory of its thread, where the
// gradients of keys and values also add up, each in one order. Where several pieces see a segment,
// their gradients of its keys are added afterwards, in the order of the pieces. Results are
// therefore bitwise the same for any number of threads. A segment itself is never cut.
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../layer.h"
#include "aligned.h"
#include "attention_tile.h"

namespace maxrl::cpu {
namespace {

constexpr int64_t kPiecePairs =
    1 << 17;  // pairs of a query token and a key token, at least, before a tree is cut
constexpr int64_t kMostPieces =
    16;  // of a tree, about, which bounds the memory of gradients to be added

// A segment whose keys a piece has packed.
struct Segment {
  int64_t token, length;  // first token and number
  int64_t key, end;  // the first packed key, and where the keys of the segments below it end
  int64_t parent;  // among the piece's segments; -1: none
  int64_t sums;  // where the gradients of its keys go, in numbers of tokens; -1: this piece has all
};

// First the segments above, from the root down, then the piece's own, whose tokens are its queries.
struct Piece {
  std::vector<Segment> segments;
  int64_t num_above, keys_above;

  int64_t num_keys() const { return segments.back().key + segments.back().length; }
};

// A segment whose gradients are added from several pieces.
struct Parts {
  int64_t token, length;
  std::vector<int64_t> sums;
};

struct Plan {
  std::vector<Piece> pieces;
  std::vector<Parts> parts;
  int64_t most_keys = 0;  // of a piece
  int64_t summed_tokens = 0;  // of all sums

  explicit Plan(const Forest& forest) : in(forest), places(forest.num_segments) {
    find_places();
    for (int64_t root = 0, next = 0; root < in.num_segments; root = next) {
      int64_t total = 0, pairs = 0, begin = root;
      for (; next == root || (next < in.num_segments && in.parents[next] >= 0); ++next)
        total += pairs_of(next);
      const int64_t most = std::max(kPiecePairs, total / kMostPieces);
      for (int64_t s = root; s < next; pairs += pairs_of(s++))
        if (s > begin && pairs + pairs_of(s) > most) {
          add(begin, s);
          begin = s, pairs = 0;
        }
      add(begin, next);
    }
    for (const Piece& piece : pieces) most_keys = std::max(most_keys, piece.num_keys());
    if (most_keys >= 1 << 24)
      throw std::invalid_argument("a tree of segments may have at most 2^24 tokens");
  }

 private:
  struct Place {  // of a segment
    int64_t token, above, end;  // first token; tokens above; where the tokens below it end
    int64_t piece, at;  // the piece that has its queries, and where
    int64_t part = -1;
  };
  const Forest& in;
  std::vector<Place> places;

  void find_places() {
    int64_t token = 0;
    std::vector<int64_t> path;  // the segments above the next one that are not over
    const auto pop = [&] {
      places[path.back()].end = token;
      path.pop_back();
    };
    for (int64_t s = 0; s < in.num_segments; ++s) {
      const int64_t parent = in.parents[s];
      while (!path.empty() && path.back() != parent) pop();
      if (in.lengths[s] < 1 || parent < -1 || (parent >= 0 && path.empty()))
        throw std::invalid_argument(
            "segments must have at least 1 token, and be in depth-first order after the segments "
            "above them; segment " +
            std::to_string(s) + " has " + std::to_string(in.lengths[s]) +
            " tokens and the parent " + std::to_string(parent));
      places[s].token = token;
      places[s].above = path.empty() ? 0 : places[parent].above + in.lengths[parent];
      path.push_back(s);
      token += in.lengths[s];
    }
    while (!path.empty()) pop();
    if (token != in.num_tokens)
      throw std::invalid_argument("lengths must add up to the " + std::to_string(in.num_tokens) +
                                  " tokens, got " + std::to_string(token));
  }

  int64_t pairs_of(int64_t s) const {
    return in.lengths[s] * places[s].above + in.lengths[s] * (in.lengths[s] + 1) / 2;
  }

  // Adds the piece of the segments begin..stop - 1.
  void add(int64_t begin, int64_t stop) {
    Piece piece;
    const Place& first = places[begin];
    const auto index = static_cast<int64_t>(pieces.size());
    const int64_t end = places[stop - 1].token + in.lengths[stop - 1];
    const auto add_segment = [&](int64_t s, int64_t key, int64_t parent, int64_t sums) {
      piece.segments.push_back({places[s].token, in.lengths[s], key,
                                std::min(places[s].end, end) - first.token + first.above, parent,
                                sums});
    };
    std::vector<int64_t> path;
    for (int64_t s = in.parents[begin]; s >= 0; s = in.parents[s]) path.push_back(s);
    piece.num_above = static_cast<int64_t>(path.size()), piece.keys_above = first.above;
    for (int64_t i = 0; i < piece.num_above; ++i) {
      const int64_t s = path[piece.num_above - 1 - i];
      add_segment(s, places[s].above, i - 1, add_sums(s));
    }
    for (int64_t s = begin; s < stop; ++s) {
      const int64_t parent = in.parents[s];
      places[s].piece = index, places[s].at = piece.num_above + s - begin;
      add_segment(s, places[s].token - first.token + first.above,
                  parent >= begin ? places[parent].at : depth(piece, parent), -1);
    }
    pieces.push_back(std::move(piece));
  }
  // Where a segment above is among those of a piece.
  int64_t depth(const Piece& piece, int64_t s) const {
    int64_t i = s < 0 ? -1 : piece.num_above - 1;
    while (i >= 0 && piece.segments[i].token != places[s].token) --i;
    return i;
  }
  // Returns where another piece's gradients of a segment go; before the first, its own piece's.
  int64_t add_sums(int64_t s) {
    const auto next = [&] { return std::exchange(summed_tokens, summed_tokens + in.lengths[s]); };
    if (places[s].part < 0) {
      places[s].part = static_cast<int64_t>(parts.size());
      const int64_t own = pieces[places[s].piece].segments[places[s].at].sums = next();
      parts.push_back({places[s].token, in.lengths[s], {own}});
    }
    parts[places[s].part].sums.push_back(next());
    return parts[places[s].part].sums.back();
  }
};

// The memory of a thread: for each key head of a task the keys and values of the piece, and in a
// backward pass their gradients.
template <typename Real>
struct Packed {
  std::vector<Real> last;  // of each key the place of the last query that sees it
  int64_t head_size;
  AlignedBytes memory;

  Packed(int parts, int64_t heads, int64_t keys, int64_t stride)
      : last(keys + 16), head_size((keys + 16) * stride),  // more is read: kTail
        memory(parts * heads * head_size * static_cast<int64_t>(sizeof(Real))) {}
  Real* at(int part, int64_t head, int64_t num_heads) {
    return memory.as<Real>() + (part * num_heads + head) * head_size;
  }
};

template <typename Element, typename Tile, bool is_backward>
struct Task {
  using Real = typename Tile::Real;
  using Vectors = typename Tile::Vectors;
  static constexpr int kStride = Tile::kStride, kRows = Tile::kRows, kLanes = Tile::kLanes;
  static constexpr int kParts = is_backward ? 4 : 2;

  const TreeAttention<Element>& in;
  const Piece& piece;
  int64_t first_head, num_heads;  // key heads
  Packed<Real>& packed;
  Tile& tile;
  Real* sums;  // [2, summed tokens, key heads, kStride]
  int64_t summed_tokens;
  std::vector<int64_t> path = {};
  const int64_t per_key = in.heads / in.key_heads;
  const Real scale = Real(1) / std::sqrt(static_cast<Real>(in.head_dim));

  void run() {
    for (int64_t head = 0; head < num_heads; ++head)
      for (int part = 0; part < kParts;
           ++part) {  // dimensions up to a multiple of 16, keys after the last, gradients
        const int64_t begin = part >= 2 || in.head_dim < kStride ? 0 : piece.num_keys(),
                      end = piece.num_keys() + Tile::kTail;
        Real* const to = packed.at(part, head, num_heads);
        std::fill(to + begin * kStride, to + end * kStride, Real(0));
      }
    for (const Segment& segment : piece.segments) {
      pack(in.k + segment.token * row_size(), segment.length, 0, segment.key);
      pack(in.v + segment.token * row_size(), segment.length, 1, segment.key);
      std::fill_n(packed.last.begin() + segment.key, segment.length,
                  static_cast<Real>(segment.end - 1));
    }
    tile.last = packed.last.data();
    attend();
    if constexpr (!is_backward) return;
    for (const Segment& segment : piece.segments)
      if (segment.sums >= 0) {
        add_up_later(0, segment);
        add_up_later(1, segment);
      } else {
        unpack(2, segment.key, in.grad_k + segment.token * row_size(), segment.length);
        unpack(3, segment.key, in.grad_v + segment.token * row_size(), segment.length);
      }
  }

 private:
  int64_t row_size() const { return in.key_heads * in.head_dim; }

  // use(numbers of the stream, packed numbers, count), for up to lanes of them at a time.
  template <typename From, typename Use>
  void for_lanes(From* stream, int64_t count, int part, int64_t key, const Use& use) {
    Real* const first = packed.at(part, 0, num_heads) + key * kStride;
    const int64_t token_size = row_size(), head_dim = in.head_dim, head_size = packed.head_size,
                  heads = num_heads;
    stream += first_head * head_dim;
    compiled_for(Vectors{}, [=] {
      for (int64_t i = 0; i < count; ++i)
        for (int64_t head = 0; head < heads; ++head) {
          From* const row = stream + i * token_size + head * head_dim;
          Real* const own = first + head * head_size + i * kStride;
          int64_t d = 0;
          for (; d + kLanes <= head_dim; d += kLanes) use(row + d, own + d, kLanes);
          if (d < head_dim) use(row + d, own + d, head_dim - d);
        }
    });
  }
  void pack(const Element* from, int64_t count, int part, int64_t key) {
    for_lanes(from, count, part, key, [](const Element* row, Real* own, int64_t left) {
      Vectors::write(own, load_lanes<Vectors>(row, left));
    });
  }
  void unpack(int part, int64_t key, Element* to, int64_t count) {
    for_lanes(to, count, part, key, [](Element* row, const Real* own, int64_t left) {
      store_lanes<Vectors>(row, left, Vectors::read(own));
    });
  }
  void add_up_later(int64_t which, const Segment& segment) {
    for (int64_t i = 0; i < segment.length; ++i)
      for (int64_t head = 0; head < num_heads; ++head) {
        const int64_t row =
            ((which * summed_tokens + segment.sums + i) * in.key_heads + first_head + head) *
            kStride;
        std::copy_n(
            packed.at(static_cast<int>(2 + which), head, num_heads) + (segment.key + i) * kStride,
            kStride, sums + row);
      }
  }

  void attend() {
    const int64_t above = piece.keys_above, tokens = piece.num_keys() - above,
                  first_token = piece.segments[piece.num_above].token;
    int64_t segment = piece.num_above, row_token = 0, row_head = 0;  // of the next row
    int64_t segment_of[Tile::kVectors];  // of each vector's first row
    for (int64_t row = 0; row < tokens * per_key; row += kRows) {
      const int count = static_cast<int>(std::min<int64_t>(kRows, tokens * per_key - row));
      for (int r = 0; r < count; ++r) {
        const int64_t place = above + row_token;
        if (place == piece.segments[segment].key + piece.segments[segment].length) ++segment;
        if (r % kLanes == 0) segment_of[r / kLanes] = segment;
        tile.places[r] = (first_token + row_token) * in.heads + first_head * per_key + row_head;
        tile.place[r] = static_cast<Real>(place);
        if (++row_head == per_key) row_head = 0, ++row_token;
      }
      for (int r = count; r < kRows; ++r)  // as the last one
        tile.places[r] = tile.places[r - 1], tile.place[r] = tile.place[r - 1];
      find_ranges(count, segment_of);
      const int64_t next =
          kRows / per_key * in.heads;  // places from a row to about the same one of the next tile
      const bool has_next = row + 2 * kRows <= tokens * per_key;
      for (int64_t head = 0; head < num_heads; ++head) {
        for (int r = 0; has_next && r < kRows; ++r) prefetch((tile.places[r] + next) * in.head_dim);
        if constexpr (is_backward)
          backward_tile(head, count);
        else
          forward_tile(head, count);
        for (int r = 0; r < kRows; ++r) tile.places[r] += per_key;
      }
    }
  }

  // The keys that `count` rows see: those before all rows in segments above all of them, which are
  // not masked, and then for each vector of rows the rest of the segments above its first row, and
  // its rows' own keys.
  void find_ranges(int count, const int64_t* segment_of) {
    const auto place = [&](int r) { return static_cast<int64_t>(tile.place[r]); };
    tile.ranges.clear();
    int64_t seen_by_all = 0;
    const int64_t end = place(count - 1) + 1;
    for_path(segment_of[0], [&](const Segment& segment) {
      if (segment.end < end) return;
      const int64_t stop = std::min(segment.key + segment.length, place(0) + 1);
      tile.add_range(false, 0, segment.key, stop);
      seen_by_all = stop;
    });
    for (int i = 0; i * kLanes < count; ++i) {
      const int64_t first = place(i * kLanes);
      for_path(segment_of[i], [&](const Segment& segment) {
        tile.add_range(true, i, std::max(segment.key, seen_by_all),
                       std::min(segment.key + segment.length, first));
      });
      tile.add_range(true, i, std::max(first, seen_by_all),
                     place(std::min(count, (i + 1) * kLanes) - 1) + 1);
    }
  }
  // use(segment) for the segments above one, from the root down, and itself.
  template <typename Use>
  void for_path(int64_t segment, const Use& use) {
    path.clear();
    for (; segment >= 0; segment = piece.segments[segment].parent) path.push_back(segment);
    for (auto at = path.rbegin(); at != path.rend(); ++at) use(piece.segments[*at]);
  }

  // A head of a token in the stream's tensors of queries.
  void prefetch(int64_t place) const {
    for (int64_t d = 0; d < in.head_dim; d += 64 / sizeof(Element)) {
      __builtin_prefetch(in.q + place + d, 0);
      __builtin_prefetch(in.o + place + d, is_backward ? 0 : 1);
      if constexpr (is_backward) {
        __builtin_prefetch(in.grad + place + d, 0);
        __builtin_prefetch(in.grad_q + place + d, 1);
      }
    }
  }

  void forward_tile(int64_t head, int count) {
    const Real *const keys = packed.at(0, head, num_heads), *const values =
                                                                packed.at(1, head, num_heads);
    tile.load(in.q, in.head_dim, scale * kLog2E, tile.q, nullptr);
    tile.begin_forward();
    tile.for_blocks([&](auto is_masked, int vector, int64_t begin, int n) {
      tile.template forward_block<decltype(is_masked)::value>(vector, begin, n, keys, values);
    });
    typename Tile::Reals factors[Tile::kVectors];
    tile.end_forward(factors);
    for (int r = 0; r < count; ++r) in.lse[tile.places[r]] = tile.lse[r];
    tile.store(in.o, in.head_dim, count, factors);
  }

  void backward_tile(int64_t head, int count) {
    Real* of[4];
    for (int part = 0; part < 4; ++part) of[part] = packed.at(part, head, num_heads);
    tile.load(in.q, in.head_dim, scale * kLog2E, tile.q, tile.q_rows);
    tile.load(in.grad, in.head_dim, scale, tile.g, tile.g_rows);
    tile.load(static_cast<const Element*>(in.o), in.head_dim, Real(1), tile.o, nullptr);
    tile.begin_backward();
    for (int r = 0; r < kRows; ++r)
      tile.lse[r] = r < count ? in.lse[tile.places[r]] : Real(1e30);  // others: p = 0
    tile.for_blocks([&](auto is_masked, int vector, int64_t begin, int n) {
      tile.template backward_block<decltype(is_masked)::value>(vector, begin, n, of[0], of[1],
                                                               of[2], of[3]);
    });
    typename Tile::Reals ones[Tile::kVectors];
    for (auto& one : ones) one = typename Tile::Reals{} + Real(1);
    tile.store(in.grad_q, in.head_dim, count, ones);
  }

  static constexpr Real kLog2E = 1.442695040888963407359924681001892137;
};

// Adds the pieces' gradients of a segment's keys, in the order of the pieces.
template <typename Element, typename Vectors>
void add_up(const TreeAttention<Element>& in, const Parts& parts, int64_t stride,
            const typename Vectors::Real* sums, Element* to) {
  compiled_for(Vectors{}, [&] {
    for (int64_t i = 0; i < parts.length; ++i)
      for (int64_t head = 0; head < in.key_heads; ++head)
        for (int64_t d = 0; d < in.head_dim; d += Vectors::kLanes) {
          auto total = Vectors::all(0);
          for (const int64_t from : parts.sums)
            total += Vectors::read(sums + ((from + i) * in.key_heads + head) * stride + d);
          store_lanes<Vectors>(to + ((parts.token + i) * in.key_heads + head) * in.head_dim + d,
                               in.head_dim - d, total);
        }
  });
}

template <typename Element, typename Tile, bool is_backward>
void run(const TreeAttention<Element>& in, int num_threads) {
  using Real = typename Tile::Real;
  using Vectors = typename Tile::Vectors;
  const Plan plan(in.forest);
  const auto num_pieces = static_cast<int64_t>(plan.pieces.size());
  // Small heads of a token stand together in memory, and share a task where there are tasks enough.
  // Results are the same.
  const int64_t heads_of_task =
      Tile::kStride < 64 && num_pieces >= 2 * num_threads ? in.key_heads : 1;
  const int64_t tasks_of_piece = in.key_heads / heads_of_task,
                num_tasks = num_pieces * tasks_of_piece;
  const auto threads =
      static_cast<int>(std::min<int64_t>(num_threads, std::max<int64_t>(num_tasks, 1)));
  std::vector<Packed<Real>> packed;
  for (int i = 0; i < threads; ++i)
    packed.emplace_back(is_backward ? 4 : 2, heads_of_task, plan.most_keys, Tile::kStride);
  const std::unique_ptr<Tile[]> tiles(new Tile[threads]);
  const int64_t size_of_sums = is_backward ? plan.summed_tokens * in.key_heads * Tile::kStride : 0;
  const std::unique_ptr<Real[]> sums(new Real[2 * size_of_sums]);
#pragma omp parallel num_threads(threads)
  {
    Tile& tile = tiles[omp_get_thread_num()];
    tile.dims = static_cast<int>((in.head_dim + 15) / 16 * 16);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < num_tasks; ++task) {
      const Piece& piece = plan.pieces[task / tasks_of_piece];
      const int64_t first_head = task % tasks_of_piece * heads_of_task;
      Packed<Real>& own = packed[omp_get_thread_num()];
      Task<Element, Tile, is_backward>{in,  piece, first_head, heads_of_task,
                                       own, tile,  sums.get(), plan.summed_tokens}
          .run();
    }
    if constexpr (is_backward) {
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < plan.parts.size(); ++i) {
        add_up<Element, Vectors>(in, plan.parts[i], Tile::kStride, sums.get(), in.grad_k);
        add_up<Element, Vectors>(in, plan.parts[i], Tile::kStride, sums.get() + size_of_sums,
                                 in.grad_v);
      }
    }
  }
}

template <bool is_backward, typename Element>
void attend(const TreeAttention<Element>& in, int num_threads) {
  if (in.head_dim < 1 || in.head_dim > 256 || in.key_heads < 1 || in.heads % in.key_heads)
    throw std::invalid_argument(
        "attention needs heads of 1 to 256, and a number of them that is a multiple of the key "
        "heads");
  with_widest<RealOf<Element>>([&](auto vectors) {
    using Vectors = decltype(vectors);
    if (in.head_dim <= 16)
      return run<Element, AttentionTile<Vectors, 16>, is_backward>(in, num_threads);
    if constexpr (!std::is_same_v<Element, double>) {  // which are for comparisons
      if (in.head_dim <= 64)
        return run<Element, AttentionTile<Vectors, 64>, is_backward>(in, num_threads);
      if (in.head_dim <= 128)
        return run<Element, AttentionTile<Vectors, 128>, is_backward>(in, num_threads);
    }
    run<Element, AttentionTile<Vectors, 256>, is_backward>(in, num_threads);
  });
}

template <bool is_backward>
bool define(const char* name) {
  return define_kernel(name, attend<is_backward, float>, attend<is_backward, double>,
                       attend<is_backward, BFloat16>);
}
const bool defined = define<false>("tree_attention") && define<true>("tree_attention_backward");

}  // namespace
}  // namespace maxrl::cpu
