"""RiskPO: advantages from scores of bundles of prompts, relative to tracked quantiles."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.objectives.objective import Objective, ObjectiveStep

LOW, HIGH = 0.2, 0.9  # the levels of the quantiles
_LEVELS = torch.tensor([LOW, HIGH], dtype=torch.float64)
_MIX, _RATE, _EPS = 1.5, 0.1, 1e-6
_LEAST_SPREAD = 1e-3  # a smaller standard deviation of rewards or scores counts as 0


@dataclass
class RiskpoObjective(Objective):
    """RiskPO (arXiv:2510.00911), mixed value at risk, with the settings of the authors' script
    (RTkenny/RiskPO).

    A bundle is `bundle_size` consecutive prompts. Its n-th paper is the n-th rollout of each
    prompt; the paper's score s is the sum of their rewards. With the tracked quantiles a and b of
    all scores at the levels LOW and HIGH,

        x = ((s - a)+ - (s - b)+ + a - b) / (HIGH - LOW),  c = -(a - s)+ / LOW,
        A_i = (1.5 c + x) / 2.5 / (std of s over the bundle's papers) / (std of r over i's group),

    where a standard deviation of 0 counts as 1. The authors' code does so only for r, which gives a
    bundle of equal scores advantages of 1e6. The first step sets a and b to the quantiles of its
    own scores; every step ends with q += .1 (level - share of scores below q).

    Attributes:
        quantiles: float64 [2], a and b; NaN before the first step. Checkpoints store them.
    """

    bundle_size: int = 5
    quantiles: Tensor = field(
        default_factory=lambda: _LEVELS * torch.nan, repr=False, compare=False
    )

    @property
    def state(self) -> dict[str, Tensor]:
        return {"quantiles": self.quantiles}

    def begin(self, batch: RolloutBatch, learner: Learner) -> ObjectiveStep:
        # to the host: they are few, and the quantiles are there
        rewards = batch.rewards.double().cpu()
        known = batch.has_reward.cpu()
        bundles = rewards.view(-1, self.bundle_size, rewards.shape[1])  # [G/B, B, N]
        has_score = known.view(bundles.shape).all(1)  # [G/B, N]
        scores = bundles.sum(1)  # [G/B, N]
        of_papers = scores[has_score]  # [papers with a score]
        if bool(self.quantiles.isnan().any()) and len(of_papers):
            self.quantiles.copy_(torch.quantile(of_papers, _LEVELS))
        low, high = self.quantiles
        within = ((scores - low).clamp_min(0) - (scores - high).clamp_min(0) + low - high) / (
            HIGH - LOW + _EPS
        )
        below = -(low - scores).clamp_min(0) / (LOW + _EPS)
        mixed = (_MIX * below + within) / (_MIX + 1) / (_spread(scores, has_score) + _EPS)
        spreads = _spread(rewards, known).view(*bundles.shape[:2], 1)  # [G/B, B, 1]
        values = (mixed[:, None] / (spreads + _EPS)).masked_fill(~has_score[:, None], 0.0)
        return _Step(batch, values.flatten().to(batch.rewards), of_papers, self.quantiles)


@dataclass
class _Step(ObjectiveStep):
    scores: Tensor  # [papers with a score]
    quantiles: Tensor  # the objective's

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
    undefined.
    """
    count = known.sum(-1, keepdim=True)
    mean = (values * known).sum(-1, keepdim=True) / count.clamp_min(1)
    squares = ((values - mean).square() * known).sum(-1, keepdim=True)
    spread = (squares / (count - 1).clamp_min(1)).sqrt()
    return torch.where(spread > _LEAST_SPREAD, spread, 1.0)
