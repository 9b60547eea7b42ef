"""The interface of objectives, which choose the advantages."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner


@dataclass(frozen=True)
class Needs:
    reference: bool = False  # a frozen copy of the policy from the start of reinforcement learning
    greedy: bool = False  # the reward of the greedy response to each prompt
    binary: bool = False  # rewards of 0 or 1
    parts: bool = False  # each of several rewards, not only their sum
    texts: bool = False  # the responses as text
    components: bool = False  # the components of the rewards of all ranks
    # the reward is the probability of the reference answer, which replaces each response's own
    answers: bool = False
    token_weights: bool = False  # a factor per token in the loss
    # a value function V of the state before each token, trained with the policy
    critic: bool = False
    logprob_passes: int = 0  # forward passes over a step's samples, in addition to the loss's own


class Objective(Protocol):
    """An objective of a run.

    The learner minimises -sum_i A_i sum_t log pi(y_it | x_i, y_i<t) over a denominator, or another
    loss of the log-prob ratios with the same A_i. An objective chooses A_i.
    """

    @property
    def needs(self) -> Needs: ...

    @property
    def loss(self) -> str:
        """The token loss, a name of ops.policy_gradient_loss; default of --loss."""

    @property
    def aggregation(self) -> str:
        """How token losses are averaged; default of --aggregation."""

    @property
    def owns_loss(self) -> bool:
        """Whether loss and aggregation are fixed by the objective. Then options cannot change them,
        and importance weights do not apply."""

    @property
    def state(self) -> dict[str, Tensor]:
        """Host tensors, by name, that the next step needs. Checkpoints store them and load them in
        place.
        """
        return {}

    def learns_from_equal_rewards(self, num_rollouts: int) -> bool:
        """Return whether a group of all-0 or all-1 rewards has nonzero advantages."""
        return False

    def begin(self, batch: RolloutBatch, learner: Learner) -> RolloutBatch:
        """Take a step's samples and rewards before its first update; return the batch to train on.

        An objective with an advantage for every token, of either sign, returns
        batch.weighted(advantages [T]) and gives every response the advantage 1.
        """

    def advantages(self, sequences: Tensor) -> Tensor:
        """Return the advantages [S] of all samples for an update on `sequences`: whole groups'
        samples with a reward, int64 on the host.

        Samples that no update has used yet may have the advantage 0.
        """

    def end(self) -> dict[str, float]:
        """After the last update: train what the objective trains besides the policy, and return its
        metrics of the step.
        """
        return {}
