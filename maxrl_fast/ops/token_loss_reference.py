"""The token losses in plain PyTorch: for tests, and for devices without a kernel."""

import math
from collections.abc import Callable
from dataclasses import replace
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
    if batch.top_tokens is not None:
        own_log_ratio = own_log_ratio + _towards_top(logits, batch, terms, advantage.detach(), logp)
    log_ratio = own_log_ratio
    if terms.by_sequence and batch.old_logprobs is not None:
        of_sequence = batch.by_token(batch.log_ratio_of_sequences(terms, logp.detach()))
        log_ratio = of_sequence + (logp - logp.detach())
    log_ratio, is_clamped = clamped(log_ratio)
    ratio = log_ratio.exp()
    token = TokenTerms(advantage, logp, own_log_ratio.detach(), log_ratio, ratio, batch.token_statistics)
    value, low, high = surrogate(terms, token)
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


def _towards_top(logits: Tensor, batch: TokenBatch, terms: LossTerms, advantage: Tensor, logp: Tensor) -> Tensor:
    """Return zeros [T] with the gradient of alpha (mean_j log p_j - logp) of simko, j over the top tokens."""
    assert batch.top_tokens is not None
    assert batch.token_statistics is not None
    takes_part = (batch.token_statistics != 0) & (advantage > 0)
    tau = batch.temperature[:, None] if isinstance(batch.temperature, Tensor) else batch.temperature
    log_p = torch.log_softmax(logits.to(real_dtype(logits.dtype)) / tau, -1)
    top_tokens = batch.top_tokens.where(batch.counted()[:, None], 0)
    moved = torch.where(takes_part, log_p.gather(-1, top_tokens).mean(-1) - logp, 0.0)
    return terms.options[0] * (moved - moved.detach())


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
    statistic: Tensor | None  # given for each token, where the loss needs one


Clipped = tuple[Tensor, Tensor, Tensor]  # the value, and which tokens the loss has clipped from below and from above


def surrogate(terms: LossTerms, x: TokenTerms) -> Clipped:
    """Return the policy-gradient term of each token's loss [T], and which tokens [T] are clipped from below and above."""
    value, low, high = _TERMS[terms.loss](terms, x)
    if terms.loss not in ("dppo", "kl_cov"):  # which have terms without the advantage
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


def _kl_cov(terms: LossTerms, x: TokenTerms) -> Clipped:
    _, coef = terms.options
    value = torch.where(x.advantage == 0, 0.0, -x.advantage * x.ratio)
    return torch.where(_chosen(x), value + coef * x.log_ratio.abs(), value), *_nowhere(x)


def _clip_cov(terms: LossTerms, x: TokenTerms) -> Clipped:
    (value, low, high), chosen = _ppo(terms, x), _chosen(x)
    value = torch.where(chosen & ~value.isnan(), 0.0, value)
    return value, torch.where(chosen, x.advantage < 0, low), torch.where(chosen, x.advantage > 0, high)


def _chosen(x: TokenTerms) -> Tensor:
    assert x.statistic is not None
    return x.statistic != 0


def _lp_reg(terms: LossTerms, x: TokenTerms) -> Clipped:
    assert x.statistic is not None
    _, _, low, high = terms.options
    is_regularised = x.logp.detach() < x.statistic
    to_proxy, _ = clamped(x.logp - torch.where(is_regularised, x.statistic, x.logp.detach()))
    own = replace(terms, clip_low=low, clip_high=high, dual_clip=math.inf)
    value, below, above = _ppo(own, x)
    value = torch.where(is_regularised, -x.advantage * x.ratio + kl_estimates(to_proxy, "k3"), value)
    return value, below & ~is_regularised, above & ~is_regularised


def _simko(terms: LossTerms, x: TokenTerms) -> Clipped:
    is_punished = _chosen(x) & (x.advantage < 0)  # for A > 0 the gradient of the log-ratio has the top tokens already
    return _ppo(terms, x._replace(advantage=torch.where(is_punished, terms.options[3] * x.advantage, x.advantage)))


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
    "kl_cov": _kl_cov,
    "clip_cov": _clip_cov,
    "lp_reg": _lp_reg,
    "simko": _simko,
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
