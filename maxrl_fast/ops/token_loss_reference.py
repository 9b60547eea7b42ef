"""The token losses in plain PyTorch: for tests, and for devices without a kernel."""

import torch
from torch import Tensor

from maxrl_fast import _C
from maxrl_fast.ops.token_batch import LossTerms, TokenBatch, real_dtype
from maxrl_fast.ops.token_loss_kernel import LossSums


def token_logprobs_reference(logits: Tensor, targets: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return what ops.token_logprobs returns; differentiable by autograd."""
    tau = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    log_p = torch.log_softmax(logits.to(real_dtype(logits.dtype)) / tau, -1)
    # A token masked out by -inf logits has p log p = 0, not NaN.
    entropy = -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


def token_loss_reference(logits: Tensor, batch: TokenBatch, terms: LossTerms) -> Tensor:
    """Return the LossSums, float64 [10]; the first, the loss, is differentiable by autograd."""
    keep = batch.counted()
    must_read = batch.has_gradient(terms)
    # Masked logits may be NaN, and 0 times NaN in the backward pass would be NaN.
    logits = torch.where(batch.needed_rows(terms)[:, None], logits, 0.0)
    logp, entropy = token_logprobs_reference(logits, batch.targets.where(keep, 0), batch.temperature)
    old, ref = (None if x is None else torch.where(keep, x, logp.detach()) for x in (batch.old_logprobs, batch.ref_logprobs))
    advantage, *importance = batch.factors()
    for weights in importance:
        advantage = advantage * weights

    log_ratio = logp - (logp.detach() if old is None else old)
    logprob_diff = log_ratio.abs()
    if terms.loss == "gspo" and batch.old_logprobs is not None:
        by_sequence = batch.by_token(batch.mean_log_ratio(logp.detach()))
        log_ratio = by_sequence + (logp - logp.detach())
    log_ratio, is_clamped = clamped(log_ratio)
    ratio = log_ratio.exp()
    value = surrogate(terms, advantage, ratio, logp)
    divergence = torch.zeros_like(logp)
    if ref is not None:
        to_ref, is_ref_clamped = clamped(logp - ref)
        is_clamped = is_clamped | is_ref_clamped
        divergence = kl_estimates(to_ref, terms.kl)
        value = value + terms.kl_coef * divergence if terms.kl_coef else value
    if terms.entropy_coef:
        value = value - terms.entropy_coef * entropy
    if batch.sequence_tokens is not None:
        value = value / batch.by_token(batch.sequence_tokens.clamp_min(1))

    low, high = ratio < 1 - terms.clip_low, ratio > 1 + terms.clip_high
    if terms.loss != "cispo":
        low, high = low & (advantage < 0), high & (advantage > 0)
    if terms.loss == "reinforce":
        low = high = torch.zeros_like(keep)

    def total(x: Tensor) -> Tensor:
        return torch.where(must_read, x, torch.zeros((), dtype=x.dtype, device=x.device)).sum().double()

    return torch.stack(
        LossSums(
            loss=total(value) / batch.denominator,
            tokens=keep.sum().double(),
            dropped_tokens=(keep & ~must_read).sum().double(),
            ratio=total(ratio.detach()),
            ratio_clamped=total(is_clamped.to(logp.dtype)),
            clipped_low=total(low.to(logp.dtype)),
            clipped_high=total(high.to(logp.dtype)),
            kl=total(divergence.detach()),
            entropy=total(entropy.detach()),
            logprob_diff=total(logprob_diff.detach()),
        )
    )


def clamped(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-ratios limited as in csrc/token_loss.h, with zero gradient beyond the limits, and which were limited."""
    is_clamped = log_ratio.abs() > _C.MAX_LOG_RATIO
    limited = log_ratio.detach().clamp(-_C.MAX_LOG_RATIO, _C.MAX_LOG_RATIO)
    return torch.where(is_clamped, limited, log_ratio), is_clamped


def surrogate(terms: LossTerms, advantage: Tensor, ratio: Tensor, logp: Tensor) -> Tensor:
    """Return the policy-gradient term of each token's loss [T]."""
    if terms.loss == "reinforce":
        return -advantage * logp
    clipped = ratio.clamp(1 - terms.clip_low, 1 + terms.clip_high)
    if terms.loss == "cispo":
        return -clipped.detach() * advantage * logp
    free, bound = -advantage * ratio, -advantage * clipped
    value = torch.where(free >= bound, free, torch.where(free.isnan(), free, bound))
    limit = -advantage * terms.dual_clip
    value = torch.where((advantage < 0) & (value > limit), limit, value)
    return torch.where(advantage == 0, 0.0, value)


def kl_estimates(d: Tensor, kind: str) -> Tensor:
    """Return estimates [T] of KL(policy || reference) from d = logp - ref of sampled tokens (Schulman 2020)."""
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    k3 = torch.expm1(-d) + d
    if kind == "k3":
        return k3
    k2 = d.square() / 2
    return k2 + (k3 - k2).detach()
