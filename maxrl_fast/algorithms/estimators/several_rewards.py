"""Estimators that take several rewards, reward_parts [R, G, N], NaN where one does not apply."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import is_host_readable
from maxrl_fast.algorithms.estimator import Ddof, Eps, estimator
from maxrl_fast.algorithms.estimators.moments import grpo
from maxrl_fast.algorithms.group import BATCH, Group, ratio
from maxrl_fast.algorithms.options import Help, Limit


@estimator(
    "GDPO, Liu et al. 2026, arXiv:2601.05242, as the authors' code and TRL's "
    "normalize_then_sum compute it",
    weight="depends on the rewards that are summed",
    over_batch=True,
)
def gdpo(
    g: Group,
    reward_parts: Tensor,
    *,
    reward_weights: Sequence[float],
    eps: Eps = 1e-4,
    ddof: Ddof = 1,
) -> Tensor:
    """x/(std of x over the batch + eps), x = sum of w_k (r_k - mean)/(std + eps) over rewards k;
    eps 1e-4."""
    x = torch.zeros_like(g.rewards)
    for part, weight in zip(reward_parts, reward_weights, strict=True):
        applies = g.valid & ~part.isnan()
        x = x + weight * torch.where(applies, grpo(Group(part, applies), eps=eps, ddof=ddof), 0.0)
    return ratio(x, g.std(x, ddof, over=BATCH) + eps)


@estimator(
    "HERO, Tao et al. 2025, arXiv:2510.07242, eqs. 3-5 as others quote them; w's constants "
    "are its main text's",
    weight="depends on the scores",
    over_batch=True,
)
def hero(
    g: Group,
    reward_parts: Tensor,
    *,
    reward_weights: Sequence[float],
    score_range: Annotated[
        float,
        Limit("above 0 and below .5", lambda x: 0 < x < 0.5),
        Help("Half-width of the score range within a verifier class."),
    ] = 0.05,
    eps: Eps = 1e-6,
    ddof: Ddof = 1,
) -> Tensor:
    """w (x - mean of x), x = v - a + 2a (d - min)/(max - min + eps), v a verifier's, d a score, min
    and max over equal v; w = .5 + 1.5 sigmoid(5 (std of d - its mean over the groups)); a =
    score_range .05."""
    if len(reward_parts) < 2 or reward_weights[0] != 1:
        weights = " ".join(f"{weight:g}" for weight in reward_weights)
        raise ValueError(
            "hero takes a verifier of weight 1 and one or more scores as reward_parts, got "
            f"{len(reward_parts)} with the weights {weights}"
        )
    verified, scores = reward_parts[0], reward_parts[1:].nan_to_num(0.0)
    other = g.valid & (verified != 0) & (verified != 1)
    if is_host_readable(other) and bool(other.any()):
        raise ValueError(f"the verifier of hero must give 0 or 1, got {float(verified[other][0])}")
    scored = g.valid & ~reward_parts[1:].isnan().all(0)
    score = share = torch.zeros_like(g.rewards)
    for part, part_weight in zip(scores, reward_weights[1:], strict=True):
        score = score + part_weight * part
    for verdict in (0, 1):
        same = Group(score, scored & (verified == verdict))
        low, high = same.smallest(score), same.largest(score)
        own = torch.where(same.valid & (high > low), (score - low) / (high - low + eps), 0.0)
        # a response to which no score applies takes the mean of those with its verdict
        own = torch.where(same.valid, own, same.mean(own))
        share = torch.where(verified == verdict, own, share)
    of_scores = Group(score, scored)
    spread = torch.where(of_scores.n > ddof, of_scores.std(score, ddof), 0.0)  # [G, 1]
    weight = 0.5 + 1.5 * torch.sigmoid(5 * (spread - spread.sum() / (g.n > 0).sum()))
    x = torch.where(other, torch.nan, verified) - score_range + 2 * score_range * share
    return weight * g.centre(x)
