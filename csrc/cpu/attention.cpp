// Attention of responses that share a prompt, on a CPU: one online softmax over the prompt's keys
// and a response's own.
//
// A sequence, the responses to it and their keys are a group. Groups are cut between responses into
// pieces with about equally many pairs of a query and a key; cuts depend on lengths alone. A task
// is a piece and some or all key heads. It packs their keys and values into memory of its thread,
// where the gradients of keys and values also add up, each in one order. Where a group has several
// pieces, their gradients of the sequence's keys are added afterwards, in the order of the pieces.
// Results are therefore bitwise the same for any number of threads. A sequence itself is never cut.
#include "../attention.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "attention_tile.h"

namespace maxrl::cpu {
namespace {

constexpr int64_t kPiecePairs =
    1 << 17;  // pairs of a query token and a key token, at least, before a group is cut
constexpr int64_t kMostPieces =
    16;  // of a group, about, which bounds the memory of gradients to be added

// Tokens of the stream. Keys of a piece are those of the sequence, then those of its responses.
struct Piece {
  int64_t sequence, sequence_length;  // first token and number
  bool has_sequence;  // whether the sequence's own queries are in this piece
  int64_t responses, response_tokens;  // first token and number
  const int64_t* response_lengths;
  int64_t sums;  // where the gradients of the sequence's keys go, in numbers of tokens; -1: this
                 // piece has all of them

  int64_t num_keys() const { return sequence_length + response_tokens; }
};

// A sequence whose gradients are added from several pieces.
struct Parts {
  int64_t sequence, length, num_pieces, sums;
};

struct Plan {
  std::vector<Piece> pieces;
  std::vector<Parts> parts;
  int64_t most_keys = 0;  // of a piece
  int64_t summed_tokens = 0;  // of all sums

  explicit Plan(const SharedPromptStream& stream) {
    check(stream);
    int64_t token = 0, response = 0, response_token = 0;
    for (int64_t b = 0; b < stream.num_sequences; ++b) response_token += stream.lengths[b];
    for (int64_t b = 0; b < stream.num_sequences; ++b) {
      const int64_t first = response;
      while (response < stream.num_responses && stream.answers[response] == b) ++response;
      response_token = add(token, stream.lengths[b], response_token,
                           stream.response_lengths + first, response - first);
      token += stream.lengths[b];
    }
    for (const Piece& piece : pieces) most_keys = std::max(most_keys, piece.num_keys());
    if (most_keys >= 1 << 24)
      throw std::invalid_argument("a prompt and its responses may have at most 2^24 tokens");
  }

 private:
  static void check(const SharedPromptStream& stream) {
    int64_t tokens = 0;
    bool is_valid = true;
    for (int64_t b = 0; b < stream.num_sequences; ++b) {
      is_valid &= stream.lengths[b] >= 0;
      tokens += stream.lengths[b];
    }
    for (int64_t i = 0; i < stream.num_responses; ++i) {
      is_valid &= stream.response_lengths[i] >= 0 &&
                  stream.answers[i] >= (i ? stream.answers[i - 1] : 0) &&
                  stream.answers[i] < stream.num_sequences;
      tokens += stream.response_lengths[i];
    }
    if (!is_valid)
      throw std::invalid_argument(
          "lengths must not be negative, and responses must be in the order of sequences");
    if (tokens != stream.num_tokens)
      throw std::invalid_argument("lengths must add up to the " +
                                  std::to_string(stream.num_tokens) + " tokens, got " +
                                  std::to_string(tokens));
  }

  // Adds the pieces of a group, and returns the token after its responses.
  int64_t add(int64_t sequence, int64_t length, int64_t token, const int64_t* lengths,
              int64_t num_responses) {
    const auto pairs_of = [&](int64_t i) {
      return lengths[i] * length + lengths[i] * (lengths[i] + 1) / 2;
    };
    int64_t pairs = length * (length + 1) / 2, total = pairs;
    for (int64_t i = 0; i < num_responses; ++i) total += pairs_of(i);
    const int64_t most = std::max(kPiecePairs, total / kMostPieces);
    const size_t first = pieces.size();
    pieces.push_back({sequence, length, true, token, 0, lengths, -1});
    for (int64_t i = 0; i < num_responses; ++i) {
      if (pairs > 0 && pairs + pairs_of(i) > most) {
        pieces.push_back({sequence, length, false, token, 0, lengths + i, -1});
        pairs = 0;
      }
      pairs += pairs_of(i);
      pieces.back().response_tokens += lengths[i];
      token += lengths[i];
    }
    const auto num_pieces = static_cast<int64_t>(pieces.size() - first);
    if (num_pieces > 1 && length > 0) {
      parts.push_back({sequence, length, num_pieces, summed_tokens});
      for (size_t i = first; i < pieces.size(); ++i, summed_tokens += length)
        pieces[i].sums = summed_tokens;
    }
    return token;
  }
};

// The memory of a thread: for each key head of a task the keys and values of the piece, and in a
// backward pass their gradients.
template <typename Real>
struct Packed {
  std::vector<Real> memory;
  int64_t head_size;

