// Samples the next token of every row from its logits, by inverting the CDF in the order of the
// vocabulary, and appends it to the row, in one launch. One block computes one row, and the result
// depends only on that row.
//
// The block reads the logits once, in tiles of a warp, each of which has its own greatest logit and
// sum. Then one warp finds the token's tile, and reads that again.
#include <algorithm>
#include <stdexcept>

#include "../decoding.h"
#include "../random.h"
#include "elements.cuh"
#include "launch.h"
#include "reduce.cuh"

namespace maxrl::cuda {
namespace {

constexpr int kMaxWarps = 32;
constexpr int kTogether = 4;  // loads of a lane in flight
constexpr int kTileChunks = kTogether * kWarp;
constexpr int kSize = Chunk<float>::kSize;
constexpr int kNone = INT32_MIN;  // no number of a token

// The logits of one row, in tiles. A row that does not start at a multiple of 16 bytes, and the
// last tile, are read one by one.
struct Logits {
  static constexpr int kTile = kTileChunks * kSize;
  const float* data;
  const int size;  // tokens

  // The first token of this lane's k-th chunk of a tile.
  __device__ static int first_of(int tile, int k) {
    return tile * kTile + (k * kWarp + static_cast<int>(threadIdx.x) % kWarp) * kSize;
  }
  // Reads this lane's chunks of a tile; past the end logits are -inf.
  __device__ void read(int tile, Chunk<float> (&chunks)[kTogether]) const {
    if (reinterpret_cast<uintptr_t>(data) % kAccess == 0 && (tile + 1) * kTile <= size) {
#pragma unroll
      for (int k = 0; k < kTogether; ++k) chunks[k] = Chunk<float>(data + first_of(tile, k));
      return;
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k)
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const int token = first_of(tile, k) + i;
        chunks[k].elements[i] = token < size ? data[token] : -INFINITY;
      }
  }
};

// A token's weight is 2^((logit - top) rate), with the top of its tile.
struct Tile {
  float top, sum;

