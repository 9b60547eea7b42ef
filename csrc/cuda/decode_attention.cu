// Attention of every row's newest token to the row's own tokens, merged with its attention to the
// prompt. One launch reads the existing keys and values once, in their own precision, whatever the
// length of the longest row.
//
// A block computes one row and one key/value head, with all query heads that share it. Several
// lanes of a warp form a slot and share a key, 16 bytes per lane. Each slot has its own online
// softmax over every num_slots-th key, and at the end the slots are merged.
//
// Where there are few rows, num_splits blocks share a row and a head, each for a part of the keys
// (Flash-Decoding, Dao et al. 2023). A second launch then merges their results in order.
#include <algorithm>
#include <iterator>

#include "../decoding.h"
#include "elements.cuh"
#include "launch.h"
#include "reduce.cuh"

namespace maxrl::cuda {
namespace {

constexpr int kKeysAtOnce = 4;  // keys that a slot loads at a time, to have several loads in flight
// Where at most so many query heads share a key, the next keys come while the present ones are
// used; 128 registers are enough for that, and leave room for 16 warps.
constexpr int kMostAhead = 2;
constexpr int kMaxWarps = 8;  // per block
// query heads that share a key/value head: of other numbers up to 8 the next one's kernel runs
constexpr int kQueryCounts[] = {1, 2, 4, 7, 8};
constexpr float kLowest = -1e30f;  // below any score, and finite, so that kLowest - kLowest is 0
constexpr int64_t kWantedWarps = 2048;  // per launch, to fill a GPU
constexpr int kMergingThreads = 128;  // per block of the second launch

// Online softmax over some of the keys, for each query head: maximum score, sum of exponentials,
// and this lane's part of the output. Scores are multiplied by log2(e).
template <int kQueries, int kSize>
struct Attended {
  float top[kQueries], sum[kQueries], values[kQueries][kSize];

  __device__ void clear() {
    for (int r = 0; r < kQueries; ++r) {
      top[r] = kLowest;
      sum[r] = 0.0f;
      for (int i = 0; i < kSize; ++i) values[r][i] = 0.0f;
    }
  }
  __device__ void merge(int r, float other_top, float other_sum, const float (&other)[kSize]) {
    const float greatest = fmaxf(top[r], other_top);
    const float mine = exponential2(top[r] - greatest), others = exponential2(other_top - greatest);
    top[r] = greatest;
    sum[r] = sum[r] * mine + other_sum * others;
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[r][i] = values[r][i] * mine + other[i] * others;
  }
};

// Merges a query head's attention to its own tokens with its attention to the prompt, whose weight
// is sigmoid(prompt_lse - own_lse), and writes 16 bytes of the result.
template <typename Element>
__device__ void write_result(const DecodeAttention<Element>& in, int64_t row, int head, int part,
                             float top, float sum, const float (&values)[Chunk<Element>::kSize]) {
  constexpr int kSize = Chunk<Element>::kSize;
  const int64_t at = (row * in.heads + head) * in.head_dim + part * kSize;
  const Chunk<Element> prompt_out(in.prompt_out + at);
  const float prompt_lse = in.prompt_lse[row * in.lse_row_stride + head * in.lse_head_stride];
  const float own_lse = top + log2f(sum);
  const float prompt_weight =
      1.0f / (1.0f + exponential2(own_lse - prompt_lse * static_cast<float>(kLog2E)));
  const float own_factor = (1.0f - prompt_weight) / sum;
  float out[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i)
    out[i] = values[i] * own_factor + to_real(prompt_out.elements[i]) * prompt_weight;
  rounded<Element>(out).write(in.out + at);
}

// One thread's part of the attention of the query heads of a row that share a key/value head, at
// most kQueries.
template <typename Element, int kQueries>
struct OwnAttention {
  static constexpr int kSize = Chunk<Element>::kSize;
  const DecodeAttention<Element>& in;
  const int64_t row;
  const int num_queries, head, split, lanes_of_key;  // a power of two
  const int part, slot;  // this lane's 16 bytes of a key; its slot
  const bool has_part;  // false in lanes past head_dim
  const int newest;  // position of the newest token
  float queries[kQueries][kSize];
  Attended<kQueries, kSize> attended;

