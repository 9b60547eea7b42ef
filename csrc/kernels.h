// The interface of every kernel: addresses, sizes, a stream. No file under csrc/ includes a torch header.
#pragma once
#include <cstdint>
#include <vector>

#ifdef MAXRL_FAST_CUDA
#include <cuda_runtime_api.h>
#endif

#include "attention.h"
#include "decoding.h"
#include "group_advantage.h"
#include "layer.h"
#include "linear.h"
#include "pacs.h"
#include "token_loss.h"

namespace maxrl {

// Numbers of zeroed memory with which a CUDA kernel adds `size` sums over its blocks: the result, a counter, a row of each
// block.
constexpr int64_t kMaxSummingBlocks = 1024;
constexpr int64_t workspace_size(int64_t size) { return size + 1 + kMaxSummingBlocks * size; }

// group_advantage: advantages of rewards by a formula of group_advantage.h; 0 for rollouts that are not valid.
//   rewards, advantages  [num_groups, group_size] or [num_rewards]: pairs (float, float), (double, double),
//                        (BFloat16, BFloat16), (int32_t | int64_t | bool, float)
//
// token_loss: the loss of packed tokens and its gradient to the logits, by the formulas of token_loss.h.
//   logits, gradient     [T, V] of (float | BFloat16 | Float16, Real float) or (double, Real double), contiguous rows;
//                        gradient may be null, or the logits themselves
//   sums                 [LossSums::kSize]
// token_logprobs: log-probabilities of the targets and entropies, [T] each; the backward kernel computes the gradient in the
//   logits, which it may write over the logits. It does not read rows whose gradients are 0.
//
// shared_prompt_attention: attention of attention.h, with its log-sum-exp; the backward kernel computes all gradients from
// both.
//
// pacs_loss: the loss of pacs.h with its gradient and its metrics.
// log_ratio_reward: its proxies; the backward kernel computes the gradient in the log-probabilities.
namespace cpu {

// Returns the first position (in the order of groups) of a reward that is not finite, or for Kind::kBinary neither 0 nor 1;
// -1 if all rewards are usable. Otherwise the written advantages are wrong.
template <typename Reward, typename Advantage>
int64_t group_advantage(const Reward* rewards, const Groups& groups, const Tables& tables, const Formula& formula,
                        Advantage* advantages, int num_threads);

// The distinct group sizes, ascending, counting only valid rollouts.
// Throws std::invalid_argument if offsets do not rise from 0 to num_rewards.
std::vector<int64_t> distinct_group_sizes(const Groups& groups);

// Both return the first token that is not masked and whose target is not in the vocabulary, and write nothing then; -1 if
// there is none.
template <typename Element, typename Real>
int64_t token_loss(Rows<const Element> logits, const TokenLossInputs<Real>& in, const LossTerms& terms, Rows<Element> gradient,
                   double* sums, int num_threads);
template <typename Element, typename Real>
int64_t token_logprobs(Rows<const Element> logits, const TokenRows<Real>& in, Real* logprobs, Real* entropy, int num_threads);

template <typename Element, typename Real>
void token_logprobs_backward(Rows<const Element> logits, const TokenRows<Real>& in, const Real* grad_logprobs,
                             const Real* grad_entropy, Rows<Element> gradient, int num_threads);

// Returns the first rollout whose label is neither 0 nor 1; -1 if there is none.
template <typename Real>
int64_t pacs_loss(const Pacs<Real>& in, int num_threads);

template <typename Real>
void log_ratio_reward(const LogRatio<Real>& in, int num_threads);
template <typename Real>
void log_ratio_reward_backward(const LogRatioBackward<Real>& in, int num_threads);

// The parts of a layer (layer.h). chosen_rows_backward throws std::invalid_argument for a row outside the U.
template <typename Element, typename Real>
void add_rms_norm(const AddRmsNorm<Element, Real>& in, int num_threads);
template <typename Element, typename Real>
void add_rms_norm_backward(const AddRmsNormBackward<Element, Real>& in, int num_threads);
template <typename Element, typename Real>
void rotate_heads(const RotateHeads<Element, Real>& in, int num_threads);
template <typename Element, typename Real>
void rotate_heads_backward(const RotateHeadsBackward<Element, Real>& in, int num_threads);
template <typename Element, typename Real>
void swiglu(const SwiGlu<Element, Real>& in, int num_threads);
template <typename Element, typename Real>
void swiglu_backward(const SwiGluBackward<Element, Real>& in, int num_threads);
template <typename Element, typename Real>
void chosen_rows_backward(const ChosenRows<Element, Real>& in, int num_threads);

// The products of linear.h; std::invalid_argument for other sizes.
void linear(const Linear& in, int num_threads);
void linear_backward(const LinearBackward& in, int num_threads);

// Both throw std::invalid_argument for other heads than those of attention.h, if the stream's lengths do not fit its tokens, or
// if responses do not stand in order.
template <typename Element, typename Real>
void shared_prompt_attention(const SharedPromptAttention<Element, Real>& in, int num_threads);
template <typename Element, typename Real>
void shared_prompt_attention_backward(const SharedPromptAttention<Element, Real>& in, int num_threads);

}  // namespace cpu

#ifdef MAXRL_FAST_CUDA
// A wrong target or label, which the CPU kernels report, makes the results NaN on a GPU. `workspace` is zeroed memory of
// loss_workspace() doubles; token_loss writes its sums to the start.
namespace cuda {
constexpr int64_t kMaxRankedGroupSize = 4096;  // a group is sorted in the shared memory of one block

// A group with an unusable reward becomes NaN, since to report it the host would have to wait. So does an uneven group with
// more rollouts than kMaxRankedGroupSize or than the tables take.
template <typename Reward, typename Advantage>
void group_advantage(const Reward* rewards, const Groups& groups, const Tables& tables, const Formula& formula,
                     Advantage* advantages, cudaStream_t stream);

int64_t loss_workspace();

template <typename Element, typename Real>
void token_loss(Rows<const Element> logits, const TokenLossInputs<Real>& in, const LossTerms& terms, Rows<Element> gradient,
                double* workspace, cudaStream_t stream);
template <typename Element, typename Real>
void token_logprobs(Rows<const Element> logits, const TokenRows<Real>& in, Real* logprobs, Real* entropy, cudaStream_t stream);
template <typename Element, typename Real>
void token_logprobs_backward(Rows<const Element> logits, const TokenRows<Real>& in, const Real* grad_logprobs,
                             const Real* grad_entropy, Rows<Element> gradient, cudaStream_t stream);

// Multiplies a matrix by a number on the device. If the number is 1, the matrix is neither read nor written.
template <typename Element, typename Real>
void scale(Rows<Element> matrix, int64_t num_rows, int64_t row_size, const double* scale, cudaStream_t stream);

// The parts of a layer (layer.h). They throw std::invalid_argument if a row of `size` elements or a head is not a whole number
// of chunks of 16 bytes (of 32 for a head), or a row of AddRmsNorm has more than 16 KiB, a head more than 1 KiB.
template <typename Element>
void add_rms_norm(const AddRmsNorm<Element>& in, cudaStream_t stream);
template <typename Element>
void add_rms_norm_backward(const AddRmsNormBackward<Element>& in, cudaStream_t stream);
template <typename Element>
void rotate_heads(const RotateHeads<Element>& in, cudaStream_t stream);
template <typename Element>
void rotate_heads_backward(const RotateHeadsBackward<Element>& in, cudaStream_t stream);
template <typename Element>
void swiglu(const SwiGlu<Element>& in, cudaStream_t stream);
template <typename Element>
void swiglu_backward(const SwiGluBackward<Element>& in, cudaStream_t stream);

template <typename Real>
void pacs_loss(const Pacs<Real>& in, cudaStream_t stream);
template <typename Real>
void log_ratio_reward(const LogRatio<Real>& in, cudaStream_t stream);
template <typename Real>
void log_ratio_reward_backward(const LogRatioBackward<Real>& in, cudaStream_t stream);

// Throws std::invalid_argument if head_dim is not a multiple of 16 bytes up to 32 times that, or more than 8 query heads share
// a key/value head.
template <typename Element>
void decode_attention(const DecodeAttention<Element>& in, cudaStream_t stream);
template <typename Element>
void decode_sample(const DecodeSample<Element>& in, cudaStream_t stream);
}  // namespace cuda
#endif

}  // namespace maxrl
