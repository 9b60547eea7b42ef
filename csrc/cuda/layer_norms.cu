// RMS norms with the residual addition before them, forward and backward.
#include "layer.cuh"

namespace maxrl::cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;
constexpr int kKept = 4;  // chunks of a row that a thread keeps in registers

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
  wait_for_predecessor();
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

// The warps of a row, a power of two.
template <typename Element>
int warps_of_row(int size) {
  constexpr int kOfWarp = kWarp * kKept * Chunk<Element>::kSize;
  check_size("hidden_size", size, Chunk<Element>::kSize, kWarps * kOfWarp);
  int warps = 1;
  while (warps * kOfWarp < size) warps *= 2;
  return warps;
}

}  // namespace

template <typename Element>
void add_rms_norm(const AddRmsNorm<Element>& in, cudaStream_t stream) {
  check_alignment("add_rms_norm", {in.x, in.delta, in.weight, in.sum, in.normed});
  if (in.num_rows == 0) return;
  const int warps = warps_of_row<Element>(in.size);
  launch_early(add_rms_norm_kernel<Element>, blocks_for(in.num_rows * warps * kWarp), kThreads, 0,
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

const bool defined = define_kernel("add_rms_norm", add_rms_norm<float>, add_rms_norm<BFloat16>) &&
                     define_kernel("add_rms_norm_backward", add_rms_norm_backward<float>,
                                   add_rms_norm_backward<BFloat16>);

}  // namespace maxrl::cuda
