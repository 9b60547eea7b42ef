// Rotary embedding of the heads of q and k, with their norms, forward and backward.
#include "layer.cuh"

namespace maxrl::cuda {
namespace {

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
  wait_for_predecessor();
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
void rotate_heads(const RotateHeads<Element>& in, cudaStream_t stream) {
  check_heads(in);
  const int64_t heads = in.from[0].count + in.from[1].count + in.from[2].count;
  if (in.num_rows == 0) return;
  const int lanes = lanes_of_head<Element>(in.head_dim);
  launch_early(rotate_heads_kernel<Element>, blocks_for(in.num_rows * heads * lanes), kThreads, 0,
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

const bool defined = define_kernel("rotate_heads", rotate_heads<float>, rotate_heads<BFloat16>) &&
                     define_kernel("rotate_heads_backward", rotate_heads_backward<float>,
                                   rotate_heads_backward<BFloat16>);

}  // namespace maxrl::cuda
