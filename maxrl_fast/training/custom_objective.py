"""`--objective FILE.py:FUNCTION`: a user's own advantage, a function of the rewards [G, N] of a step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.ops.custom_advantage import CustomAdvantage
from maxrl_fast.rewards.worker import LoadError, load
from maxrl_fast.training.collect import Collected
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.objective import Needs


@dataclass
class CustomObjective:
    """The advantages that a function returns.

    Args:
        k: what the function gets as `k`, if it asks for it.
    """

    advantage: CustomAdvantage
    k: int | None = None
    loss: str = "ppo"
    aggregation: str = "token_mean"
    owns_loss: bool = False
    _values: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)  # [G, N]

    @classmethod
    def of(cls, name: str, num_rollouts: int, k: int | None = None) -> "CustomObjective":
        """Return the objective of FILE.py:FUNCTION, once the function has been called on a small example.

        Raises:
            InputError: where the function cannot be loaded.
            ValueError: where it asks for something unknown, fails, or does not return finite advantages shaped as rewards.
        """
        return cls(CustomAdvantage.of(load_function(name), num_rollouts=num_rollouts, k=k), k)

    @property
    def needs(self) -> Needs:
        return Needs()

    def learns_from_equal_rewards(self, num_rollouts: int) -> bool:
        rewards = torch.tensor([[0.0], [1.0]]).expand(2, num_rollouts)
        lengths = torch.ones(rewards.shape, dtype=torch.int64)
        logprobs = -torch.arange(1.0, num_rollouts + 1).expand(rewards.shape)
        return bool(self.advantage(rewards, k=self.k, lengths=lengths, logprobs=logprobs, prompts=[0, 1]).any())

    def begin(self, collected: Collected, learner: Learner) -> None:
        rewards, rollouts, valid = collected.rewards, collected.rollouts, collected.valid
        try:
            values = self.advantage(
                rewards,
                k=self.k,
                lengths=rollouts.lengths.view(rewards.shape),
                logprobs=rollouts.mean_logprobs.view(rewards.shape),
                valid=valid,
                prompts=collected.prompts.ids.tolist(),
            )
        except ValueError as error:
            raise InputError(f"step {collected.step}: {error}") from error
        self._values = values if valid is None else values.masked_fill(~valid, 0.0)

    def advantages(self, sequences: Tensor) -> Tensor:
        return self._values.flatten()

    def end(self) -> dict[str, float]:
        return {}


@cache
def load_function(name: str) -> Callable[..., Any]:
    """Return the function of FILE.py:FUNCTION; raises InputError where there is none."""
    try:
        return load(name)[0]
    except LoadError as error:
        raise InputError(f"--objective {name} must be FILE.py:FUNCTION: {error}") from error
