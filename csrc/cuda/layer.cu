// The elementwise parts of a decoder layer and chosen rows, forward and backward, in one launch
// each. Numbers are read and written once, 16 bytes at a time, and computed in float32. All sums
// are added in an order that depends on the shapes alone.
#include <stdexcept>

#include "../layer.h"
#include "elements.cuh"
#include "launch.h"
#include "reduce.cuh"

namespace maxrl::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kKept = 4;  // chunks of a row that a thread keeps in registers

// Loads `size` numbers, one or two chunks.
template <typename Element, int size>
__device__ void load(const Element* from, float (&values)[size]) {
  constexpr int kSize = Chunk<Element>::kSize;
#pragma unroll
  for (int start = 0; start < size; start += kSize) {
    float part[kSize];
    unpack(Chunk<Element>(from + start), part);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[start + i] = part[i];
  }
}

// Rounds and stores `size` numbers, one or two chunks.
template <typename Element, int size>
__device__ void store(Element* to, const float (&values)[size]) {
  constexpr int kSize = Chunk<Element>::kSize;
#pragma unroll
  for (int start = 0; start < size; start += kSize) {
    float part[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) part[i] = values[start + i];
    __stwb(reinterpret_cast<uint4*>(to + start),
           rounded<Element>(part).bits);  // the compiler splits some plain stores
  }
}

// The warps that share a row; a block has several teams. A thread has the chunks part, part + size,
// ... of the row.
struct RowTeam {
  int warps, size, part;
  int64_t number;  // in the launch

  __device__ explicit RowTeam(int warps)
      : warps(warps), size(warps * kWarp), part(static_cast<int>(threadIdx.x) % size),
        number(int64_t{blockIdx.x} * (kThreads / size) + threadIdx.x / size) {}

  // use(k, c) for this thread's k-th chunk of a row, which is the row's chunk c.
  template <typename Use>
  __device__ void for_chunks(int chunks, const Use& use) const {
#pragma unroll
    for (int k = 0; k < kKept; ++k)
      if (part + k * size < chunks) use(k, part + k * size);
  }
  // The sum over the team. The whole block must call it; `of_warps` is shared memory.
  __device__ float sum(float value, float* of_warps) const {
    value = sum_over_lanes(value, kWarp);
    if (warps == 1) return value;
    const int warp = threadIdx.x / kWarp, first = warp / warps * warps;
    __syncthreads();  // of_warps may still be read from an earlier call
    if (threadIdx.x % kWarp == 0) of_warps[warp] = value;
    __syncthreads();
    value = of_warps[first];
    for (int w = 1; w < warps; ++w) value += of_warps[first + w];
    return value;
  }
};

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    add_rms_norm_kernel(const __grid_constant__ AddRmsNorm<Element> in, int warps) {
  constexpr int kSize = Chunk<Element>::kSize;
  __shared__ float of_warps[kWarps];
  const RowTeam team(warps);
  const int chunks = team.number < in.num_rows ? in.size / kSize : 0;
  const int64_t start = team.number * in.size;
  Chunk<Element> kept[kKept];
  float squares = 0.0f;
  team.for_chunks(chunks, [&](int k, int c) {
    kept[k] = Chunk<Element>(in.x + start + c * kSize);
    float values[kSize];
    unpack(kept[k], values);
    if (in.delta) {
      float delta[kSize];
      load(in.delta + start + c * kSize, delta);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] += delta[i];
      kept[k] = rounded<Element>(values);
      kept[k].write(in.sum + start + c * kSize);
      unpack(kept[k], values);  // the norm is that of the sum as it is stored
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) squares += values[i] * values[i];
  });
  const float rate = rsqrtf(team.sum(squares, of_warps) / in.size + in.eps);
  team.for_chunks(chunks, [&](int k, int c) {
    float values[kSize], weight[kSize];
    unpack(kept[k], values);
    load(in.weight + c * kSize, weight);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] *= rate * weight[i];
    store(in.normed + start + c * kSize, values);
  });
}

