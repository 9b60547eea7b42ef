"""The token losses in plain PyTorch: for tests, and for devices without a kernel."""

from collections.abc import Callable
from typing import NamedTuple

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

    own_log_ratio = logp - (logp.detach() if old is None else old)
    log_ratio = own_log_ratio
    if terms.by_sequence and batch.old_logprobs is not None:
        of_sequence = batch.by_token(batch.log_ratio_of_sequences(terms, logp.detach()))
        log_ratio = of_sequence + (logp - logp.detach())
    log_ratio, is_clamped = clamped(log_ratio)
    ratio = log_ratio.exp()
    value, low, high = surrogate(terms, TokenTerms(advantage, logp, own_log_ratio.detach(), log_ratio, ratio))
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
            logprob_diff=total(own_log_ratio.detach().abs()),
        )
    )


def clamped(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-ratios limited as in csrc/token_loss.h, with zero gradient beyond the limits, and which were limited."""
    is_clamped = log_ratio.abs() > _C.MAX_LOG_RATIO
    limited = log_ratio.detach().clamp(-_C.MAX_LOG_RATIO, _C.MAX_LOG_RATIO)
    return torch.where(is_clamped, limited, log_ratio), is_clamped


class TokenTerms(NamedTuple):
    """What the policy-gradient terms are computed from, [T] each; a ratio's gradient is that of its own token's logp."""

    advantage: Tensor
    logp: Tensor
    own_log_ratio: Tensor  # of the token, not clamped, without a gradient
    log_ratio: Tensor  # of the token or its sequence, clamped
    ratio: Tensor


Clipped = tuple[Tensor, Tensor, Tensor]  # the value, and which tokens the loss has clipped from below and from above


def surrogate(terms: LossTerms, x: TokenTerms) -> Clipped:
    """Return the policy-gradient term of each token's loss [T], and which tokens [T] are clipped from below and above."""
    value, low, high = _TERMS[terms.loss](terms, x)
    if terms.loss != "dppo":  # which has a term without the advantage
        value = torch.where(x.advantage == 0, 0.0, value)
    return value, low, high


def _nowhere(x: TokenTerms) -> tuple[Tensor, Tensor]:
    no = torch.zeros_like(x.ratio, dtype=torch.bool)
    return no, no


def _reinforce(terms: LossTerms, x: TokenTerms) -> Clipped:
    return -x.advantage * x.logp, *_nowhere(x)


def _ppo(terms: LossTerms, x: TokenTerms) -> Clipped:
    low, high = 1 - terms.clip_low, 1 + terms.clip_high
    free, bound = -x.advantage * x.ratio, -x.advantage * x.ratio.clamp(low, high)
    value = torch.where(free >= bound, free, torch.where(free.isnan(), free, bound))
    limit = -x.advantage * terms.dual_clip
    value = torch.where((x.advantage < 0) & (value > limit), limit, value)
    return value, (x.ratio < low) & (x.advantage < 0), (x.ratio > high) & (x.advantage > 0)


def _cispo(terms: LossTerms, x: TokenTerms) -> Clipped:
    return _weighted(x, 1 - terms.clip_low, 1 + terms.clip_high)


def _weighted(x: TokenTerms, low: float | Tensor, high: float | Tensor) -> Clipped:
    """Return -clip(rho) A logp with a constant ratio."""
    ratio = x.ratio.detach()
    bounds = (torch.as_tensor(bound, dtype=ratio.dtype, device=ratio.device) for bound in (low, high))
    weight = ratio.clamp(*bounds)
    return -weight * x.advantage * x.logp, ratio < low, ratio > high


def _gmpo(terms: LossTerms, x: TokenTerms) -> Clipped:
    low, high = terms.options
    below = (x.advantage < 0) & (x.own_log_ratio < -low)
    above = (x.advantage > 0) & (x.own_log_ratio > high)
    return -x.advantage * torch.where(below | above, x.ratio.detach(), x.ratio), below, above


def _vespo(terms: LossTerms, x: TokenTerms) -> Clipped:
    k_positive, lambda_positive, k_negative, lambda_negative = terms.options
    k, rate = _by_sign(x, k_positive, k_negative), _by_sign(x, lambda_positive, lambda_negative)
    phi = (rate + k * x.log_ratio - rate * x.ratio).exp().detach()
    return -phi * x.advantage * x.logp, *_nowhere(x)


def _by_sign(x: TokenTerms, positive: float, negative: float) -> Tensor:
    return torch.where(x.advantage < 0, negative, torch.full_like(x.ratio, positive)).detach()


def _sapo(terms: LossTerms, x: TokenTerms) -> Clipped:
    tau = _by_sign(x, *terms.options)
    return -x.advantage * (4 / tau) * torch.sigmoid(tau * (x.ratio - 1)), *_nowhere(x)


def _dppo(terms: LossTerms, x: TokenTerms) -> Clipped:
    low, high, kl = terms.options
    ratio = x.ratio.detach()
    change = x.logp.detach().exp() * (ratio - 1)  # times pi / pi_old, as the bounds
    below, above = (x.advantage < 0) & (change < -low * ratio), (x.advantage > 0) & (change > high * ratio)
    return torch.where(below | above, 0.0, -x.advantage * x.ratio) + kl * x.log_ratio.square(), below, above


def _dispo(terms: LossTerms, x: TokenTerms) -> Clipped:
    low_positive, high_positive, low_negative, high_negative = terms.options
    return _weighted(x, _by_sign(x, low_positive, low_negative), _by_sign(x, high_positive, high_negative))


def _topr(terms: LossTerms, x: TokenTerms) -> Clipped:
    is_tapered = x.advantage < 0
    weight = torch.where(is_tapered, x.ratio.detach().clamp_max(1), 1.0)
    return -weight * x.advantage * x.logp, _nowhere(x)[0], is_tapered & (x.ratio.detach() > 1)


_TERMS: dict[str, Callable[[LossTerms, TokenTerms], Clipped]] = {
    "reinforce": _reinforce,
    **dict.fromkeys(("ppo", "gspo", "luspo"), _ppo),
    "cispo": _cispo,
    "gmpo": _gmpo,
    "vespo": _vespo,
    "sapo": _sapo,
    "dppo": _dppo,
    "dispo": _dispo,
    **dict.fromkeys(("topr", "topr_token"), _topr),
}


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
