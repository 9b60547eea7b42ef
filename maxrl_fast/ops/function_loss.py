"""Token losses that are functions of Tokens: from log-probs to the LossSums of fused losses.

A function needs the log-probs first, and autograd gives their gradient: one more multiplication
with the output matrix than fused losses.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from maxrl_fast.algorithms.losses.registry import call_rows, checked
from maxrl_fast.algorithms.tokens import MAX_LOG_RATIO, Tokens, limited
from maxrl_fast.ops.logit_chunks import capped_logits, default_chunk, logits_dtype
from maxrl_fast.ops.loss_kernel import (
    LossSums,
    LossTerms,
    TokenBatch,
    real_dtype,
    token_temperature,
)

_COPIES = 8  # float32 copies of a chunk of logits that functions of rows and their gradients need


def tokens_of(
    batch: TokenBatch, logprobs: Tensor, entropy: Tensor, rows: Tensor | None = None
) -> Tokens:
    """Return a loss function's view of the batch; logprobs, entropy [T] and rows [T, R] may have
    a gradient."""
    mask = batch.loss_mask()

    def kept(x: Tensor) -> Tensor:  # masked log-probs may be NaN
        return torch.where(mask, x.double(), 0.0)

    logprobs = kept(logprobs)
    old = logprobs.detach() if batch.old_logprobs is None else kept(batch.old_logprobs)
    return Tokens(
        logprobs=logprobs,
        entropy=kept(entropy),
        old_logprobs=old,
        ref_logprobs=old if batch.ref_logprobs is None else kept(batch.ref_logprobs),
        advantages=kept(batch.advantages),
        mask=mask,
        cu_seqlens=batch.cu_seqlens,
        rows=None if rows is None else rows.double(),
        importance_weights=1.0
        if batch.importance_weights is None
        else kept(batch.importance_weights),
    )


def function_loss(terms: LossTerms, batch: TokenBatch, tokens: Tokens) -> Tensor:
    """Return the LossSums [10] of a loss that is a function, with the gradient of the first."""
    loss = terms.spec
    function = loss.bind(dict(terms.options), **terms.clips)
    # A function may change what it is given, but neither the caller's tensors nor what counts here.
    own = ("mask", "cu_seqlens", "advantages", "old_logprobs", "ref_logprobs")
    given = replace(tokens, **{name: getattr(tokens, name).clone() for name in own})
    values = checked(loss, function(given), tokens)
    tokens.metrics = given.metrics
    has_advantage = tokens.mask & (tokens.advantages != 0)
    # tokens in the loss; the others' values may be NaN
    counts = tokens.mask if terms.needs_every_token else has_advantage
    is_read = counts  # tokens in the metrics
    if loss.over_batch and not (terms.kl_coef or terms.entropy_coef):
        is_read = has_advantage | counts & (values.detach() != 0)
    difference = (tokens.logprobs - tokens.old_logprobs).detach()
    log_ratio = difference if given.metric_log_ratio is None else given.metric_log_ratio
    is_limited = log_ratio.abs() > MAX_LOG_RATIO
    divergence = torch.zeros_like(difference)
    if batch.ref_logprobs is not None:
        to_ref = tokens.logprobs - tokens.ref_logprobs
        is_limited = is_limited | (to_ref.detach().abs() > MAX_LOG_RATIO)
        divergence = kl_estimates(limited(to_ref), terms.kl)
        values = values + terms.kl_coef * divergence if terms.kl_coef else values
    if terms.entropy_coef:
        values = values - terms.entropy_coef * tokens.entropy

    def total(x: Tensor) -> Tensor:
        return torch.where(is_read, x.double(), 0.0).sum()

    sums = LossSums(
        loss=torch.where(counts, values * batch.weights, 0.0).sum(),
        tokens=tokens.mask.sum().double(),
        dropped_tokens=(tokens.mask & ~is_read).sum().double(),
        ratio=total(limited(log_ratio).exp()),
        ratio_clamped=total(is_limited),
        clipped_low=total(given.clipped_low),
        clipped_high=total(given.clipped_high),
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
    logits: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """For tests, and for devices without a kernel."""
    log_p = _log_softmax(logits, temperature)
    # A token masked out by -inf logits has p log p = 0, not NaN.
    entropy = -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


def _log_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    real = real_dtype(logits.dtype)
    return torch.log_softmax(logits.to(real) / temperature[:, None].to(real), -1)


def rows_of_loss(terms: LossTerms, logits: Tensor, batch: TokenBatch) -> Tensor | None:
    """Return [T, R] of the log-softmax of logits [T, V], if the loss reads rows."""
    if terms.spec.rows is None:
        return None
    log_p = _log_softmax(logits, batch.temperature)
    return call_rows(terms.spec, dict(terms.options), log_p, batch.targets)


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
    chunks; the backward pass recomputes the logits."""
    real = real_dtype(hidden.dtype)
    temperature = token_temperature(temperature, len(hidden), hidden.device, None)
    copies = _COPIES * real.itemsize // logits_dtype(hidden).itemsize
    size = max(default_chunk(hidden, len(weight)) // copies, 1)

    def of_chunk(hidden: Tensor, weight: Tensor, targets: Tensor, tau: Tensor) -> Tensor:
        return function(_log_softmax(capped_logits(hidden, weight, softcap), tau), targets)

    parts = []
    for start in range(0, max(len(hidden), 1), size):
        chunk = slice(start, start + size)
        rows = hidden[chunk], weight, targets[chunk], temperature[chunk]
        parts.append(checkpoint(of_chunk, *rows, use_reentrant=False))
    return torch.cat(parts)
