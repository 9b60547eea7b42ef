// SwiGLU, forward and backward, and the gradient of chosen rows.
#include "layer.cuh"

namespace maxrl::cuda {
namespace {

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
  wait_for_predecessor();
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

}  // namespace

template <typename Element>
void swiglu(const SwiGlu<Element>& in, cudaStream_t stream) {
  check_alignment("swiglu",
                  {in.gate, in.up, in.gate + in.gate_stride, in.up + in.up_stride, in.out});
  if (in.num_rows == 0) return;
  check_size("intermediate_size", in.size, Chunk<Element>::kSize, INT32_MAX);
  launch_early(swiglu_kernel<Element>, blocks_for(in.num_rows * (in.size / Chunk<Element>::kSize)),
               kThreads, 0, stream, in);
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

const bool defined =
    define_kernel("swiglu", swiglu<float>, swiglu<BFloat16>) &&
    define_kernel("swiglu_backward", swiglu_backward<float>, swiglu_backward<BFloat16>) &&
    define_kernel("chosen_rows_backward", chosen_rows_backward<float>,
                  chosen_rows_backward<BFloat16>);

}  // namespace maxrl::cuda
