"""RiskPO: advantages from scores of bundles of prompts, relative to tracked quantiles."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from maxrl_fast.algorithms.options import Count, Help, multiple_of
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.objectives.objective import Objective, ObjectiveStep, objective

LOW, HIGH = 0.2, 0.9  # the levels of the quantiles
_LEVELS = torch.tensor([LOW, HIGH], dtype=torch.float64)
_MIX, _RATE, _EPS = 1.5, 0.1, 1e-6
_LEAST_SPREAD = 1e-3  # a smaller standard deviation of rewards or scores counts as 0


@objective(
    "RiskPO, Ren et al. 2025, arXiv:2510.00911, as the authors' script sets it",
    name="riskpo",
    needs="N >= 2; --prompts a multiple of --bundle-size",
    refuses=multiple_of("bundle_size", "prompts"),
)
@dataclass(kw_only=True)
class RiskpoObjective(Objective):
    """(1.5 c + x)/2.5, over the stds of s in the bundle and of r in the group; s: sum of the n-th
    rewards of 5 prompts, a and b its tracked .2 and .9 quantiles; x = ((s - a)+ - (s - b)+ + a -
    b)/.7, c = -(a - s)+/.2.

    Mixed value at risk, with the settings of the authors' script (RTkenny/RiskPO). A bundle is
    `bundle_size` consecutive prompts; its n-th paper is the n-th rollout of each prompt, and the
    paper's score s the sum of their rewards. A standard deviation of 0 counts as 1. The authors'
    code does so only for r, which gives a bundle of equal scores advantages of 1e6. The first step
    sets a and b to the quantiles of its own scores; every step ends with q += .1 (level - share of
    scores below q).
    """

    bundle_size: Annotated[Count, Help("Prompts in a bundle of riskpo; it divides --prompts.")] = 5
    min_rollouts = 2

    @property
    def state(self) -> dict[str, Tensor]:
        return {"quantiles": _LEVELS * torch.nan}  # [2] float64, a and b

    def begin(self, batch: RolloutBatch, learner: Learner) -> ObjectiveStep:
        # to the host: they are few, and the quantiles are there
        rewards = batch.rewards.double().cpu()
        known = batch.has_reward.cpu()
        bundles = rewards.view(-1, self.bundle_size, rewards.shape[1])  # [G/B, B, N]
        has_score = known.view(bundles.shape).all(1)  # [G/B, N]
        scores = bundles.sum(1)  # [G/B, N]
        of_papers = scores[has_score]  # [papers with a score]
        quantiles = learner.objective_state["quantiles"]
        if bool(quantiles.isnan().any()) and len(of_papers):
            quantiles.copy_(torch.quantile(of_papers, _LEVELS))
        low, high = quantiles
        within = ((scores - low).clamp_min(0) - (scores - high).clamp_min(0) + low - high) / (
            HIGH - LOW + _EPS
        )
        below = -(low - scores).clamp_min(0) / (LOW + _EPS)
        mixed = (_MIX * below + within) / (_MIX + 1) / (_spread(scores, has_score) + _EPS)
        spreads = _spread(rewards, known).view(*bundles.shape[:2], 1)  # [G/B, B, 1]
        values = (mixed[:, None] / (spreads + _EPS)).masked_fill(~has_score[:, None], 0.0)
        return _Step(batch, values.flatten().to(batch.rewards), of_papers, quantiles)


@dataclass
class _Step(ObjectiveStep):
    scores: Tensor  # [papers with a score]
    quantiles: Tensor  # the learner's, moved in place

    def finish(self) -> dict[str, float]:
        if len(self.scores):
            below = (self.scores < self.quantiles[:, None]).double().mean(1)
            self.quantiles += _RATE * (_LEVELS - below)
        low, high = self.quantiles.tolist()
        if math.isnan(low):  # no paper of the run has had a score yet
            return {}
        return {"riskpo_quantile_low": low, "riskpo_quantile_high": high}


def _spread(values: Tensor, known: Tensor) -> Tensor:
    """Return the sample standard deviation [..., 1] of each row's known values, 1 if it is 0 or
    undefined."""
    count = known.sum(-1, keepdim=True)
    mean = (values * known).sum(-1, keepdim=True) / count.clamp_min(1)
    squares = ((values - mean).square() * known).sum(-1, keepdim=True)
    spread = (squares / (count - 1).clamp_min(1)).sqrt()
    return torch.where(spread > _LEAST_SPREAD, spread, 1.0)
