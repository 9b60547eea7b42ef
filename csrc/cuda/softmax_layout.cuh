// Where the elements of a row of logits are, and which of them a block or a thread has.
#pragma once
#include <cstdint>

#include "elements.cuh"

namespace maxrl::cuda {

// The layout of a row in memory: a few elements up to the first 16-byte boundary, chunks, a few
// elements. Sizes have 32 bits, so that an index takes one register.
template <typename Element>
struct RowLayout {
  int head, num_chunks, size;
  __device__ RowLayout(const Element* row, int size) : size(size) {
    const auto beyond = static_cast<int>(reinterpret_cast<uintptr_t>(row) % kAccess);
    const int wanted = beyond ? (kAccess - beyond) / static_cast<int>(sizeof(Element)) : 0;
    head = wanted < size ? wanted : size;
    num_chunks = (size - head) / Chunk<Element>::kSize;
  }
  __device__ int tail() const { return head + num_chunks * Chunk<Element>::kSize; }
  // The first chunk of a block of a cluster.
  __device__ int first_of(unsigned rank, unsigned cluster_size) const {
    const unsigned all = num_chunks, of_block = (all + cluster_size - 1) / cluster_size;
    return static_cast<int>(rank * of_block < all ? rank * of_block : all);
  }
};

// The part of a row that a block reads and writes: some of the chunks; the first block also has the
// head, the last the tail.
template <typename Element>
struct RowPart {
  RowLayout<Element> layout;
  int first, last;
  bool has_head, has_tail;

  __device__ RowPart(const Element* row, int64_t vocab_size, unsigned rank, unsigned cluster_size)
      : layout(row, static_cast<int>(vocab_size)), first(layout.first_of(rank, cluster_size)),
        last(layout.first_of(rank + 1, cluster_size)), has_head(rank == 0),
        has_tail(rank == cluster_size - 1) {}
  // Calls use(index in the row) for the elements of this thread in the head and the tail.
  template <typename Use>
  __device__ void for_ends(int thread, const Use& use) const {
    if (has_head && thread < layout.head) use(thread);
    if (has_tail && layout.tail() + thread < layout.size) use(layout.tail() + thread);
  }
  __device__ int start_of(int chunk) const { return layout.head + chunk * Chunk<Element>::kSize; }
  // Which element of a chunk the target is; of the other chunks, none.
  __device__ unsigned target_in(int chunk, int target) const {
    return static_cast<unsigned>(target - start_of(chunk));
  }
  // Whether this thread of a team writes element i.
  __device__ bool is_written_by(int thread, int team, int i) const {
    if (i < layout.head) return has_head && i == thread;
    if (i >= layout.tail()) return has_tail && i - layout.tail() == thread;
    const int chunk = (i - layout.head) / Chunk<Element>::kSize;
    return chunk >= first && chunk < last && (chunk - first) % team == thread;
  }
};

// Writes the gradient of a row, in chunks of `size` logits.
template <int size, typename Gradient>
struct ChunkWriter {
  Gradient* gradient;
  bool is_aligned;

  template <typename Element>
  __device__ ChunkWriter(Gradient* gradient, const RowPart<Element>& part)
      : gradient(gradient), is_aligned(reinterpret_cast<uintptr_t>(gradient + part.layout.head) %
                                           (size * sizeof(Gradient)) ==
                                       0) {}
  __device__ void write(int start, const Chunk<Gradient>& out) const {
    if (is_aligned)
      out.template write<size>(gradient + start);
    else
      for (int i = 0; i < size; ++i) gradient[start + i] = out.elements[i];
  }
};

// Writes chunk_of(the number of a chunk of logits) for this thread's chunks, and value_at(index)
// for its elements in the head and the tail.
template <int kTeam, typename Gradient, typename Element, typename ChunkOf, typename ValueAt>
__device__ void write_row(Gradient* gradient, const RowPart<Element>& part, int thread,
                          const ChunkOf& chunk_of, const ValueAt& value_at) {
  const ChunkWriter<Chunk<Element>::kSize, Gradient> writer(gradient, part);
  part.for_ends(thread, [&](int i) { gradient[i] = value_at(i); });
  for (int c = part.first + thread; c < part.last; c += kTeam)
    writer.write(part.start_of(c), chunk_of(c));
}

// The same for a gradient that overwrites the first half of its row of logits, which the team still
// reads, from the start: sync_team() comes between reading some logits and writing over them or
// others that have been read. The row has no head.
template <int kTeam, typename Gradient, typename Element, typename ChunkOf, typename ValueAt,
          typename Sync>
__device__ void write_over_row(Gradient* gradient, const RowPart<Element>& part, int thread,
                               const ChunkOf& chunk_of, const ValueAt& value_at,
                               const Sync& sync_team) {
  constexpr int kSize = Chunk<Element>::kSize, kTogether = 4;
  Gradient end{};
  part.for_ends(thread, [&](int i) { end = value_at(i); });
  for (int first = part.first; first < part.last; first += kTogether * kTeam) {
    Chunk<Gradient> out[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k)
      if (const int c = first + k * kTeam + thread; c < part.last) out[k] = chunk_of(c);
    sync_team();
#pragma unroll
    for (int k = 0; k < kTogether; ++k)
      if (const int c = first + k * kTeam + thread; c < part.last)
        out[k].template write<kSize>(gradient + part.start_of(c));
  }
  sync_team();
  part.for_ends(thread, [&](int i) { gradient[i] = end; });
}

}  // namespace maxrl::cuda
