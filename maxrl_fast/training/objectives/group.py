"""Objectives with the advantages of an estimator, computed once per step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.estimators import Estimator, find_estimator
from maxrl_fast.algorithms.stopping import stopped_maxrl
from maxrl_fast.errors import InputError
from maxrl_fast.ops.group_advantage import example_inputs, group_advantage
from maxrl_fast.records import sequence_sums
from maxrl_fast.runtime.loading import place_of
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.objectives.objective import Needs, Objective, ObjectiveStep


@dataclass
class GroupObjective(Objective):
    """The advantages of an estimator.

    Args:
        estimator: a name in ops.ESTIMATORS, or the row of a custom function.
        options: keywords of ops.group_advantage that are constant over a run, such as k or eps.
        per_token: whether a custom function returns an advantage for each token, [T]. The learner
            gets them as factors of the tokens, and 1 for each response that has one other than 0.
        stop_at: of stopped_maxrl, which replaces the estimator; 0: not.
    """

    estimator: str | Estimator
    options: dict[str, Any]
    per_token: bool = False
    stop_at: int = 0

    def __post_init__(self) -> None:
        self.aggregation = self.row.aggregation

    @property
    def needs(self) -> Needs:
        inputs = self.row.inputs
        return Needs(
            greedy=not {"greedy_correct", "greedy_rewards"}.isdisjoint(inputs),
            binary=self.row.binary or self.stop_at > 0,
            expects_binary=self.row.for_binary,
            parts="reward_parts" in inputs,
            texts="texts" in inputs,
            components="components" in inputs,
            token_weights=self.per_token,
        )

    @property
    def row(self) -> Estimator:
        return find_estimator(self.estimator)

    def learns_from_equal_rewards(self, num_rollouts: int) -> bool:
        wrong_then_correct = torch.tensor([[0.0], [1.0]]).expand(2, num_rollouts)
        inputs = example_inputs(self.row, wrong_then_correct)
        return bool(
            group_advantage(wrong_then_correct, self.estimator, **inputs, **self.options).any()
        )

    def begin(self, batch: RolloutBatch, learner: Learner) -> ObjectiveStep:
        rewards, rollouts = batch.rewards, batch.rollouts
        if self.stop_at:
            assert batch.drawn_by is not None
            values = stopped_maxrl(rewards, batch.has_reward, batch.drawn_by, self.stop_at)
            return _OverPrompts(batch, values.to(rewards).flatten())
        greedy, terms = batch.greedy_rewards, batch.reward_terms
        # a custom function may take failed rewards as 0
        valid = batch.valid if self.row.takes_valid else None
        # Computed on demand: an estimator takes few of these, and reading the prompts' indices
        # waits for the device.
        known: dict[str, Callable[[], Any]] = {
            "lengths": lambda: rollouts.lengths.view(rewards.shape),
            "logprobs": lambda: rollouts.mean_logprobs.view(rewards.shape),
            "greedy_correct": lambda: None if greedy is None else greedy > 0.5,  # [G]
            "greedy_rewards": lambda: greedy,  # [G]
            "reward_parts": lambda: terms if terms is None else terms.movedim(-1, 0),  # [R, G, N]
            "prompts": batch.prompts.ids.tolist,
            "texts": lambda: _grouped(batch.texts, batch.num_rollouts),
            "components": lambda: _grouped(batch.components, batch.num_rollouts),
            "truncated": lambda: batch.raw_rollouts.truncated.view(rewards.shape),
        }
        inputs = {name: known[name]() for name in self.row.inputs}
        values = self.compute(batch, rewards, valid, **inputs)
        if self.per_token != (values.shape != rewards.shape):
            kinds = ("[T]", "[G, N]") if self.per_token else ("[G, N]", "[T]")
            raise InputError(
                f"step {batch.step}: {self.row.name} must always return the same kind of "
                f"advantages, got {kinds[0]} at the start and {kinds[1]} now"
            )
        if self.per_token:
            return self._weighted(batch, values, valid)
        values = values if batch.valid is None else values.masked_fill(~batch.valid, 0.0)
        return ObjectiveStep(batch, values.flatten())

    def _weighted(
        self, batch: RolloutBatch, advantages: Tensor, valid: Tensor | None
    ) -> ObjectiveStep:
        """Return the step of advantages [T], as the factors of the batch's tokens.

        A function that gets `valid` sees 0 as the lengths of rollouts without a reward, so T counts
        only the tokens of the others.
        """
        lengths, num_tokens = batch.rollouts.lengths, len(batch.rollouts.tokens)
        known = batch.has_reward.flatten().repeat_interleave(lengths, output_size=num_tokens)
        if valid is not None:
            advantages = advantages.new_zeros(num_tokens).masked_scatter(known, advantages)
        advantages = advantages.masked_fill(~known, 0.0)
        # NaN is not 0 either, so that the update reports it
        has_gradient = sequence_sums(advantages.abs(), lengths) != 0
        return ObjectiveStep(batch.weighted(advantages), has_gradient.to(batch.rewards))

    def compute(
        self, batch: RolloutBatch, rewards: Tensor, valid: Tensor | None, **inputs: Any
    ) -> Tensor:
        """Return the advantages of rewards, all or some groups of the batch."""
        options = dict(self.options)
        if batch.reward_terms is not None:
            options["reward_weights"] = batch.term_weights
        if batch.valid is not None and options.get("order") == batch.num_rollouts - 1:
            options["order"] = None  # each group's own full order, from its number of known rewards
        try:
            return group_advantage(rewards, self.estimator, valid=valid, **inputs, **options)
        except ValueError as error:
            raise InputError(f"step {batch.step}: {error}{place_of(error)}") from error


class _OverPrompts(ObjectiveStep):
    """The loss is averaged over the prompts of an update, which have more rollouts if they are
    hard: advantages are times the mean number of rollouts, because the loss of M responses is over
    M, or over their tokens."""

    def advantages(self, sequences: Tensor) -> Tensor:
        num_prompts = len((sequences // self.batch.num_rollouts).unique())
        return self.values * (len(self.batch.in_loss(sequences)) / max(num_prompts, 1))


def _grouped(values: Sequence[Any], num_rollouts: int) -> list[Sequence[Any]]:
    return [values[i : i + num_rollouts] for i in range(0, len(values), num_rollouts)]
