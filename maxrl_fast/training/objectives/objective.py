"""The interface of objectives, which choose the advantages."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from maxrl_fast.algorithms.method import Method, Registry
from maxrl_fast.training.collect import Needs as Needs
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner


@dataclass
class ObjectiveStep:
    """One step of an objective. Objectives whose advantages change with every update, or that train
    something of their own, return a class of their own."""

    # The samples to train on. An objective with an advantage for every token, of either sign, has
    # batch.weighted(advantages [T]) and gives every response the advantage 1.
    batch: RolloutBatch
    values: Tensor  # the advantages [S] of all samples

    def advantages(self, sequences: Tensor) -> Tensor:
        """Return the advantages [S] of all samples for an update on `sequences`: whole groups'
        samples with a reward, int64 on the host. Samples that no update has used yet may have 0."""
        return self.values

    def finish(self) -> dict[str, float]:
        """After the last update: train what the objective trains besides the policy, and return its
        metrics of the step."""
        return {}


class Objective(ABC):
    """Chooses A_i: the learner minimises -sum_i A_i sum_t log pi(y_it | x_i, y_i<t) over a
    denominator, or another loss of the log-prob ratios with the same A_i."""

    loss: str = "ppo"  # a name of ops.policy_gradient_loss; default of --loss
    aggregation: str = "token_mean"  # how token losses are averaged; default of --aggregation
    # Whether loss and aggregation are fixed by the objective. Then options cannot change them, and
    # importance weights do not apply.
    owns_loss: bool = False
    min_rollouts: int = 1

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def state(self) -> dict[str, Tensor]:
        """Host tensors, by name, that the next step needs, as they are before the first. The
        learner keeps them in `objective_state`; checkpoints store them and load them in place."""
        return {}

    def learns_from_equal_rewards(self, num_rollouts: int) -> bool:
        """Return whether a group of all-0 or all-1 rewards has nonzero advantages."""
        return True

    @abstractmethod
    def begin(self, batch: RolloutBatch, learner: Learner) -> ObjectiveStep:
        """Take a step's samples and rewards before its first update."""


# The objectives that are no estimators: the function is a class, a dataclass whose fields are its
# options.
_REGISTRY = Registry(Method)
OBJECTIVE_CLASSES, objective = _REGISTRY.methods, _REGISTRY.register


def has_teacher(options: Any) -> bool:
    """Whether the reference policy of these options is not the policy, or reads something else."""
    return options.reference is not None or options.teacher_prompt is not None
