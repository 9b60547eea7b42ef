"""`--objective FILE.py:FUNCTION` or the name of an installed one: a function of the rewards [G, N] of a step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.ops.custom_advantage import CustomAdvantage
from maxrl_fast.plugins import load_plugin
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
        """Return the objective of a name, once the function has been called on a small example.

        Raises:
            InputError: where the function cannot be loaded.
            ValueError: where it asks for something unknown, fails, or does not return finite advantages shaped as rewards.
        """
        return cls(CustomAdvantage.of(load_function(name), num_rollouts=num_rollouts, k=k), k)

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def token_weights(self) -> None:
        return None

    @property
    def state(self) -> dict[str, Tensor]:
        return {}

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


def load_function(name: str) -> Callable[..., Any]:
    """Return the function of FILE.py:FUNCTION, or of an installed objective; raises InputError where there is none."""
    function: Callable[..., Any] = load_plugin("objective", name, "FUNCTION")
    if not callable(function):
        raise InputError(f"--objective {name} must be a function of rewards, got {function!r:.80}")
    return function