  __device__ OwnAttention(const DecodeAttention<Element>& in, int lanes_of_key)
      : in(in), row(blockIdx.x / in.num_splits / in.kv_heads),
        // known to the compiler where it is no other number
        num_queries(kQueries == 4 || kQueries == 7 ? in.heads / in.kv_heads : kQueries),
        head(blockIdx.x / in.num_splits % in.kv_heads), split(blockIdx.x % in.num_splits),
        lanes_of_key(lanes_of_key), part(threadIdx.x % kWarp % lanes_of_key),
        slot(threadIdx.x / lanes_of_key), has_part(part * kSize < in.head_dim),
        newest(static_cast<int>(max(int64_t{0}, min(in.lengths[row], in.limit) - 1))) {
    const float scale = rsqrtf(static_cast<float>(in.head_dim)) * static_cast<float>(kLog2E);
#pragma unroll
    for (int r = 0; r < kQueries; ++r) {
      const Element* query = in.q + row * in.q_stride + (head * num_queries + r) * in.head_dim;
      unpack(load(query, r < num_queries), queries[r]);
#pragma unroll
      for (int i = 0; i < kSize; ++i) queries[r][i] *= scale;
    }
    attended.clear();
  }

  // Loads this lane's 16 bytes of a head's vector, or zeros.
  __device__ Chunk<Element> load(const Element* vector, bool exists = true) const {
    return exists && has_part ? Chunk<Element>(vector + part * kSize) : Chunk<Element>::zeros();
  }
  __device__ Element* cached(Element* cache, int64_t position) const {
    return cache + ((row * in.limit + position) * in.kv_heads + head) * in.head_dim;
  }

  // Returns the score of a key in all lanes of its slot; every lane of the warp must call it.
  __device__ float score(int r, const Chunk<Element>& chunk) const {
    float sum = 0.0f, key[kSize];
    unpack(chunk, key);
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum += queries[r][i] * key[i];
    return sum_over_lanes(sum, lanes_of_key);
  }

  struct Loaded {
    Chunk<Element> of[kKeysAtOnce];
  };
  // This lane's part of several keys or values, or zeros past `end`.
  __device__ Loaded load_several(Element* cache, int first, int num_slots, int end) const {
    Loaded loaded;
#pragma unroll
    for (int u = 0; u < kKeysAtOnce; ++u) {
      const int position = first + u * num_slots + slot;
      loaded.of[u] = load(cached(cache, position), position < end);
    }
    return loaded;
  }

  __device__ void attend_to_cache() {
    const int num_slots = blockDim.x / lanes_of_key, step = num_slots * kKeysAtOnce;
    const int size = (newest + in.num_splits - 1) / in.num_splits, begin = split * size,
              end = min(newest, begin + size);
    constexpr bool kIsAhead = kQueries <= kMostAhead;
    Loaded next;
    if (kIsAhead) next = load_several(in.k_cache, begin, num_slots, end);
    for (int first = begin; first < end;
         first += step) {  // the same number of times in all threads
      const auto [keys] = kIsAhead ? next : load_several(in.k_cache, first, num_slots, end);
      const auto [values] = load_several(in.v_cache, first, num_slots, end);
      if (kIsAhead) next = load_several(in.k_cache, first + step, num_slots, end);
      bool exists[kKeysAtOnce];
#pragma unroll
      for (int u = 0; u < kKeysAtOnce; ++u) exists[u] = first + u * num_slots + slot < end;
#pragma unroll
      for (int r = 0; r < kQueries; ++r) {
        float scores[kKeysAtOnce], greatest = attended.top[r];
#pragma unroll
        for (int u = 0; u < kKeysAtOnce; ++u) {
          scores[u] = score(r, keys[u]);
          if (exists[u]) greatest = fmaxf(greatest, scores[u]);
        }
        const float kept = exponential2(attended.top[r] - greatest);
        attended.top[r] = greatest;
        attended.sum[r] *= kept;
#pragma unroll
        for (int i = 0; i < kSize; ++i) attended.values[r][i] *= kept;
#pragma unroll
        for (int u = 0; u < kKeysAtOnce; ++u) {
          const float p = exists[u] ? exponential2(scores[u] - greatest) : 0.0f;
          float value[kSize];
          unpack(values[u], value);
          attended.sum[r] += p;
#pragma unroll
          for (int i = 0; i < kSize; ++i) attended.values[r][i] += p * value[i];
        }
      }
    }
  }