// The gradient of an RMS norm x rate w in x is rate w g - slope x. Both numbers follow from two
// sums over the row.
struct NormGradient {
  float rate, slope;
  __device__ NormGradient(float squares, float product, int size,
                          float eps)  // sum of x^2, of w g x
      : rate(rsqrtf(squares / size + eps)), slope(rate * rate * rate * product / size) {}
};

template <typename Element>
__global__ void __launch_bounds__(kThreads, 2)
    add_rms_norm_backward_kernel(const __grid_constant__ AddRmsNormBackward<Element> in,
                                 int warps) {
  constexpr int kSize = Chunk<Element>::kSize;
  __shared__ float of_warps[kWarps];
  const RowTeam team(warps);
  float grad_weight[kKept][kSize] = {};
  for (int64_t first = 0; first < in.num_rows;
       first += in.num_partials) {  // the same number of times in all threads
    const int64_t row = first + team.number, start = row * in.size;
    const int chunks = team.number < in.num_partials && row < in.num_rows ? in.size / kSize : 0;
    Chunk<Element> kept[kKept], grads[kKept];
    float squares = 0.0f, product = 0.0f;
    team.for_chunks(chunks, [&](int k, int c) {
      kept[k] = Chunk<Element>(in.sum + start + c * kSize);
      grads[k] = Chunk<Element>(in.grad_normed + start + c * kSize);
      float x[kSize], g[kSize], weight[kSize];
      unpack(kept[k], x);
      unpack(grads[k], g);
      load(in.weight + c * kSize, weight);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        squares += x[i] * x[i];
        product += weight[i] * g[i] * x[i];
      }
    });
    squares = team.sum(squares, of_warps);
    const NormGradient norm(squares, team.sum(product, of_warps), in.size, in.eps);
    team.for_chunks(chunks, [&](int k, int c) {
      float x[kSize], g[kSize], weight[kSize], grad[kSize] = {};
      unpack(kept[k], x);
      unpack(grads[k], g);
      load(in.weight + c * kSize, weight);
      if (in.grad_sum) load(in.grad_sum + start + c * kSize, grad);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        grad[i] += norm.rate * weight[i] * g[i] - norm.slope * x[i];
        grad_weight[k][i] += g[i] * x[i] * norm.rate;
      }
      store(in.grad_x + start + c * kSize, grad);
    });
  }
  if (team.number >= in.num_partials) return;
  team.for_chunks(in.size / kSize, [&](int k, int c) {
    store(in.grad_weight + team.number * in.size + c * kSize, grad_weight[k]);
  });
}

// One lane's part of a head: a chunk of its lower half and the chunk of the upper half that is
// rotated with it.
template <typename Element>
struct HeadPart {
  static constexpr int kSize = Chunk<Element>::kSize;
  float low[kSize] = {}, high[kSize] = {};

