"""A user's own group advantage: a function of rewards [G, N], checked on a small example before it is used."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import can_look_at

INPUTS = ("k", "lengths", "logprobs", "valid", "prompts")  # what a function may ask for by parameter name


@dataclass(frozen=True)
class CustomAdvantage:
    """A function that returns advantages [G, N] for rewards [G, N], floating.

    It may also have parameters of these names: k, an integer; lengths [G, N] int64, the tokens of each response; logprobs
    [G, N], the mean log-probability of each response's tokens; valid [G, N] bool, whether there is a reward; prompts, a
    sequence of G: the trainer gives each prompt's index.
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[str, ...]  # the names in INPUTS that are parameters of the function
    required: tuple[str, ...]  # the names in `inputs` without a default

    @classmethod
    def of(
        cls, function: Callable[..., Any], *, name: str | None = None, num_rollouts: int = 4, k: int | None = 2
    ) -> "CustomAdvantage":
        """Return the checked function; `num_rollouts` and `k` are the sizes of the example that it is run on.

        Raises:
            ValueError: if the function needs other parameters, fails on the example, or does not return a finite floating
                tensor of the shape of the rewards. Two groups of the example have equal rewards: their std is 0.
        """
        if not callable(function):
            raise ValueError(f"a custom advantage must be a function of rewards, got {type(function).__name__}")
        name = name or str(getattr(function, "__name__", type(function).__name__))
        inputs, required = _parameters(name, function)
        advantage = cls(name, function, inputs, required)
        rewards = torch.zeros(4, num_rollouts)
        rewards[0, 0] = 1  # one rollout correct, half of them, none, all
        rewards[1, : (num_rollouts + 1) // 2] = 1
        rewards[3] = 1
        example = {
            "k": k,
            "lengths": torch.arange(1, rewards.numel() + 1).view(rewards.shape),
            "logprobs": -torch.arange(1.0, rewards.numel() + 1).view(rewards.shape) / rewards.numel(),
            "valid": torch.ones_like(rewards, dtype=torch.bool),
            "prompts": list(range(len(rewards))),
        }
        try:
            advantage(rewards, **{input_name: example[input_name] for input_name in inputs})
        except Exception as error:
            if isinstance(error, _WrongResult):
                raise ValueError(f"{error}, on the example rewards {rewards.int().tolist()}") from None
            raise ValueError(f"{name} fails on a small example: {type(error).__name__}: {error}") from error
        return advantage

    def __call__(self, rewards: Tensor, **inputs: Any) -> Tensor:
        """Return the advantages [G, N] of rewards [G, N], of the dtype of the rewards; inputs that the function does not ask
        for are left out.

        Raises:
            ValueError: if an input that the function asks for is not given, or the result does not fit.
        """
        given = {name: inputs[name] for name in self.inputs if inputs.get(name) is not None}
        if "valid" in self.inputs and "valid" not in given:
            given["valid"] = torch.ones_like(rewards, dtype=torch.bool)
        if missing := [name for name in self.required if name not in given]:
            raise ValueError(f"{self.name} asks for {' and '.join(missing)}, which must be given")
        with torch.no_grad():
            advantages = self.function(rewards.detach().clone(), **given)
        if not isinstance(advantages, Tensor):
            raise _WrongResult(f"{self.name} must return a tensor, got {type(advantages).__name__}")
        if advantages.shape != rewards.shape or not advantages.is_floating_point() or advantages.device != rewards.device:
            raise _WrongResult(
                f"{self.name} must return a floating tensor of shape {tuple(rewards.shape)} on {rewards.device}, got "
                f"{advantages.dtype} of shape {tuple(advantages.shape)} on {advantages.device}"
            )
        if can_look_at(advantages) and not bool(advantages.isfinite().all()):
            group = int((~advantages.isfinite()).any(-1).nonzero()[0])
            values = advantages[group].tolist()
            raise _WrongResult(f"{self.name} must return finite advantages, got {values} for group {group}")
        return advantages.to(rewards.dtype)


class _WrongResult(ValueError):
    """The function returned what cannot be advantages."""


def _parameters(name: str, function: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of INPUTS that the function takes, and which of them have no default."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise ValueError(f"{name} must have a signature that Python can read") from None
    first, others = parameters[:1], parameters[1:]
    if not first or first[0].kind not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
        raise ValueError(f"{name} must take rewards [G, N] as its first parameter")
    known = [parameter for parameter in others if parameter.name in INPUTS]
    for parameter in others:
        is_variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if parameter not in known and not is_variadic and parameter.default is inspect.Parameter.empty:
            raise ValueError(f"{name} may ask for {', '.join(INPUTS)} beside the rewards, got the parameter {parameter.name}")
    required = tuple(parameter.name for parameter in known if parameter.default is inspect.Parameter.empty)
    return tuple(parameter.name for parameter in known), required
