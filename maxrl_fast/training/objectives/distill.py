"""On-policy distillation: the policy learns from a teacher and from no reward."""

from dataclasses import dataclass

import torch

from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.objectives.objective import Objective, ObjectiveStep


@dataclass
class DistillObjective(Objective):
    """The advantage of every rollout is 0, so that the divergence from the reference policy alone
    has a gradient.
    """

    loss = "reinforce"

    def begin(self, batch: RolloutBatch, learner: Learner) -> ObjectiveStep:
        return ObjectiveStep(batch, torch.zeros_like(batch.rewards.flatten()))
