"""Estimators of a plug-in: `register_estimator` adds a row to ESTIMATORS."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from maxrl_fast.ops import group_advantage_kernel
from maxrl_fast.algorithms.arguments import check_flag
from maxrl_fast.ops.custom_advantage import CustomAdvantage
from maxrl_fast.ops.estimators import ESTIMATORS, KERNEL_ROWS, Estimator, Size
from maxrl_fast.ops.group_advantage import INPUTS, forget_plans, group_advantage

_VALUES, _BASELINES = ("reward", "order", "rank", "binary"), ("zero", "mean", "length_mean")
_SCALES = ("one", "size", "leave_one_out", "std", "length_std", "mean")


def register_estimator(name: str, estimator: Estimator | Callable[..., Any], *, replace: bool = False) -> None:
    """Add an estimator to ESTIMATORS, so that `group_advantage(rewards, name)` computes it.

    Args:
        name: a Python identifier.
        estimator: a row of the table, for the kernel; or a function of rewards [G, N] that returns advantages [G, N], floating
            and finite. A function may ask for k, lengths, logprobs, valid and prompts by parameter name (CustomAdvantage), and
            is called for groups of equal size only.
        replace: whether `name` may be taken already.

    Raises:
        ValueError: if the name is taken or not an identifier, if the row is wrong, or if the estimator fails on a small
            example.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"the name of an estimator must be a Python identifier, got {name!r:.80}")
    check_flag("replace", replace)
    if name in KERNEL_ROWS and not replace:
        raise ValueError(f"there is an estimator {name} already; replace=True takes its place")
    if isinstance(estimator, Estimator):
        row = estimator
        _check_row(name, row)
    else:
        row = _row_of(CustomAdvantage.of(estimator, name=name))
    before = {table_name: table.get(name) for table_name, table in _TABLES.items()}
    _put(name, dict.fromkeys(_TABLES, row))
    try:
        _try(name, row)
    except Exception as error:
        _put(name, before)
        raise ValueError(f"{name} fails on a small example: {error}") from error


_TABLES = {"estimators": ESTIMATORS, "kernel": KERNEL_ROWS}


def _put(name: str, rows: dict[str, Estimator | None]) -> None:
    """Set or delete the row of each table, and forget what was computed from the row before."""
    for table_name, row in rows.items():
        if row is None:
            _TABLES[table_name].pop(name, None)
        else:
            _TABLES[table_name][name] = row
    forget_plans()
    group_advantage_kernel.forget_tables()


def _row_of(custom: CustomAdvantage) -> Estimator:
    """Return the row of a function."""
    described = (inspect.getdoc(custom.function) or "").partition("\n")[0]
    size = Size("k", below_n=0, required="k" in custom.required) if "k" in custom.inputs else None
    return Estimator(
        formula=described or f"the function {custom.name}",
        source=str(getattr(custom.function, "__module__", "a plug-in")),
        weight="is not known",
        size=size,
        inputs=tuple(name for name in custom.inputs if name in INPUTS),
        custom=custom,
        min_rollouts=1,
    )


def _check_row(name: str, row: Estimator) -> None:
    """Raise ValueError where the kernel, or a call, cannot be what the row says."""
    for field, choices in (("value", _VALUES), ("baseline", _BASELINES), ("scale", _SCALES)):
        if getattr(row, field) not in choices:
            raise ValueError(f"{field} of {name} must be one of {', '.join(choices)}, got {getattr(row, field)!r:.80}")
    if (row.table is not None) != (row.value in ("rank", "binary")):
        raise ValueError(f"{name} must have a table if and only if its value is rank or binary, got the value {row.value}")
    if unknown := set(row.inputs) - set(INPUTS):
        raise ValueError(f"inputs of {name} must be among {', '.join(INPUTS)}, got {', '.join(sorted(unknown))}")
    if "lengths" not in row.inputs:
        for field, value in (("baseline", "length_mean"), ("scale", "length_std")):
            if getattr(row, field) == value:
                raise ValueError(f"{name} has the {field} {value}, so its inputs must have lengths")


def _try(name: str, row: Estimator) -> None:
    """Compute the advantages of a small example, and raise ValueError where they cannot be."""
    rewards = torch.tensor([[0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    known = {
        "lengths": torch.arange(1, 13).view(3, 4),
        "logprobs": -torch.arange(1.0, 13.0).view(3, 4) / 12,
        "greedy_correct": torch.tensor([False, True, False]),
        "greedy_rewards": torch.tensor([0.0, 1.0, 0.5]),
        "reward_parts": torch.stack([rewards, torch.arange(12.0).view(3, 4)]),
        "prompts": ["first", "second", "third"],
        "log_ratios": torch.arange(12.0).view(3, 4) / 12 - 0.5,
    }
    arguments: dict[str, Any] = {input_name: known[input_name] for input_name in row.inputs}
    arguments |= {option: 0.1 for option, default in row.options.items() if default is None}
    if row.size is not None and row.size.required:
        arguments[row.size.name] = row.size.smallest
    advantages = group_advantage(rewards, name, **arguments)
    if advantages.shape != rewards.shape or not bool(advantages.isfinite().all()):
        raise ValueError(f"its advantages must be finite numbers like the rewards, got {advantages.tolist()}")