  __device__ float weight(float logit, float rate) const {
    return exponential2((logit - (top > -INFINITY ? top : 0.0f)) * rate);
  }
};

__device__ Tile sum_of(const Logits& logits, int number, float rate) {
  Chunk<float> chunks[kTogether];
  logits.read(number, chunks);
  Tile tile{-INFINITY, 0.0f};
#pragma unroll
  for (const Chunk<float>& chunk : chunks)
#pragma unroll
    for (const float z : chunk.elements) tile.top = z > tile.top ? z : tile.top;
  tile.top = warp_max(tile.top);
#pragma unroll
  for (const Chunk<float>& chunk : chunks)
#pragma unroll
    for (const float z : chunk.elements) tile.sum += tile.weight(z, rate);
  tile.sum = sum_over_lanes(tile.sum, kWarp);  // a NaN makes it NaN, and with it the log-prob
  return tile;
}

__global__ void __launch_bounds__(kMaxWarps* kWarp)
    sample_rows(const __grid_constant__ DecodeSample in) {
  wait_for_predecessor();
  auto* const tiles = reinterpret_cast<Tile*>(dynamic_shared());
  const int64_t row = in.rows ? in.rows[blockIdx.x] : blockIdx.x;
  if (in.done[row]) return;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const Logits logits{in.logits + blockIdx.x / in.samples_per_logits * in.vocab_size,
                      static_cast<int>(in.vocab_size)};
  const bool is_greedy = in.temperature == 0.0;
  const float rate = static_cast<float>(is_greedy ? kLog2E : kLog2E / in.temperature);
  const float u = is_greedy ? 0.0f : uniform(in.keys[row], in.length[row]);
  const int num_tiles = (logits.size + logits.kTile - 1) / logits.kTile;
  for (int i = warp; i < num_tiles; i += blockDim.x / kWarp) {
    const Tile tile = sum_of(logits, i, rate);
    if (lane == 0) tiles[i] = tile;
  }
  __syncthreads();
  if (warp != 0) return;

  float top = -INFINITY, own = 0.0f;
  for (int i = lane; i < num_tiles; i += kWarp) top = tiles[i].top > top ? tiles[i].top : top;
  top = warp_max(top);
  const auto factor_of = [&](const Tile& tile) { return exponential2((tile.top - top) * rate); };
  const int of_lane = (num_tiles + kWarp - 1) / kWarp, begin = min(lane * of_lane, num_tiles),
            end = min(begin + of_lane, num_tiles);
  for (int i = begin; i < end; ++i) own += tiles[i].sum * factor_of(tiles[i]);
  const float up_to = warp_prefix_sum(own), total = __shfl_sync(kAllLanes, up_to, kWarp - 1);
  float before = up_to - own;

  // The greedy tile and token are the first ones of the greatest logit, the sampled ones the last
  // that start at or below `wanted` and have a weight above 0, which rounding cannot miss.
  const float wanted = u * total;
  int best = kNone;
  float before_best = 0.0f;
  const auto offer = [&](bool is_top, float weight, int number) {
    if (is_greedy ? is_top && best == kNone : weight > 0.0f && before <= wanted) {
      best = number;
      before_best = before;
    }
    before += weight;
  };
  const auto best_of_warp = [&] {
    const int sign = is_greedy ? -1 : 1;
    const int found = warp_max(best == kNone ? kNone : sign * best);
    return found == kNone ? kNone : sign * found;
  };
  for (int i = begin; i < end; ++i)
    offer(tiles[i].top == top, tiles[i].sum * factor_of(tiles[i]), i);
  const int chosen = best_of_warp();
  int token = kNone;
  if (chosen != kNone) {
    const Tile tile = tiles[chosen];
    const float factor = factor_of(tile);
    Chunk<float> chunks[kTogether];
    logits.read(chosen, chunks);
    best = kNone;
    float start = __shfl_sync(kAllLanes, before_best, chosen / of_lane);
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const auto& values = chunks[k].elements;
      float weights[kSize], of_chunk = 0.0f;
#pragma unroll
      for (int i = 0; i < kSize; ++i)
        of_chunk += weights[i] = factor * tile.weight(values[i], rate);
      const float with_own = warp_prefix_sum(of_chunk);
      before = start + (with_own - of_chunk);
#pragma unroll
      for (int i = 0; i < kSize; ++i)
        offer(values[i] == top, weights[i], logits.first_of(chosen, k) + i);
      start += __shfl_sync(kAllLanes, with_own, kWarp - 1);
    }
    token = best_of_warp();
  }
  if (token < 0 || token >= logits.size) token = logits.size - 1;  // NaN
  if (lane != 0) return;

  const int64_t at = min(in.length[row], in.limit - 1), place = row * in.limit + at;
  const float scale = is_greedy ? 1.0f : static_cast<float>(1.0 / in.temperature);
  const float logprob = (logits.data[token] - top) * scale - logf(total);
  in.tokens[place] = token;
  in.logprobs[place] = is_greedy && logprob - logprob == 0.0f ? 0.0f : logprob;
  in.last[row] = token;
  in.length[row] = at + 1;
  in.done[row] = in.stops[token] || at + 1 == in.limit;
}

}  // namespace

void decode_sample(const DecodeSample& in, cudaStream_t stream) {
  if (in.num_rows == 0) return;
  constexpr int64_t kTile = Logits::kTile;
  const int64_t tiles = (in.vocab_size + kTile - 1) / kTile,
                shared = tiles * static_cast<int64_t>(sizeof(Tile));
  if (shared > kUnaskedShared) throw std::invalid_argument("decode_sample: too many tokens");
  launch_early(sample_rows, in.num_rows, std::min<int64_t>(kMaxWarps, tiles) * kWarp, shared,
               stream, in);
}

const bool defined = define_kernel("decode_sample", decode_sample);

}  // namespace maxrl::cuda
