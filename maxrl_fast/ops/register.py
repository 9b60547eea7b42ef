import dataclasses
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from maxrl_fast.algorithms.arguments import check_flag
from maxrl_fast.algorithms.estimators import ESTIMATORS, Estimator
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

    Raises:
        ValueError: if the name is taken or not an identifier, or the estimator fails on a small
            example.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"the name of an estimator must be a Python identifier, got {name!r:.80}")
    check_flag("replace", replace)
    if name in ESTIMATORS and not replace:
        raise ValueError(f"there is an estimator {name} already; replace=True takes its place")
    row = estimator if isinstance(estimator, Estimator) else own_estimator(estimator)
    row = dataclasses.replace(row, name=name)
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


def own_estimator(function: Callable[..., Any]) -> Estimator:
    return Estimator.of(function, weight="is not known", over_batch=True, min_rollouts=1)


def try_out(
    row: Estimator, estimator: str | Estimator, num_rollouts: int = 4, **options: Any
) -> torch.Tensor:
    """Return the advantages of a small example, [4, N] or [T]; raise ValueError if that fails."""
    rewards = torch.zeros(4, num_rollouts)
    rewards[0, 0] = 1  # correct rollouts by row: one, half of them, none, all
    rewards[1, : (num_rollouts + 1) // 2] = 1
    rewards[3] = 1
    counted = torch.arange(1, rewards.numel() + 1).view(rewards.shape)
    known: dict[str, Any] = {
        "lengths": 1 + counted % 7,
        "logprobs": -counted / rewards.numel(),
        "greedy_correct": rewards[:, 0] == 1,
        "greedy_rewards": rewards[:, 0],
        "reward_parts": torch.stack([rewards, counted.float()]),
        "prompts": list(range(len(rewards))),
        "log_ratios": counted / rewards.numel() - 0.5,
        "texts": [[f"Response {i}." for i in row] for row in counted.tolist()],
        # every component that it looks for is there
        "components": [[defaultdict(float) for _ in row] for row in counted],
    }
    inputs = {name: known[name] for name in row.inputs}
    try:
        return group_advantage(rewards, estimator, **inputs, **options)
    except ValueError as error:
        raise ValueError(f"{error}, on a small example") from error
    except Exception as error:
        raise ValueError(
            f"{row.name} fails on a small example: {type(error).__name__}: {error}"
        ) from error
