"""Token losses that are functions of Tokens: from log-probs to the LossSums of fused losses.

A function needs the log-probs first, and autograd gives their gradient: one more multiplication
with the output matrix than fused losses.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from maxrl_fast.algorithms.losses.registry import (
    TokenLoss,
    call_rows,
    checked,
    learns_without_advantage,
)
from maxrl_fast.algorithms.tokens import MAX_LOG_RATIO, Tokens, limited
from maxrl_fast.ops.logit_chunks import capped_logits, default_chunk
from maxrl_fast.ops.token_batch import LossTerms, TokenBatch, real_dtype
from maxrl_fast.ops.token_loss_kernel import LossSums

_COPIES = 8  # float32 copies of a chunk of logits that functions of rows and their gradients need


def tokens_of(
    batch: TokenBatch, logprobs: Tensor, entropy: Tensor, rows: Tensor | None = None
) -> Tokens:
    """Return a loss function's view of the batch; logprobs, entropy [T] and rows [T, R] may have
    a gradient."""
    mask = batch.counted()
    advantages, *weights = batch.factors()

    def kept(x: Tensor) -> Tensor:  # masked log-probs may be NaN
        return torch.where(mask, x.double(), 0.0)

    importance = kept(weights[0]) if weights else mask.double()
    logprobs = kept(logprobs)
    old = logprobs.detach() if batch.old_logprobs is None else kept(batch.old_logprobs)
    return Tokens(
        logprobs=logprobs,
        entropy=kept(entropy),
        old_logprobs=old,
        ref_logprobs=old if batch.ref_logprobs is None else kept(batch.ref_logprobs),
        advantages=kept(advantages) * importance,
        importance_weights=importance,
        mask=mask,
        cu_seqlens=batch.cu_seqlens,
        rows=None if rows is None else rows.double(),
    )


def function_loss(
    loss: TokenLoss,
    options: Mapping[str, float],
    terms: LossTerms,
    batch: TokenBatch,
    tokens: Tokens,
) -> Tensor:
    clips = {"clip_low": terms.clip_low, "clip_high": terms.clip_high, "dual_clip": terms.dual_clip}
    values = checked(loss, loss.bind(options, **clips)(tokens), tokens)
    needs_advantage = not (
        terms.kl_coef
        or terms.entropy_coef
        or learns_without_advantage(loss, tuple(options.items()))
    )
    has_advantage = tokens.mask & (tokens.advantages != 0)
    # tokens in the loss; the others' values may be NaN
    counts = has_advantage if needs_advantage else tokens.mask
    is_read = counts  # tokens in the metrics
    if loss.over_batch and not (terms.kl_coef or terms.entropy_coef):
        is_read = has_advantage | counts & (values.detach() != 0)
    difference = (tokens.logprobs - tokens.old_logprobs).detach()
    log_ratio = difference if tokens.metric_log_ratio is None else tokens.metric_log_ratio
    is_limited = log_ratio.abs() > MAX_LOG_RATIO
    divergence = torch.zeros_like(difference)
    if batch.ref_logprobs is not None:
        to_ref = tokens.logprobs - tokens.ref_logprobs
        is_limited = is_limited | (to_ref.detach().abs() > MAX_LOG_RATIO)
        divergence = kl_estimates(limited(to_ref), terms.kl)
        values = values + terms.kl_coef * divergence if terms.kl_coef else values
    if terms.entropy_coef:
        values = values - terms.entropy_coef * tokens.entropy
    if batch.sequence_tokens is not None:
        values = values / batch.by_token(batch.sequence_tokens.clamp_min(1))

    def total(x: Tensor) -> Tensor:
        return torch.where(is_read, x.double(), 0.0).sum()

    sums = LossSums(
        loss=torch.where(counts, values, 0.0).sum() / batch.denominator,
        tokens=tokens.mask.sum().double(),
        dropped_tokens=(tokens.mask & ~is_read).sum().double(),
        ratio=total(limited(log_ratio).exp()),
        ratio_clamped=total(is_limited),
        clipped_low=total(tokens.clipped_low),
        clipped_high=total(tokens.clipped_high),
        kl=total(divergence.detach()),
        entropy=total(tokens.entropy.detach()),
        logprob_diff=total(difference.abs()),
    )
    return torch.stack(sums)


def kl_estimates(d: Tensor, kind: str) -> Tensor:
    """Return estimates [T] of KL(policy || reference) from d = logp - ref (Schulman 2020)."""
    if kind == "k1":
        return d
    k2 = d.square() / 2
    if kind == "k2":
        return k2
    k3 = torch.expm1(-d) + d
    return k3 if kind == "k3" else k2 + (k3 - k2).detach()


def token_logprobs_reference(
    logits: Tensor, targets: Tensor, temperature: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch is for tests, and for devices without a kernel."""
    tau = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    log_p = torch.log_softmax(logits.to(real_dtype(logits.dtype)) / tau, -1)  # [T, V]
    # A token masked out by -inf logits has p log p = 0, not NaN.
    entropy = -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


def rows_of_loss(
    loss: TokenLoss,
    options: Mapping[str, float],
    logits: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
) -> Tensor | None:
    """Return [T, R] of the log-softmax of logits [T, V], if the loss reads rows."""
    if loss.rows is None:
        return None
    tau = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    return call_rows(
        loss, options, torch.log_softmax(logits.to(real_dtype(logits.dtype)) / tau, -1), targets
    )


def linear_rows(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    function: Callable[[Tensor, Tensor], Tensor],
    *,
    temperature: float | Tensor = 1.0,
    softcap: float = 0.0,
) -> Tensor:
    """Return function(log_p [C, V], targets [C]) as [T, R], for the logits hidden @ weight.T in
    chunks.

    In plain PyTorch; the backward pass recomputes the logits.
    """
    real = real_dtype(hidden.dtype)
    size = max(
        default_chunk(hidden, len(weight)) * hidden.element_size() // (_COPIES * real.itemsize), 1
    )

    def of_chunk(hidden: Tensor, weight: Tensor, targets: Tensor, tau: float | Tensor) -> Tensor:
        return function(
            torch.log_softmax(capped_logits(hidden, weight, softcap).to(real) / tau, -1), targets
        )

    parts = []
    for start in range(0, max(len(hidden), 1), size):
        chunk = slice(start, start + size)
        tau = temperature[chunk, None] if isinstance(temperature, Tensor) else temperature
        parts.append(
            checkpoint(of_chunk, hidden[chunk], weight, targets[chunk], tau, use_reentrant=False)
        )
    return torch.cat(parts)
