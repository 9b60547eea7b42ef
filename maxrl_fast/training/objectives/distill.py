"""On-policy distillation: the policy learns from a teacher and from no reward."""

from dataclasses import dataclass

import torch

from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.objectives.objective import (
    Objective,
    ObjectiveStep,
    has_teacher,
    objective,
)


@objective(
    "on-policy distillation: GKD, Agarwal et al. 2024, arXiv:2306.13649; Lu et al. (Thinking "
    "Machines) 2025",
    name="distill",
    needs="N >= 1; --reference or --teacher-prompt; no rewards",
    presets={"kl": "k2", "kl_coef": 1.0, "rollouts": 1},
    refuses={
        "distill needs --kl-coef above 0 and a teacher, --reference or --teacher-prompt, got "
        "kl_coef {kl_coef:g}, reference {reference} and teacher_prompt {teacher_prompt}": (
            lambda c: not (c.kl_coef and has_teacher(c))
        ),
    },
)
@dataclass(kw_only=True)
class DistillObjective(Objective):
    """0: only the divergence from the teacher is learned (--kl-coef)."""

    loss = "reinforce"

    def begin(self, batch: RolloutBatch, learner: Learner) -> ObjectiveStep:
        return ObjectiveStep(batch, torch.zeros_like(batch.rewards.flatten()))
