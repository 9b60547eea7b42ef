"""An advantage written by a user: a function of the rewards of every group."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

INPUTS = ("k", "lengths", "logprobs", "valid", "prompts")


@dataclass(frozen=True)
class CustomAdvantage:
    """`def f(rewards: Tensor) -> Tensor` of shape [G, N], which may ask by parameter name for what else it needs:

    k: int; lengths: int64 [G, N], tokens of each response; logprobs: float [G, N], mean log-prob of each response's tokens;
    valid: bool [G, N], False where the reward is not known (it is 0 there); prompts: int64 [G], each prompt's index.
    """

    function: Callable[..., Any]
    takes: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "CustomAdvantage":
        """Raises ValueError where the function asks for something else."""
        _, *others = inspect.signature(function).parameters.values()
        unknown = [p.name for p in others if p.name not in INPUTS and p.default is p.empty]
        if unknown:
            raise ValueError(f"{function.__name__} asks for {', '.join(unknown)}; it may ask for {', '.join(INPUTS)}")
        return cls(function, tuple(p.name for p in others if p.name in INPUTS))

    @property
    def takes_k(self) -> bool:
        return "k" in self.takes

    @staticmethod
    def example(num_groups: int, num_rollouts: int) -> dict[str, Any]:
        """Return inputs for rewards [G, N]."""
        shape = (num_groups, num_rollouts)
        return {
            "lengths": torch.ones(shape, dtype=torch.int64),
            "logprobs": -torch.arange(1.0, num_rollouts + 1).expand(shape).contiguous(),
            "valid": torch.ones(shape, dtype=torch.bool),
            "prompts": torch.arange(num_groups),
        }

    def check(self, num_rollouts: int, k: int | None = None) -> None:
        """Call the function on a small example.

        Raises:
            ValueError: where it fails, or returns something else than finite advantages of the shape of the rewards.
        """
        rewards = (torch.arange(3.0)[:, None] > torch.arange(num_rollouts)).float()  # none, one and two correct
        self(rewards, k=k, **self.example(3, num_rollouts))

    def __call__(self, rewards: Tensor, **inputs: Any) -> Tensor:
        """Return advantages [G, N] of rewards [G, N]; raises ValueError as `check` does."""
        name = getattr(self.function, "__name__", "the function")
        try:
            values = self.function(rewards, **{name: inputs[name] for name in self.takes})
        except Exception as error:
            raise ValueError(f"{name} fails: {type(error).__name__}: {error}") from error
        if not isinstance(values, Tensor) or values.shape != rewards.shape or not values.is_floating_point():
            got = f"{values.dtype} of shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"{name} must return floating advantages shaped {tuple(rewards.shape)} as rewards are, got {got}")
        if not bool(values.isfinite().all()):
            raise ValueError(f"{name} must return finite advantages, got {values[~values.isfinite()][0].item()}")
        return values.detach()