  __device__ void read(const Element* head, int half) {
    load(head, low);
    load(head + half, high);
  }
  __device__ void write(Element* head, int half) const {
    store(head, low);
    store(head + half, high);
  }
  __device__ float dot(const HeadPart& other) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum += low[i] * other.low[i] + high[i] * other.high[i];
    return sum;
  }
  __device__ void multiply(const HeadPart& other) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      low[i] *= other.low[i];
      high[i] *= other.high[i];
    }
  }
  // `at` is this lane's place in half a head.
  __device__ void rotate(const RotateHeads<Element>& in, int64_t row, int at, float direction) {
    const int64_t angles = in.angles_of(row);
    float cos[kSize], sin[kSize];
    if (angles >= 0) {
      load(in.cos + angles + at, cos);
      load(in.sin + angles + at, sin);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) cos[i] = sin[i] = NAN;
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const float x = low[i], y = high[i], s = sin[i] * direction;
      low[i] = x * cos[i] - y * s;
      high[i] = y * cos[i] + x * s;
    }
  }
};

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    rotate_heads_kernel(const __grid_constant__ RotateHeads<Element> in, int lanes) {
  const int half = in.head_dim / 2,
            at = static_cast<int>(threadIdx.x) % lanes * Chunk<Element>::kSize;
  const unsigned slot = (blockIdx.x * kThreads + threadIdx.x) / lanes;
  const unsigned num_heads = in.from[0].count + in.from[1].count + in.from[2].count;
  const int64_t row = slot / num_heads;
  int head = static_cast<int>(slot % num_heads), which = 0;
  while (head >= in.from[which].count) head -= in.from[which++].count;
  const bool exists = row < in.num_rows && at < half;
  const Element* norm = which < 2 ? in.norm[which] : nullptr;
  HeadPart<Element> part;
  if (exists) part.read(in.source(which, row, head) + at, half);
  const float squares = sum_over_lanes(part.dot(part), lanes);
  if (!exists) return;
  if (norm) {
    const float rate = rsqrtf(squares / in.head_dim + in.eps);
    HeadPart<Element> weight;
    weight.read(norm + at, half);
#pragma unroll
    for (int i = 0; i < Chunk<Element>::kSize; ++i) {
      weight.low[i] *= rate;
      weight.high[i] *= rate;
    }
    part.multiply(weight);
  }
  if (which < 2) part.rotate(in, row, at, in.direction);
  part.write(in.target(which, row, head) + at, half);
}

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    rotate_heads_backward_kernel(const __grid_constant__ RotateHeadsBackward<Element> backward,
                                 int lanes) {
  const auto& in = backward.forward;
  constexpr int kSize = Chunk<Element>::kSize;
  const int half = in.head_dim / 2, at = static_cast<int>(threadIdx.x) % lanes * kSize;
  const unsigned slot = (blockIdx.x * kThreads + threadIdx.x) / lanes,
                 num_heads = in.from[0].count + in.from[1].count;
  const int64_t partial = slot / num_heads;
  const int of_all = static_cast<int>(slot % num_heads), which = of_all < in.from[0].count ? 0 : 1;
  const int head = of_all - which * in.from[0].count;
  const bool has_part = partial < backward.num_partials && at < half;
  HeadPart<Element> grad_norm;
  for (int64_t first = 0; first < in.num_rows;
       first += backward.num_partials) {  // the same number of times in all threads
    const int64_t row = first + partial,
                  place = (row * in.from[which].count + head) * in.head_dim + at;
    const bool exists = has_part && row < in.num_rows;
    HeadPart<Element> x, grad, weight;
    if (exists) {
      x.read(in.source(which, row, head) + at, half);
      grad.read(backward.grad[which] + place, half);
      weight.read(in.norm[which] + at, half);
      grad.rotate(in, row, at, -in.direction);
    }
    weight.multiply(grad);
    const float squares = sum_over_lanes(x.dot(x), lanes);
    const NormGradient norm(squares, sum_over_lanes(weight.dot(x), lanes), in.head_dim, in.eps);
    if (!exists) continue;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      grad_norm.low[i] += grad.low[i] * x.low[i] * norm.rate;
      grad_norm.high[i] += grad.high[i] * x.high[i] * norm.rate;
      x.low[i] = norm.rate * weight.low[i] - norm.slope * x.low[i];
      x.high[i] = norm.rate * weight.high[i] - norm.slope * x.high[i];
    }
    x.write(in.target(which, row, head) + at, half);
  }
  if (!has_part) return;
  float* to = backward.grad_norm + (partial * num_heads + of_all) * in.head_dim + at;
  store(to, grad_norm.low);
  store(to + half, grad_norm.high);
}

__device__ inline float sigmoid(float x) {
  return 1.0f / (1.0f + exponential2(-static_cast<float>(kLog2E) * x));
}