  // The first slot adds the newest token to its softmax and writes it to the cache.
  __device__ void attend_to_newest() {
    const Chunk<Element> new_key = load(in.k + row * in.k_stride + head * in.head_dim);
    const Chunk<Element> new_value = load(in.v + row * in.v_stride + head * in.head_dim);
    float new_values[kSize];
    unpack(new_value, new_values);
#pragma unroll
    for (int r = 0; r < kQueries; ++r) {
      const float new_score = score(r, new_key);
      if (slot == 0) attended.merge(r, new_score, 1.0f, new_values);
    }
    if (slot == 0 && has_part) {
      new_key.write(cached(in.k_cache, newest) + part * kSize);
      new_value.write(cached(in.v_cache, newest) + part * kSize);
    }
  }

  __device__ void merge_slots_of_warp() {
    for (int offset = lanes_of_key; offset < kWarp; offset *= 2)
#pragma unroll
      for (int r = 0; r < kQueries; ++r) {
        float other[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i)
          other[i] = __shfl_xor_sync(kAllLanes, attended.values[r][i], offset);
        const float top = __shfl_xor_sync(kAllLanes, attended.top[r], offset);
        const float sum = __shfl_xor_sync(kAllLanes, attended.sum[r], offset);
        attended.merge(r, top, sum, other);
      }
  }

  // Merges all warps into the first slot of the first warp.
  __device__ void merge_warps() {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp,
              num_warps = blockDim.x / kWarp;
    if (num_warps == 1) return;
    auto* warps = reinterpret_cast<float*>(
        dynamic_shared());  // [num_warps, kQueries, lanes_of_key, kSize + 2]
    const auto place = [&](int w, int r) {
      return warps + ((w * kQueries + r) * lanes_of_key + part) * (kSize + 2);
    };
    if (lane < lanes_of_key)
#pragma unroll
      for (int r = 0; r < kQueries; ++r) {
        float* to = place(warp, r);
        to[kSize] = attended.top[r];
        to[kSize + 1] = attended.sum[r];
#pragma unroll
        for (int i = 0; i < kSize; ++i) to[i] = attended.values[r][i];
      }
    __syncthreads();
    if (warp == 0 && lane < lanes_of_key)
      for (int w = 1; w < num_warps; ++w)
#pragma unroll
        for (int r = 0; r < kQueries; ++r) {
          const float* from = place(w, r);
          float other[kSize];
#pragma unroll
          for (int i = 0; i < kSize; ++i) other[i] = from[i];
          attended.merge(r, from[kSize], from[kSize + 1], other);
        }
  }

