import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import check_flag
from maxrl_fast.algorithms.estimator import INPUTS
from maxrl_fast.algorithms.estimators import ESTIMATORS, Estimator, find_estimator
from maxrl_fast.ops.group_advantage import group_advantage


def register_estimator(
    name: str, estimator: Estimator | Callable[..., Any], *, replace: bool = False
) -> None:
    """Add an estimator to ESTIMATORS, so that `group_advantage(rewards, name)` computes it.

    Args:
        name: a Python identifier.
        estimator: a function that returns finite, floating advantages [G, N], whose signature
            declares its inputs (docs/adding_an_objective.md), or an `Estimator`.
        replace: whether `name` may already exist.

    Raises ValueError if the estimator fails on a small example.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"the name of an estimator must be a Python identifier, got {name!r:.80}")
    check_flag("replace", replace)
    if name in ESTIMATORS and not replace:
        raise ValueError(f"there is an estimator {name} already; replace=True takes its place")
    row = dataclasses.replace(find_estimator(estimator), name=name)
    options: dict[str, Any] = {key: 0.1 for key, x in row.options.items() if x.default is None}
    if row.size is not None and row.size.required:
        options[row.size.name] = row.size.smallest
    before = ESTIMATORS.get(name)
    ESTIMATORS[name] = row
    try:
        try_out(row, name, **options)
    except Exception:
        if before is None:
            del ESTIMATORS[name]
        else:
            ESTIMATORS[name] = before
        raise


def try_out(
    row: Estimator, estimator: str | Estimator, num_rollouts: int = 4, **options: Any
) -> Tensor:
    """Return the advantages of a small example, [4, N] or [T]; raise ValueError if that fails."""
    rewards = torch.zeros(4, num_rollouts)
    rewards[0, 0] = 1  # correct rollouts by row: one, half of them, none, all
    rewards[1, : (num_rollouts + 1) // 2] = 1
    rewards[3] = 1
    try:
        return group_advantage(rewards, estimator, **example_inputs(row, rewards), **options)
    except ValueError as error:
        raise ValueError(f"{error}, on a small example") from error
    except Exception as error:
        raise ValueError(
            f"{row.name} fails on a small example: {type(error).__name__}: {error}"
        ) from error


def example_inputs(row: Estimator, rewards: Tensor) -> dict[str, Any]:
    """Return the inputs of an estimator for rewards [G, N]."""
    numbers = torch.arange(1, rewards.numel() + 1).view(rewards.shape)
    return {name: INPUTS[name](numbers) for name in row.inputs}
