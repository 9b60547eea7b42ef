"""`--objective FILE.py:FUNCTION`: a user's own advantage, a function of the rewards of every group."""

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
    """The advantages that a user's function returns.

    Args:
        name: FILE.py:FUNCTION.
        k: what the function gets as `k`, if it asks for it.
    """

    name: str
    advantage: CustomAdvantage
    k: int | None = None
    loss: str = "ppo"
    aggregation: str = "token_mean"
    owns_loss: bool = False
    _values: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)  # [G, N]

    @classmethod
    def load(cls, name: str) -> "CustomObjective":
        """Return the objective of FILE.py:FUNCTION, not checked yet.

        Raises:
            InputError: where the file, or a function in it that can be called so, is not there.
        """
        return cls(name, _loaded(name))

    def checked(self, num_rollouts: int, k: int | None = None) -> "CustomObjective":
        """Return the objective with its k, after the function has been called on a small example.

        Raises:
            ValueError: where it fails, or returns something else than finite advantages of the shape of the rewards.
        """
        self.advantage.check(num_rollouts, k=k)
        return CustomObjective(self.name, self.advantage, k)

    @property
    def needs(self) -> Needs:
        return Needs()

    def learns_from_equal_rewards(self, num_rollouts: int) -> bool:
        rewards = torch.tensor([[0.0], [1.0]]).expand(2, num_rollouts).contiguous()
        return bool(self.advantage(rewards, **self.advantage.example(2, num_rollouts), k=self.k).any())

    def begin(self, collected: Collected, learner: Learner) -> None:
        rewards, rollouts = collected.rewards, collected.rollouts
        valid = torch.ones_like(rewards, dtype=torch.bool) if collected.valid is None else collected.valid
        inputs: dict[str, Any] = {
            "k": self.k,
            "lengths": rollouts.lengths.view(rewards.shape),
            "logprobs": rollouts.mean_logprobs.view(rewards.shape),
            "valid": valid,
            "prompts": collected.prompts.ids,
        }
        try:
            values = self.advantage(rewards, **inputs)
        except ValueError as error:
            raise InputError(f"step {collected.step}: {error}") from error
        self._values = values.to(torch.float32).masked_fill(~valid, 0.0)

    def advantages(self, sequences: Tensor) -> Tensor:
        return self._values.flatten()

    def end(self) -> dict[str, float]:
        return {}


@cache
def _loaded(name: str) -> CustomAdvantage:
    try:
        return CustomAdvantage.of(load(name)[0])
    except (LoadError, ValueError) as error:
        raise InputError(f"--objective {name} must be FILE.py:FUNCTION: {error}") from error