// This thread's chunk of a matrix.
template <typename Element>
struct Place {
  int64_t row;
  int column;
  __device__ explicit Place(int size) {
    const unsigned index = blockIdx.x * kThreads + threadIdx.x,
                   chunks = size / Chunk<Element>::kSize;
    row = index / chunks;
    column = static_cast<int>(index % chunks) * Chunk<Element>::kSize;
  }
};

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    swiglu_kernel(const __grid_constant__ SwiGlu<Element> in) {
  constexpr int kSize = Chunk<Element>::kSize;
  const Place<Element> place(in.size);
  if (place.row >= in.num_rows) return;
  float gate[kSize], up[kSize];
  load(in.gate + place.row * in.gate_stride + place.column, gate);
  load(in.up + place.row * in.up_stride + place.column, up);
#pragma unroll
  for (int i = 0; i < kSize; ++i) gate[i] *= sigmoid(gate[i]) * up[i];
  store(in.out + place.row * in.size + place.column, gate);
}

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(const __grid_constant__ SwiGluBackward<Element> backward) {
  const auto& in = backward.forward;
  constexpr int kSize = Chunk<Element>::kSize;
  const Place<Element> place(in.size);
  if (place.row >= in.num_rows) return;
  float gate[kSize], up[kSize], grad[kSize];
  load(in.gate + place.row * in.gate_stride + place.column, gate);
  load(in.up + place.row * in.up_stride + place.column, up);
  load(backward.grad + place.row * in.size + place.column, grad);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float s = sigmoid(gate[i]), x = gate[i];
    gate[i] = grad[i] * up[i] * s * (1.0f + x * (1.0f - s));
    up[i] = grad[i] * x * s;
  }
  const int64_t to = place.row * backward.grad_stride + place.column;
  store(backward.grad_gate + to, gate);
  store(backward.grad_up + to, up);
}

// Adds in float32: hundreds of rows of one prompt meet here, whose sum in half precision would be
// off by a percent.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    chosen_rows_backward_kernel(const __grid_constant__ ChosenRows<Element> in) {
  constexpr int kSize = Chunk<Element>::kSize;
  const Place<Element> place(in.size);
  if (place.row >= in.num_rows) return;
  float sum[kSize] = {};
  const int64_t end = in.starts[place.row + 1];
#pragma unroll 4  // loads in flight at a time
  for (int64_t i = in.starts[place.row]; i < end; ++i) {
    float grad[kSize];
    load(in.grad + in.order[i] * in.size + place.column, grad);
#pragma unroll
    for (int k = 0; k < kSize; ++k) sum[k] += grad[k];
  }
  store(in.to + place.row * in.size + place.column, sum);
}

// The blocks of a launch with this many threads, whose indices have 32 bits.
int64_t blocks_for(int64_t threads) {
  if (threads > int64_t{UINT32_MAX} - kThreads)
    throw std::invalid_argument("a layer's batch has too many elements");
  return (threads + kThreads - 1) / kThreads;
}

void check_size(const char* name, int size, int multiple, int most) {
  if (size < multiple || size % multiple || size > most)
    throw std::invalid_argument(std::string(name) + " must be a multiple of " +
                                std::to_string(multiple) + " up to " + std::to_string(most) +
                                ", got " + std::to_string(size));
}

// The warps of a row, a power of two.
template <typename Element>
int warps_of_row(int size) {
  constexpr int kOfWarp = kWarp * kKept * Chunk<Element>::kSize;
  check_size("hidden_size", size, Chunk<Element>::kSize, kWarps * kOfWarp);
  int warps = 1;
  while (warps * kOfWarp < size) warps *= 2;
  return warps;
}

template <typename Element>
void check_heads(const RotateHeads<Element>& in) {
  for (int i = 0; i < 3; ++i)
    check_alignment("rotate_heads", {in.from[i].data, in.from[i].data + in.from[i].stride, in.to[i],
                                     in.to[i] + in.to_stride[i]});
  check_alignment("rotate_heads", {in.norm[0], in.norm[1], in.cos, in.sin});
}

// The lanes of a head, a power of two.
template <typename Element>
int lanes_of_head(int head_dim) {
  constexpr int kPair = 2 * Chunk<Element>::kSize;  // a chunk of each half
  check_size("head_dim", head_dim, kPair, kPair * kWarp);
  int lanes = 1;
  while (lanes * kPair < head_dim) lanes *= 2;
  return lanes;
}

}  // namespace

