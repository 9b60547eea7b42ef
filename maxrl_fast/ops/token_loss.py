"""Policy-gradient losses of packed responses, and log-probs, from logits."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from maxrl_fast.ops import token_loss_kernel as kernels
from maxrl_fast.ops.derivatives import LossWithGradients, needs_gradient
from maxrl_fast.ops.dispatch import eager, has_kernels
from maxrl_fast.ops.function_loss import (
    compared,
    function_loss,
    loss_of_logits,
    scaled,
    token_logprobs_reference,
    tokens_of,
)
from maxrl_fast.ops.loss_terms import LossTerms
from maxrl_fast.ops.token_batch import TokenBatch, real_dtype, token_batch, token_rows
from maxrl_fast.ops.token_loss_kernel import LossSums, shape_of

_MEANS = LossSums._fields[3:]  # over the tokens with a gradient


@eager
def token_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Return each target's log-prob and each row's entropy under softmax(logits / temperature).

    Both are differentiable, once. The forward pass reads the logits once; the backward pass reads
    them once and writes their gradient once.

    Args:
        logits: [T, V] float32, bfloat16, float16 or float64.
        targets: [T] integers below V.
        temperature: a number, or [T].

    Returns:
        logprobs [T] and entropy [T], float32 (float64 for float64 logits).
    """
    rows = token_rows(shape_of(logits), targets, temperature, logits.device)
    if not has_kernels(logits.device):
        return token_logprobs_reference(logits, *rows)
    logprobs, entropy = kernels.TokenLogprobs.apply(contiguous_rows(logits), *rows)
    return logprobs, entropy


@eager
def policy_gradient_loss(
    logits: Tensor,
    targets: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
    *,
    advantages_per_token: bool | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    importance_weights: Tensor | None = None,
    importance_weights_per_token: bool | None = None,
    loss: str | Callable[..., Tensor] = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl: str = "k3",
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    loss_options: Mapping[str, float] | None = None,
    temperature: float | Tensor = 1.0,
    aggregation: str = "token_mean",
    mask: Tensor | None = None,
    denominator: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the policy-gradient loss of packed responses, and metrics.

    With logp the log-prob of a target under softmax(logits / temperature), rho = exp(logp - old):

        reinforce   -A logp
        ppo         max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)); with `dual_clip` c, at
                    most -A c for A < 0 (Schulman et al. 2017, eq. 7; dual clip, Ye et al. 2020)
        cispo       -stop_gradient(clip(rho)) A logp (MiniMax-M1 2025)
        gspo        ppo with the sequence's ratio exp(mean_t log rho_t) (Zheng et al. 2025); with
                    advantages per token, their GSPO-token
        others      the functions of `ops.LOSSES`, or any function of `ops.Tokens` that returns the
                    loss of each token

    plus kl_coef KL(policy || reference), estimated per token, minus entropy_coef times the entropy.
    docs/token_loss.md has the formulas, the clamps of log-ratios and what is computed when.

    Args:
        logits: [T, V] float32, bfloat16, float16 or float64, with any row stride, computed in
            float32 (float64 for float64).
        targets: [T] integers.
        advantages: [S], one per response, or [T], one per token.
        cu_seqlens: [S+1] integers, from 0 to T.
        advantages_per_token: whether advantages are [T]. Default: their length decides. If T = S it
            must be given, except on a CPU if every response has one token.
        old_logprobs: [T] of the sampling policy; if absent, the ratio is 1, with logp's gradient.
        ref_logprobs: [T] of the reference policy, required if kl_coef is not 0.
        importance_weights: [S] or [T], at least 0: factors of the policy gradient, for rollouts
            sampled by another policy or engine.
        importance_weights_per_token: like advantages_per_token.
        loss: a name in `ops.LOSSES`, or a function such as those in maxrl_fast/algorithms/losses.
        loss_options: the loss's options by name, such as {"tau_positive": 1.0} for sapo.
        kl: "k1", "k2", "k3" (Schulman 2020), or "k3+", k3's value with k2's gradient.
        temperature: a number, or [T].
        aggregation: "token_mean" divides the sum over tokens by their number, "seq_mean_token_mean"
            averages each response's mean, "seq_mean_token_sum" averages each response's sum,
            "seq_sum_constant" divides the sum by `denominator` (Dr. GRPO).
        mask: [T] bool, False for tokens to leave out, which are not read.
        denominator: the number, or [], that divides the sum. Give the count of the whole batch
            (tokens, or responses), so that the losses of micro-batches and ranks add up. Default:
            the count in this call.

    Returns:
        The loss, a float32 scalar (float64 for float64 logits), and metrics, detached float64
        scalars on the device: tokens (not masked), dropped_tokens (those with zero gradient), and
        means over the others, 0 over none: ratio, ratio_clamped (whether a log-ratio was clamped),
        clipped_low and clipped_high, kl, entropy, logprob_diff (|logp - old|).
    """
    shape = shape_of(logits)
    terms = LossTerms(
        loss, aggregation, clip_low, clip_high, dual_clip, kl, kl_coef, entropy_coef, loss_options
    )
    batch = token_batch(
        terms,
        shape,
        logits.device,
        targets,
        advantages,
        cu_seqlens,
        advantages_per_token=advantages_per_token,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        importance_weights=importance_weights,
        importance_weights_per_token=importance_weights_per_token,
        temperature=temperature,
        mask=mask,
        denominator=denominator,
    )
    if not has_kernels(logits.device) or not terms.spec.fused:
        sums = _by_function(logits, batch, terms)
    else:
        rows = contiguous_rows(logits)
        needed = needs_gradient(logits)
        compute = partial(kernels.token_loss, rows, batch, terms.of_kernel, needed)
        sums = LossWithGradients.apply("policy_gradient_loss", compute, rows)
    return loss_and_metrics(sums, logits)


def _by_function(logits: Tensor, batch: TokenBatch, terms: LossTerms) -> Tensor:
    if not has_kernels(logits.device) or terms.spec.reads_logits:
        # masked logits may be NaN, and so their gradient
        logits = torch.where(batch.loss_mask()[:, None], logits, 0.0)
    logprobs, entropy = token_logprobs(logits, batch.targets, temperature=batch.temperature)
    terms, batch = compared(terms, batch, logprobs, entropy)
    if terms.spec.reads_logits:
        rows = scaled(logits, batch.temperature)
        return loss_of_logits(terms, batch, slice(0, len(logits)), rows)
    return function_loss(terms, batch, tokens_of(batch, logprobs, entropy))


def loss_and_metrics(sums: Tensor, like: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    named = LossSums(*sums.detach().unbind())
    read = (named.tokens - named.dropped_tokens).clamp_min(1)
    # one launch for all means
    means = dict(zip(_MEANS, (sums.detach()[-len(_MEANS) :] / read).unbind(), strict=True))
    metrics = {"tokens": named.tokens, "dropped_tokens": named.dropped_tokens, **means}
    return sums[0].to(real_dtype(like.dtype)), metrics


def contiguous_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()
