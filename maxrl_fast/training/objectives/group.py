"""Objectives with the advantages of an estimator, computed once per step."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.estimators import Estimator
from maxrl_fast.errors import InputError
from maxrl_fast.ops import ESTIMATORS, group_advantage
from maxrl_fast.records import sequence_sums
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.objectives.objective import Needs, Objective, ObjectiveStep

# the others: token_mean
AGGREGATIONS = {"grpo": "seq_mean_token_mean", "dr_grpo": "seq_sum_constant"}


@dataclass
class GroupObjective(Objective):
    """The advantages of an estimator.

    Args:
        estimator: a name in ops.ESTIMATORS, or the row of a custom function.
        options: keywords of ops.group_advantage that are constant over a run, such as k or eps.
        per_token: whether a custom function returns an advantage for each token, [T]. The learner
            gets them as factors of the tokens, and 1 for each response that has one other than 0.
    """

    estimator: str | Estimator
    options: dict[str, Any]
    per_token: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.estimator, str):
            self.aggregation = AGGREGATIONS.get(self.estimator, "token_mean")
        inputs = self.row.inputs
        self.needs = Needs(
            greedy=not {"greedy_correct", "greedy_rewards"}.isdisjoint(inputs),
            binary=self.row.binary,
            parts="reward_parts" in inputs,
            texts="texts" in inputs,
            components="components" in inputs,
            token_weights=self.per_token,
        )

    @property
    def row(self) -> Estimator:
        return ESTIMATORS[self.estimator] if isinstance(self.estimator, str) else self.estimator

    def learns_from_equal_rewards(self, num_rollouts: int) -> bool:
        shape = (2, num_rollouts)
        wrong_then_correct = torch.tensor([[0.0], [1.0]]).expand(shape)
        known = {
            "lengths": torch.ones(shape, dtype=torch.int64),
            "logprobs": -torch.arange(1.0, num_rollouts + 1).expand(shape),
            "greedy_correct": torch.tensor([False, False]),
            "greedy_rewards": torch.tensor([0.5, 0.5]),
            "reward_parts": torch.stack(
                [wrong_then_correct, torch.arange(float(num_rollouts)).expand(shape)]
            ),
            "prompts": [0, 1],
            "log_ratios": torch.zeros(shape),
            "texts": [["Response."] * num_rollouts] * 2,
            "components": [[defaultdict(float)] * num_rollouts] * 2,
        }
        inputs: dict[str, Any] = {name: known[name] for name in self.row.inputs}
        return bool(
            group_advantage(wrong_then_correct, self.estimator, **inputs, **self.options).any()
        )

    def begin(self, batch: RolloutBatch, learner: Learner) -> ObjectiveStep:
        rewards, rollouts = batch.rewards, batch.rollouts
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
        }
        inputs = {name: known[name]() for name in self.row.inputs}
        try:
            values = group_advantage(
                rewards, self.estimator, valid=valid, **inputs, **self.options_for(batch)
            )
        except ValueError as error:
            raise InputError(f"step {batch.step}: {error}") from error
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

    def options_for(self, batch: RolloutBatch) -> dict[str, Any]:
        options = dict(self.options)
        if batch.reward_terms is not None:
            options["reward_weights"] = batch.term_weights
        if batch.valid is not None and options.get("order") == batch.num_rollouts - 1:
            options["order"] = None  # each group's own full order, from its number of known rewards
        return options


def _grouped(values: Sequence[Any], num_rollouts: int) -> list[Sequence[Any]]:
    """Return one value for each rollout [S] as G sequences of N."""
    return [values[i : i + num_rollouts] for i in range(0, len(values), num_rollouts)]