template <typename Element>
void add_rms_norm(const AddRmsNorm<Element>& in, cudaStream_t stream) {
  check_alignment("add_rms_norm", {in.x, in.delta, in.weight, in.sum, in.normed});
  if (in.num_rows == 0) return;
  const int warps = warps_of_row<Element>(in.size);
  launch(add_rms_norm_kernel<Element>, blocks_for(in.num_rows * warps * kWarp), kThreads, 0, 0,
         stream, in, warps);
}

template <typename Element>
void add_rms_norm_backward(const AddRmsNormBackward<Element>& in, cudaStream_t stream) {
  check_alignment("add_rms_norm_backward",
                  {in.sum, in.weight, in.grad_sum, in.grad_normed, in.grad_x});
  if (in.num_rows == 0) return;
  const int warps = warps_of_row<Element>(in.size);
  launch(add_rms_norm_backward_kernel<Element>, blocks_for(in.num_partials * warps * kWarp),
         kThreads, 0, 0, stream, in, warps);
}

template <typename Element>
void rotate_heads(const RotateHeads<Element>& in, cudaStream_t stream) {
  check_heads(in);
  const int64_t heads = in.from[0].count + in.from[1].count + in.from[2].count;
  if (in.num_rows == 0) return;
  const int lanes = lanes_of_head<Element>(in.head_dim);
  launch(rotate_heads_kernel<Element>, blocks_for(in.num_rows * heads * lanes), kThreads, 0, 0,
         stream, in, lanes);
}

template <typename Element>
void rotate_heads_backward(const RotateHeadsBackward<Element>& in, cudaStream_t stream) {
  check_heads(in.forward);
  check_alignment("rotate_heads_backward", {in.grad[0], in.grad[1]});
  const int64_t heads = in.forward.from[0].count + in.forward.from[1].count;
  if (in.forward.num_rows == 0) return;
  const int lanes = lanes_of_head<Element>(in.forward.head_dim);
  launch(rotate_heads_backward_kernel<Element>, blocks_for(in.num_partials * heads * lanes),
         kThreads, 0, 0, stream, in, lanes);
}

template <typename Element>
void swiglu(const SwiGlu<Element>& in, cudaStream_t stream) {
  check_alignment("swiglu",
                  {in.gate, in.up, in.gate + in.gate_stride, in.up + in.up_stride, in.out});
  if (in.num_rows == 0) return;
  check_size("intermediate_size", in.size, Chunk<Element>::kSize, INT32_MAX);
  launch(swiglu_kernel<Element>, blocks_for(in.num_rows * (in.size / Chunk<Element>::kSize)),
         kThreads, 0, 0, stream, in);
}

template <typename Element>
void swiglu_backward(const SwiGluBackward<Element>& in, cudaStream_t stream) {
  const SwiGlu<Element>& of = in.forward;
  check_alignment("swiglu_backward",
                  {of.gate, of.up, of.gate + of.gate_stride, of.up + of.up_stride, in.grad,
                   in.grad_gate, in.grad_up, in.grad_gate + in.grad_stride});
  if (of.num_rows == 0) return;
  check_size("intermediate_size", of.size, Chunk<Element>::kSize, INT32_MAX);
  launch(swiglu_backward_kernel<Element>,
         blocks_for(of.num_rows * (of.size / Chunk<Element>::kSize)), kThreads, 0, 0, stream, in);
}

template <typename Element>
void chosen_rows_backward(const ChosenRows<Element>& in, cudaStream_t stream) {
  check_alignment("chosen_rows_backward", {in.grad, in.to});
  if (in.num_rows == 0) return;
  check_size("hidden_size", in.size, Chunk<Element>::kSize, INT32_MAX);
  launch(chosen_rows_backward_kernel<Element>,
         blocks_for(in.num_rows * (in.size / Chunk<Element>::kSize)), kThreads, 0, 0, stream, in);
}

namespace {

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
const bool defined = define<float>() && define<BFloat16>() && define<Float16>();

}  // namespace
}  // namespace maxrl::cuda
