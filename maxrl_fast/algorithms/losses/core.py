"""The losses of almost every run. Kernels (csrc/token_loss.h) compute them; these are the
reference."""

import math

import torch
from torch import Tensor

from maxrl_fast.algorithms.losses.registry import token_loss
from maxrl_fast.algorithms.options import NotNegative
from maxrl_fast.algorithms.tokens import Tokens


def clipped(
    t: Tokens,
    ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = math.inf,
) -> Tensor:
    """Return ppo's loss [T] of these ratios and advantages, and mark clipped tokens."""
    free = -advantages * ratio
    value = torch.maximum(free, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    t.mark_clipped(
        (ratio < 1 - clip_low) & (advantages < 0), (ratio > 1 + clip_high) & (advantages > 0)
    )
    limit = -advantages * dual_clip
    return torch.where((advantages < 0) & (value > limit), limit, value)


@token_loss("Williams 1992", weight="1", fused=True)
def reinforce(t: Tokens) -> Tensor:
    """-A logp."""
    return -t.advantages * t.logprobs


@token_loss(
    "Schulman et al. 2017, eq. 7; dual clip: Ye et al. 2020",
    weight="rho, and 0 where the clip is active",
    fused=True,
)
def ppo(
    t: Tokens,
    *,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    dual_clip: NotNegative = math.inf,
) -> Tensor:
    """max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)); with dual_clip c at most -A c for A <
    0.
    """
    return clipped(t, t.ratio, t.advantages, clip_low, clip_high, dual_clip)


@token_loss("MiniMax-M1 2025", weight="clip(rho)", fused=True)
def cispo(t: Tokens, *, clip_low: NotNegative = 0.2, clip_high: NotNegative = 0.2) -> Tensor:
    """-sg(clip(rho)) A logp."""
    ratio = t.ratio.detach()
    t.mark_clipped(ratio < 1 - clip_low, ratio > 1 + clip_high)
    return -ratio.clamp(1 - clip_low, 1 + clip_high) * t.advantages * t.logprobs


@token_loss(
    "Zheng et al. 2025; with advantages per token their GSPO-token",
    weight="the response's ratio, and 0 where the clip is active",
    by_sequence=True,
    fused=True,
)
def gspo(
    t: Tokens,
    *,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    dual_clip: NotNegative = math.inf,
) -> Tensor:
    """ppo with the ratio of the response exp(mean_t log rho_t)."""
    ratio = t.sequence_ratio(t.sequence_mean(t.logprobs - t.old_logprobs))
    return clipped(t, ratio, t.advantages, clip_low, clip_high, dual_clip)
