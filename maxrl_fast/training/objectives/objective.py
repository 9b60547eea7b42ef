"""What the trainer asks of an objective: the advantages that multiply each response's log-probs in the loss."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner


@dataclass(frozen=True)
class Needs:
    """What an objective needs beside the rollouts and their rewards."""

    reference: bool = False  # a frozen copy of the policy as it was when reinforcement learning began
    greedy: bool = False  # the reward of the greedy response to each prompt
    binary: bool = False  # rewards of 0 or 1
    parts: bool = False  # each of several rewards, beside their sum
    answers: bool = False  # the reference answer in place of that of each response, whose probability is the reward
    token_weights: bool = False  # factors of single tokens in the loss
    critic: bool = False  # a value function of the states before each token, trained with the policy
    logprob_passes: int = 0  # forward passes over a step's samples, beside the passes of the loss


class Objective(Protocol):
    """An objective of a run.

    The learner minimises -sum_i A_i sum_t log pi(y_it | x_i, y_i<t) over a denominator, or another loss of the log-prob ratios
    with the same A_i; an objective is the choice of A_i.
    """

    @property
    def needs(self) -> Needs: ...

    @property
    def loss(self) -> str:
        """The token loss, a name of ops.policy_gradient_loss: the default of --loss."""

    @property
    def aggregation(self) -> str:
        """How token losses are averaged: the default of --aggregation."""

    @property
    def owns_loss(self) -> bool:
        """Whether loss and aggregation are part of the objective, so that options cannot change them, and importance weights
        have nothing to correct."""

    @property
    def state(self) -> dict[str, Tensor]:
        """What the next step needs of this one, by name: tensors on the host that checkpoints keep and load in place."""

    def learns_from_equal_rewards(self, num_rollouts: int) -> bool:
        """Return whether a group that failed altogether, or succeeded altogether, has advantages other than zero."""

    def begin(self, batch: RolloutBatch, learner: Learner) -> RolloutBatch:
        """Take a step's samples and rewards, before the first update on them, and return what is learned from.

        An objective with an advantage for every token, of either sign, returns batch.weighted(advantages [T]), and has the
        advantage 1 for every response.
        """

    def advantages(self, sequences: Tensor) -> Tensor:
        """Return the advantages [S] of all samples, for an update on `sequences`: samples of whole groups, with a reward,
        int64 on the host.

        Samples that no update has used yet may have the advantage 0.
        """

    def end(self) -> dict[str, float]:
        """Train what the objective trains besides the policy, and return its own metrics of the step, after the last update."""
