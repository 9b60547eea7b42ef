"""Token losses that are functions of Tokens: from log-probs to the LossSums of fused losses.

A function needs the log-probs first, and autograd gives their gradient: one more multiplication
with the output matrix than fused losses.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from maxrl_fast.algorithms.losses import checked
from maxrl_fast.algorithms.tokens import MAX_LOG_RATIO, Tokens, limited
from maxrl_fast.ops.logit_chunks import capped_logits, default_chunk, logits_dtype
from maxrl_fast.ops.loss_kernel import LossSums, LossTerms, TokenBatch, real_dtype

_COPIES = 8  # float32 copies of a chunk of logits that functions of them and gradients need


def tokens_of(batch: TokenBatch, logprobs: Tensor, entropy: Tensor) -> Tokens:
    """Return the batch for a loss function; logprobs and entropy [T] may have a gradient."""
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
        targets=batch.targets,
        statistics=batch.statistics,
        importance_weights=1.0
        if batch.importance_weights is None
        else kept(batch.importance_weights),
    )


def by_function(
    terms: LossTerms,
    batch: TokenBatch,
    logprobs: Callable[[], tuple[Tensor, Tensor]],
    of_logits: Callable[[LossTerms, TokenBatch], Tensor],
) -> Tensor:
    """Return the LossSums [10] of a loss that is a function, by log-probs and entropies, or where
    it reads logits by `of_logits`. First what it reads of all tokens is found: its statistics, or
    the mask and the loss that it is for."""
    spec = terms.spec
    compares = spec.over_batch and batch.statistics is None
    if compares or not spec.reads_logits:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not spec.reads_logits):
            given = logprobs()
    if compares:
        tokens = tokens_of(batch, *(x.detach() for x in given))
        found = spec.compare(tokens, dict(terms.options))
        if spec.masks:
            terms, batch = terms.of_masked, batch._replace(advantages=batch.advantages * found)
        else:
            batch = batch._replace(statistics=found)
    if spec.reads_logits:
        return of_logits(terms, batch)
    return function_loss(terms, batch, tokens_of(batch, *given))


def function_loss(
    terms: LossTerms, batch: TokenBatch, tokens: Tokens, logits: Tensor | None = None
) -> Tensor:
    """Return the LossSums [10] of a loss that is a function, with the gradient of the first.
    logits: [T, V] divided by the temperature, for a loss that reads them."""
    function = terms.spec.bind(dict(terms.options), **terms.clips)
    # tokens in the loss and the metrics; the others' values may be NaN
    counts = tokens.mask
    if not terms.needs_every_token:
        counts = counts & (tokens.advantages != 0)
    values = function(tokens) if logits is None else function(tokens, logits)
    values = checked(terms.spec, values, tokens)
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

    def total(x: Tensor) -> Tensor:
        return torch.where(counts, x.double(), 0.0).sum()

    sums = LossSums(
        loss=torch.where(counts, values * batch.weights, 0.0).sum(),
        tokens=tokens.mask.sum().double(),
        dropped_tokens=(tokens.mask & ~counts).sum().double(),
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
    logits: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    return _logprobs(scaled(logits, temperature), targets)


def _logprobs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits, -1)
    # A token masked out by -inf logits has p log p = 0, not NaN.
    entropy = -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


def scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    real = real_dtype(logits.dtype)
    return logits.to(real) / temperature[:, None].to(real)


def loss_of_logits(terms: LossTerms, batch: TokenBatch, part: slice, logits: Tensor) -> Tensor:
    """Return the LossSums [10] of a part of the tokens."""
    bounds = (batch.cu_seqlens - part.start).clamp(0, len(logits))
    own = batch.at(part)._replace(cu_seqlens=bounds)
    return function_loss(terms, own, tokens_of(own, *_logprobs(logits, own.targets)), logits)


def by_chunks(
    hidden: Tensor,
    weight: Tensor,
    function: Callable[[slice, Tensor], Tensor],
    temperature: Tensor,
    softcap: float,
) -> list[Tensor]:
    """Return function(part, logits [C, V]) of each part of the tokens, for the logits hidden @
    weight.T divided by the temperature [T]; the backward pass recomputes them."""
    copies = _COPIES * real_dtype(hidden.dtype).itemsize // logits_dtype(hidden).itemsize
    size = max(default_chunk(hidden, len(weight)) // copies, 1)

    def of_part(hidden: Tensor, weight: Tensor, part: slice) -> Tensor:
        return function(part, scaled(capped_logits(hidden, weight, softcap), temperature[part]))

    parts = [slice(a, min(a + size, len(hidden))) for a in range(0, max(len(hidden), 1), size)]
    return [checkpoint(of_part, hidden[x], weight, x, use_reentrant=False) for x in parts]
