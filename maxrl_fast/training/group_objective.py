"""What multiplies each rollout's log-probs in the loss: a group advantage, or PACS's (pacs.py), by the same calls."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.config.options import Config
from maxrl_fast.objectives import OBJECTIVES, estimator_options
from maxrl_fast.ops import ESTIMATORS, group_advantage
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.pacs_objective import Pacs


def advantages_of(config: Config) -> "GroupAdvantages | Pacs":
    """What the objective of a resolved configuration asks for."""
    objective = OBJECTIVES[config.objective.objective]
    if objective.estimator is None:
        return Pacs.of(config)
    options = {name: getattr(config.objective, name) for name in ("k", "order", "scale_by_k")}
    return GroupAdvantages(objective.estimator, options | estimator_options(config.objective.estimator_options))


@dataclass
class GroupAdvantages:
    """Advantages that the step's rewards decide, the same for all its updates.

    Args:
        estimator: a name in ops.ESTIMATORS.
        options: the keywords of ops.group_advantage that stay the same over a run.
    """

    estimator: str
    options: dict[str, Any]
    needs_reference: bool = False
    values: Tensor = field(default_factory=lambda: torch.empty(0))  # [G, N], of the present step

    @property
    def needs_binary(self) -> bool:
        """Whether rewards must be 0 or 1."""
        return ESTIMATORS[self.estimator].binary

    @property
    def needs_greedy(self) -> bool:
        """Whether `begin` takes whether each prompt's likeliest response is correct."""
        return "greedy_correct" in ESTIMATORS[self.estimator].inputs

    def begin(
        self,
        learner: Learner,
        prompts: Prompts,
        rollouts: Rollouts,
        rewards: Tensor,
        valid: Tensor | None,
        greedy_rewards: Tensor | None,
    ) -> None:
        """Take a step's rollouts, their rewards [G, N], which of them have one, and those [G] of the likeliest responses,
        before its first update."""
        known = {
            "lengths": rollouts.lengths.view(rewards.shape),
            "logprobs": rollouts.mean_logprobs.view(rewards.shape),
            "greedy_correct": None if greedy_rewards is None else greedy_rewards > 0.5,  # [G]
        }
        inputs: dict[str, Any] = {name: known[name] for name in ESTIMATORS[self.estimator].inputs}
        options = self.options
        if valid is not None and options["order"] == rewards.shape[1] - 1:
            options = options | {"order": None}  # the full order of every group as it is now
        self.values = group_advantage(rewards, self.estimator, valid=valid, **inputs, **options)

    def at_start(self, sequences: Tensor) -> Tensor:
        """What `for_update` gives."""
        return self.for_update(sequences)

    def for_update(self, sequences: Tensor) -> Tensor:
        """Advantages [S] for an update on these rollouts."""
        return self.values.flatten()

    def end(self, step: int) -> dict[str, float]:
        """After the step's last update: what is to be reported beside the usual."""
        return {}