  Packed(int parts, int64_t heads, int64_t keys, int64_t stride)
      : head_size((keys + 16) * stride) {  // more is read: kTail
    memory.resize(parts * heads * head_size + 64 / sizeof(Real));
  }
  Real* at(int part, int64_t head, int64_t num_heads) {
    const auto address = (reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64;
    return reinterpret_cast<Real*>(address) + (part * num_heads + head) * head_size;
  }
};

template <typename Element, typename Tile, bool is_backward>
struct Task {
  using Real = typename Tile::Real;
  using Vectors = typename Tile::Vectors;
  static constexpr int kStride = Tile::kStride, kRows = Tile::kRows, kLanes = Tile::kLanes;
  static constexpr int kParts = is_backward ? 4 : 2;

  const SharedPromptAttention<Element, Real>& in;
  const Piece& piece;
  int64_t first_head, num_heads;  // key heads
  Packed<Real>& packed;
  Tile& tile;
  Real* sums;  // [2, summed tokens, key heads, kStride]
  int64_t summed_tokens;
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
    for_tokens([&](int64_t key, int64_t token, int64_t count) {
      pack(in.k + token * row_size(), count, 0, key);
      pack(in.v + token * row_size(), count, 1, key);
    });
    if (piece.has_sequence && piece.sequence_length)
      attend(piece.sequence, piece.sequence_length, 0, 0, &piece.sequence_length);
    if (piece.response_tokens)
      attend(piece.responses, piece.response_tokens, piece.sequence_length, piece.sequence_length,
             piece.response_lengths);
    if constexpr (is_backward)
      for_tokens([&](int64_t key, int64_t token, int64_t count) {
        if (piece.sums >= 0 && key < piece.sequence_length) {
          add_up_later(0, count);
          add_up_later(1, count);
        } else {
          unpack(2, key, in.grad_k + token * row_size(), count);
          unpack(3, key, in.grad_v + token * row_size(), count);
        }
      });
  }

 private:
  int64_t row_size() const { return in.key_heads * in.head_dim; }

  template <typename Use>
  void for_tokens(const Use& use) const {
    use(0, piece.sequence, piece.sequence_length);
    use(piece.sequence_length, piece.responses, piece.response_tokens);
  }
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
  void add_up_later(int64_t which, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t head = 0; head < num_heads; ++head) {
        const int64_t row =
            ((which * summed_tokens + piece.sums + i) * in.key_heads + first_head + head) * kStride;
        std::copy_n(packed.at(static_cast<int>(2 + which), head, num_heads) + i * kStride, kStride,
                    sums + row);
      }
  }

