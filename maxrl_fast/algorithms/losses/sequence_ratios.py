"""Losses by the ratio of each response: a mean or a sum over its tokens that are not masked."""

import torch
from torch import Tensor

from maxrl_fast.algorithms.losses.registry import token_loss
from maxrl_fast.algorithms.losses.token_ratios import tapered
from maxrl_fast.algorithms.options import NotNegative
from maxrl_fast.algorithms.tokens import Tokens


@token_loss(
    "Zhao et al. 2025, arXiv:2507.20673, the authors' code; verl's geo_mean",
    weight="s, and 0 for tokens whose log-ratio is clipped",
    by_sequence=True,
)
def gmpo(t: Tokens, *, low: NotNegative = 0.4, high: NotNegative = 0.4) -> Tensor:
    """-A s, s = exp(mean_t x_t), x_t = min(log rho_t, high) for A >= 0 and max(log rho_t, -low)
    below.
    """
    x = (t.logprobs - t.old_logprobs).detach()
    # By the sign bit: an advantage below 0 times a factor of 0 is -0, and clipped as before.
    x_clipped = torch.where(t.advantages.signbit(), x.clamp_min(-low), x.clamp_max(high))
    s = t.sequence_ratio(t.sequence_mean(x_clipped))
    below, above = (t.advantages < 0) & (x < -low), (t.advantages > 0) & (x > high)
    t.mark_clipped(below, above)
    return -t.advantages * torch.where(below | above, s.detach(), s)


@token_loss("VESPO 2026, the authors' code; TRL", weight="phi(w)", by_sequence=True)
def vespo(
    t: Tokens,
    *,
    k_positive: NotNegative = 2.0,
    lambda_positive: NotNegative = 3.0,
    k_negative: NotNegative = 3.0,
    lambda_negative: NotNegative = 2.0,
) -> Tensor:
    """-sg(phi(w)) A logp, w = prod_t rho_t, phi(w) = e^lambda w^k e^(-lambda w), k and lambda by
    the sign of A.
    """
    w = t.sequence_ratio(t.sequence_sum(t.log_ratio)).detach()
    k, rate = t.by_sign(k_positive, k_negative), t.by_sign(lambda_positive, lambda_negative)
    return -(rate + k * w.log() - rate * w).exp() * t.advantages * t.logprobs


@token_loss(
    "Le Roux et al. 2025, arXiv:2503.14286, eq. 8, with the sign of A in place of the reward's; no "
    "code was found",
    weight="1 for A > 0, min(w, 1) below",
    by_sequence=True,
)
def topr(t: Tokens) -> Tensor:
    """-A logp for A > 0, -sg(min(w, 1)) A logp below, w = prod_t rho_t."""
    return tapered(t, t.sequence_ratio(t.sequence_sum(t.log_ratio)).detach())
