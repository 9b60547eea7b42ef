"""Losses by the ratio of each token."""

import math

import torch
from torch import Tensor

from maxrl_fast.algorithms.losses.core import clipped
from maxrl_fast.algorithms.losses.registry import token_loss
from maxrl_fast.algorithms.options import NotNegative, Positive
from maxrl_fast.algorithms.tokens import Tokens


@token_loss(
    "Gao et al. 2025, arXiv:2511.20347; TRL, verl",
    weight="4 sigmoid (1 - sigmoid) rho, near 0 for small and for large rho",
)
def sapo(t: Tokens, *, tau_positive: Positive = 1.0, tau_negative: Positive = 1.05) -> Tensor:
    """-A (4 / tau) sigmoid(tau (rho - 1)), tau by the sign of A."""
    tau = t.by_sign(tau_positive, tau_negative)
    return -t.advantages * (4 / tau) * torch.sigmoid(tau * (t.ratio - 1))


@token_loss(
    "DPPO 2026, arXiv:2602.04879, with the KL term of Kimi K2.5, as prime-rl's default loss",
    weight="rho, and 0 where the probability has moved too far; and the pull of (log rho)^2 on "
    "every token",
    all_tokens=True,
)
def dppo(
    t: Tokens, *, low: NotNegative = 0.2, high: NotNegative = 0.2, kl: NotNegative = 1e-3
) -> Tensor:
    """-A rho, 0 where A > 0 and pi - pi_old > high, or A < 0 and pi - pi_old < -low; plus kl (log
    rho)^2.
    """
    ratio = t.ratio.detach()
    # (pi - pi_old) rho, compared with the bounds times rho
    change = t.logprobs.detach().exp() * (ratio - 1)
    below = (t.advantages < 0) & (change < -low * ratio)
    above = (t.advantages > 0) & (change > high * ratio)
    t.mark_clipped(below, above)
    return torch.where(below | above, 0.0, -t.advantages * t.ratio) + kl * t.log_ratio.square()


@token_loss(
    "DISPO, Karaman et al. 2026, arXiv:2602.00983; formula and bounds from secondary sources; no "
    "code was found",
    weight="clip(rho)",
)
def dispo(
    t: Tokens,
    *,
    low_positive: NotNegative = 0.8,
    high_positive: NotNegative = 11.0,
    low_negative: NotNegative = 0.0,
    high_negative: NotNegative = 101.0,
) -> Tensor:
    """-sg(clip(rho, low, high)) A logp, bounds by the sign of A."""
    for sign, low, high in (
        ("positive", low_positive, high_positive),
        ("negative", low_negative, high_negative),
    ):
        if low > high:
            raise ValueError(
                f"low_{sign} of dispo must be at most its high_{sign}, {high:g}, got {low:g}"
            )
    ratio = t.ratio.detach()
    least, most = t.by_sign(low_positive, low_negative), t.by_sign(high_positive, high_negative)
    t.mark_clipped(ratio < least, ratio > most)
    return -ratio.clamp(least, most) * t.advantages * t.logprobs


@token_loss(
    "ROLL's topr with the sign of A in place of the score's; Trinity-RFT's topr; compared with "
    "both",
    weight="1 for A > 0, min(rho, 1) below",
)
def topr_token(t: Tokens) -> Tensor:
    """-A logp for A > 0, -sg(min(rho, 1)) A logp below."""
    return tapered(t, t.ratio.detach())


def tapered(t: Tokens, ratio: Tensor) -> Tensor:
    """Return -A logp [T], times min(ratio, 1) for A < 0."""
    is_tapered = t.advantages < 0
    t.mark_clipped(torch.zeros_like(is_tapered), is_tapered & (ratio > 1))
    return -torch.where(is_tapered, ratio.clamp_max(1), 1.0) * t.advantages * t.logprobs


@token_loss(
    "Entropy-Adv, Cheng et al. 2025, arXiv:2506.14758; the MaxPO paper's baseline",
    weight="rho, and 0 where the clip is active; and that of the bonus, at most rho / kappa",
)
def entropy_adv(
    t: Tokens,
    *,
    alpha: NotNegative = 0.4,
    kappa: Positive = 2.0,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    dual_clip: NotNegative = math.inf,
) -> Tensor:
    """ppo with w (A + sg(min(alpha H, |A| / kappa))) in place of w A, H the token's entropy, w its
    importance weight."""
    entropy = t.importance_weights * t.entropy.detach()
    bonus = torch.minimum(alpha * entropy, t.advantages.abs() / kappa)
    return clipped(t, t.ratio, t.advantages + bonus, clip_low, clip_high, dual_clip)