  // Queries of `tokens` tokens from `token` on, which are the packed keys from `at` on and also see
  // the first `shared` keys. lengths: of the sequences among them.
  void attend(int64_t token, int64_t tokens, int64_t at, int64_t shared, const int64_t* lengths) {
    int64_t start = 0, row_token = 0,
            row_head = 0;  // of the next row: its sequence's first token, its token, and its head
    for (int64_t row = 0; row < tokens * per_key; row += kRows) {
      const int count = static_cast<int>(std::min<int64_t>(kRows, tokens * per_key - row));
      for (int r = 0; r < count; ++r) {
        while (row_token >= start + *lengths) start += *lengths++;
        tile.places[r] = (token + row_token) * in.heads + first_head * per_key + row_head;
        tile.first[r] = static_cast<Real>(at + start);
        tile.last[r] = static_cast<Real>(at + row_token);
        if (++row_head == per_key) row_head = 0, ++row_token;
      }
      for (int r = count; r < kRows; ++r)  // as the last one
        tile.places[r] = tile.places[r - 1], tile.first[r] = tile.first[r - 1],
        tile.last[r] = tile.last[r - 1];
      const int64_t next =
          kRows / per_key * in.heads;  // places from a row to about the same one of the next tile
      const bool has_next = row + 2 * kRows <= tokens * per_key;
      for (int64_t head = 0; head < num_heads; ++head) {
        for (int r = 0; has_next && r < kRows; ++r) prefetch((tile.places[r] + next) * in.head_dim);
        if constexpr (is_backward)
          backward_tile(head, count, shared);
        else
          forward_tile(head, count, shared);
        for (int r = 0; r < kRows; ++r) tile.places[r] += per_key;
      }
    }
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

  void forward_tile(int64_t head, int count, int64_t shared) {
    const Real *const keys = packed.at(0, head, num_heads), *const values =
                                                                packed.at(1, head, num_heads);
    tile.load(in.q, in.head_dim, scale * kLog2E, tile.q, nullptr);
    tile.begin_forward();
    tile.for_blocks(count, shared, [&](auto is_masked, int vector, int64_t begin, int n) {
      tile.template forward_block<decltype(is_masked)::value>(vector, begin, n, keys, values);
    });
    typename Tile::Reals factors[Tile::kVectors];
    tile.end_forward(factors);
    for (int r = 0; r < count; ++r) in.lse[tile.places[r]] = tile.lse[r];
    tile.store(in.o, in.head_dim, count, factors);
  }

  void backward_tile(int64_t head, int count, int64_t shared) {
    Real* of[4];
    for (int part = 0; part < 4; ++part) of[part] = packed.at(part, head, num_heads);
    tile.load(in.q, in.head_dim, scale * kLog2E, tile.q, tile.q_rows);
    tile.load(in.grad, in.head_dim, scale, tile.g, tile.g_rows);
    tile.load(static_cast<const Element*>(in.o), in.head_dim, Real(1), tile.o, nullptr);
    tile.begin_backward();
    for (int r = 0; r < kRows; ++r)
      tile.lse[r] = r < count ? in.lse[tile.places[r]] : Real(1e30);  // others: p = 0
    tile.for_blocks(count, shared, [&](auto is_masked, int vector, int64_t begin, int n) {
      tile.template backward_block<decltype(is_masked)::value>(vector, begin, n, of[0], of[1],
                                                               of[2], of[3]);
    });
    typename Tile::Reals ones[Tile::kVectors];
    for (auto& one : ones) one = typename Tile::Reals{} + Real(1);
    tile.store(in.grad_q, in.head_dim, count, ones);
  }

  static constexpr Real kLog2E = 1.442695040888963407359924681001892137;
};

// Adds the pieces' gradients of a sequence's keys, in the order of the pieces.
template <typename Element, typename Vectors>
void add_up(const SharedPromptAttention<Element, typename Vectors::Real>& in, const Parts& parts,
            int64_t stride, const typename Vectors::Real* sums, Element* to) {
  compiled_for(Vectors{}, [&] {
    for (int64_t i = 0; i < parts.length; ++i)
      for (int64_t head = 0; head < in.key_heads; ++head)
        for (int64_t d = 0; d < in.head_dim; d += Vectors::kLanes) {
          auto total = Vectors::all(0);
          for (int64_t piece = 0; piece < parts.num_pieces; ++piece)
            total += Vectors::read(
                sums + ((parts.sums + piece * parts.length + i) * in.key_heads + head) * stride +
                d);
          store_lanes<Vectors>(to + ((parts.sequence + i) * in.key_heads + head) * in.head_dim + d,
                               in.head_dim - d, total);
        }
  });
}

template <typename Element, typename Tile, bool is_backward>
void run(const SharedPromptAttention<Element, typename Tile::Real>& in, int num_threads) {
  using Real = typename Tile::Real;
  using Vectors = typename Tile::Vectors;
  const Plan plan(in.stream);
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

template <bool is_backward, typename Element, typename Real>
void attend(const SharedPromptAttention<Element, Real>& in, int num_threads) {
  if (in.head_dim < 1 || in.head_dim > 256 || in.key_heads < 1 || in.heads % in.key_heads)
    throw std::invalid_argument(
        "attention needs heads of 1 to 256, and a number of them that is a multiple of the key "
        "heads");
  with_widest<Real>([&](auto vectors) {
    using Vectors = decltype(vectors);
    if (in.head_dim <= 16)
      return run<Element, AttentionTile<Vectors, 16>, is_backward>(in, num_threads);
    if constexpr (sizeof(Real) == 4) {  // doubles are for comparisons, and have fewer strides
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
  return define_kernel(name, attend<is_backward, float, float>, attend<is_backward, double, double>,
                       attend<is_backward, BFloat16, float>);
}
const bool defined =
    define<false>("shared_prompt_attention") && define<true>("shared_prompt_attention_backward");

}  // namespace
}  // namespace maxrl::cpu
