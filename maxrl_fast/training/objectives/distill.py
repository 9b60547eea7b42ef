"""On-policy distillation: the policy learns from a teacher and from no reward."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.objectives.objective import Needs, Objective


@dataclass
class DistillObjective(Objective):
    """The advantage of every rollout is 0, so that the divergence from the reference policy alone
    has a gradient.
    """

    loss: str = "reinforce"
    aggregation: str = "token_mean"
    owns_loss: bool = False
    _values: Tensor = field(init=False, repr=False, compare=False)  # [S]

    @property
    def needs(self) -> Needs:
        return Needs()

    def learns_from_equal_rewards(self, num_rollouts: int) -> bool:
        return True

    def begin(self, batch: RolloutBatch, learner: Learner) -> RolloutBatch:
        self._values = torch.zeros_like(batch.rewards.flatten())
        return batch

    def advantages(self, sequences: Tensor) -> Tensor:
        return self._values