  // Writes the result, or, of several splits, this one's values, maximum and sum.
  __device__ void write() const {
    if (slot > 0 || !has_part) return;
#pragma unroll
    for (int r = 0; r < kQueries; ++r) {
      if (r >= num_queries) break;
      const int query = head * num_queries + r;
      if (in.num_splits == 1) {
        write_result(in, row, query, part, attended.top[r], attended.sum[r], attended.values[r]);
        continue;
      }
      float* to =
          in.partial + ((row * in.heads + query) * in.num_splits + split) * (in.head_dim + 2);
#pragma unroll
      for (int i = 0; i < kSize; ++i) to[part * kSize + i] = attended.values[r][i];
      if (part == 0) {
        to[in.head_dim] = attended.top[r];
        to[in.head_dim + 1] = attended.sum[r];
      }
    }
  }
};

template <typename Element, int kQueries>
__global__ void __launch_bounds__(kMaxWarps* kWarp, kQueries <= kMostAhead ? 2 : 1)
    attend_to_own(const __grid_constant__ DecodeAttention<Element> in, int lanes_of_key) {
  wait_for_predecessor();
  OwnAttention<Element, kQueries> own(in, lanes_of_key);
  own.attend_to_cache();
  if (own.split == 0) own.attend_to_newest();
  own.merge_slots_of_warp();
  own.merge_warps();
  own.write();
}

// Merges the splits of a row and a query head, by lanes_of_key threads. Their order is fixed, so
// the result is too.
template <typename Element>
__global__ void __launch_bounds__(kMergingThreads)
    merge_splits(const __grid_constant__ DecodeAttention<Element> in, int lanes_of_key) {
  wait_for_predecessor();
  constexpr int kSize = Chunk<Element>::kSize;
  const int64_t index =
      (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / lanes_of_key;  // of the row and the head
  const int part = threadIdx.x % lanes_of_key;
  if (index >= in.num_rows * in.heads || part * kSize >= in.head_dim) return;
  Attended<1, kSize> attended;
  attended.clear();
  for (int split = 0; split < in.num_splits; ++split) {
    const float* from = in.partial + (index * in.num_splits + split) * (in.head_dim + 2);
    float values[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = from[part * kSize + i];
    attended.merge(0, from[in.head_dim], from[in.head_dim + 1], values);
  }
  const int64_t row = index / in.heads;
  write_result(in, row, static_cast<int>(index - row * in.heads), part, attended.top[0],
               attended.sum[0], attended.values[0]);
}

template <typename Element, int kQueries>
void launch_with(const DecodeAttention<Element>& in, cudaStream_t stream) {
  constexpr int kSize = Chunk<Element>::kSize;
  int lanes = 1;
  while (lanes * kSize < in.head_dim) lanes *= 2;
  const int64_t blocks = in.num_rows * in.kv_heads * in.num_splits;
  int warps = 1;
  while (warps < kMaxWarps && blocks * warps < kWantedWarps) warps *= 2;
  const int64_t shared =
      warps == 1 ? 0 : warps * kQueries * lanes * (kSize + 2) * int64_t{sizeof(float)};
  const auto kernel = attend_to_own<Element, kQueries>;
  if (shared > kUnaskedShared) allow_shared(kernel);
  launch_early(kernel, blocks, warps * kWarp, shared, stream, in, lanes);
  if (in.num_splits == 1) return;
  const int64_t merging = (in.num_rows * in.heads * lanes + kMergingThreads - 1) / kMergingThreads;
  launch_early(merge_splits<Element>, merging, kMergingThreads, 0, stream, in, lanes);
}

template <typename Element, int which = 0>
void launch_for(const DecodeAttention<Element>& in, cudaStream_t stream) {
  if constexpr (which + 1 < std::size(kQueryCounts))
    if (in.heads / in.kv_heads > kQueryCounts[which])
      return launch_for<Element, which + 1>(in, stream);
  launch_with<Element, kQueryCounts[which]>(in, stream);
}

}  // namespace

template <typename Element>
void decode_attention(const DecodeAttention<Element>& in, cudaStream_t stream) {
  check_alignment("decode_attention",
                  {in.q, in.k, in.v, in.k_cache, in.v_cache, in.prompt_out, in.out});
  if (in.num_rows == 0) return;
  constexpr int kSize = Chunk<Element>::kSize;
  check_size("head_dim", in.head_dim, kSize, kWarp * kSize);
  if (in.heads / in.kv_heads > 8)
    throw std::invalid_argument("at most 8 query heads may share a key/value head, got " +
                                std::to_string(in.heads / in.kv_heads));
  launch_for<Element>(in, stream);
}

const bool defined =
    define_kernel("decode_attention", decode_attention<float>, decode_attention<BFloat16>);

}  // namespace maxrl::cuda
