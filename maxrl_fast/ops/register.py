"""Estimators by name: how one is registered, tried on a small example, and weighs a prompt."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import check_flag, check_integer, check_tensor
from maxrl_fast.algorithms.estimator import INPUTS
from maxrl_fast.algorithms.estimators import ESTIMATORS, Estimator, find_estimator
from maxrl_fast.algorithms.options import REQUIRED
from maxrl_fast.ops.group_advantage import group_advantage
from maxrl_fast.runtime.loading import describe_error

_LARGEST = 10_000  # number n of rollouts: the rewards of the n + 1 groups take 8 n^2 bytes


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
    options: dict[str, Any] = {key: 0.1 for key, x in row.options.items() if x.default is REQUIRED}
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
    except (Exception, SystemExit) as error:
        what = f"{row.name} fails on a small example"
        raise ValueError(f"{what}: {describe_error(error)}") from error


def example_inputs(row: Estimator, rewards: Tensor) -> dict[str, Any]:
    """Return the inputs of an estimator for rewards [G, N]."""
    numbers = torch.arange(1, rewards.numel() + 1).view(rewards.shape)
    return {name: INPUTS[name](numbers) for name in row.inputs}


def effective_weight(
    estimator: str,
    n: int,
    pass_rate: Tensor,
    *,
    k: int | None = None,
    order: int | None = None,
    **options: float,
) -> Tensor:
    """Return W_n(p), the factor of a prompt's gradient under an estimator, for rewards 0 or 1.

    E[(1/n) sum_i A_i grad log pi(y_i)] = W_n(p) grad p, exactly at finite n, with W_n(p) = E_{c ~
    Bin(n-1, p)} [A_correct(c+1) - A_wrong(c)], where A_correct(c) and A_wrong(c) are the advantages
    of a correct and a wrong rollout if c rollouts are correct. For opo all lengths are equal.

    Args:
        estimator: a name in `ESTIMATORS` whose advantages depend only on the rewards of the group.
        n: the number of rollouts in the group.
        pass_rate: p, any shape, between 0 and 1.
        k, order, options: as in `group_advantage`.

    Returns W_n(p), of the shape of `pass_rate`, float64. Raises ValueError and TypeError as
    group_advantage, and for a pass rate outside [0, 1].
    """
    row = find_estimator(estimator)
    if not row.has_weight:
        raise ValueError(f"the weight of {row.name} {row.weight}, so it must be another estimator")
    check_integer("n", n, f"an integer from 1 to {_LARGEST}", lambda x: 1 <= x <= _LARGEST)
    check_tensor("pass_rate", pass_rate)
    p = pass_rate.double().flatten()[:, None]
    is_rate = (p >= 0) & (p <= 1)
    if p.device.type != "meta" and not bool(is_rate.all()):
        raise ValueError("pass_rate must be between 0 and 1 everywhere")
    rewards = torch.ones(n + 1, n, dtype=torch.float64).tril(-1)  # row c: c correct ones
    lengths = torch.ones(n + 1, n, dtype=torch.int64) if "lengths" in row.inputs else None
    advantages = group_advantage(
        rewards, estimator, k=k, order=order, lengths=lengths, **cast(Any, options)
    )
    difference = (advantages[1:, 0] - advantages[:-1, -1]).to(p.device)  # [n], by c = 0..n-1
    c = torch.arange(n, dtype=torch.float64, device=p.device)
    choices = torch.lgamma(c[-1] + 1) - torch.lgamma(c + 1) - torch.lgamma(n - c)
    # of c in n - 1
    probability = (choices + torch.xlogy(c, p) + torch.special.xlog1py(n - 1 - c, -p)).exp()
    return (probability.where(is_rate, torch.nan) @ difference).view(pass_rate.shape)
