"""The objectives by name: their options, how they are built, and W_N(p) of each."""

import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from maxrl_fast.algorithms.estimator import RATIOS
from maxrl_fast.algorithms.estimators import ALIASES, ESTIMATORS, Estimator, find_estimator
from maxrl_fast.algorithms.losses import ALIASES as LOSS_ALIASES
from maxrl_fast.algorithms.losses import LOSSES
from maxrl_fast.algorithms.method import Method, check_options
from maxrl_fast.errors import InputError, nearest
from maxrl_fast.ops import effective_weight
from maxrl_fast.ops.group_advantage import try_out
from maxrl_fast.runtime.loading import is_code, load_code, place_of
from maxrl_fast.training.objectives import classes as classes  # fills OBJECTIVE_CLASSES
from maxrl_fast.training.objectives.group import OBJECTIVE_CLASSES, GroupObjective, Objective

DEFAULT_K = 4
MOST_ROLLOUTS = 2048  # of weight_of: memory is quadratic in N, in float64
_BASELINES = ("leave_two_out",)  # a baseline only; its gradient is zero
METHODS: Mapping[str, Method] = ChainMap[str, Any](OBJECTIVE_CLASSES, ESTIMATORS)
OBJECTIVES = tuple(name for name in METHODS if name not in _BASELINES)


def explain_name(name: str) -> str:
    """Return the name of a method, and what it stands for where it is an alias."""
    row: Any = (LOSS_ALIASES | ALIASES).get(name)
    if row is None:
        return name
    own: Any = (LOSSES | ESTIMATORS)[row.name]
    changes = [
        f"{key} {option.default:g}"
        for key, option in row.options.items()
        if option.default != own.options[key].default
    ]
    if row.aggregation != own.aggregation:
        changes.append(f"aggregation {row.aggregation}")
    return f"{name} is {row.name}{', by default with ' if changes else ''}{' and '.join(changes)}"


def method_hint(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean ...?": the name in other letters, the option that has it, or the most
    similar of these names."""
    plain = re.sub(r"[-. @]+", "_", name.lower())
    if plain in names:
        return f"; did you mean {plain!r}?"
    if plain in LOSSES | LOSS_ALIASES:
        return f"; did you mean --objective grpo --loss {plain}?"
    if plain in ESTIMATORS | ALIASES:
        return f"; did you mean --objective {plain}?"
    return nearest(plain, names)


def find_code(option: str, name: str, find: Callable[[Any], Any]) -> Any:
    function = load_code(option, name, "FUNCTION")
    try:
        return find(function)
    except ValueError as error:
        raise InputError(f"--{option} {name} cannot be used: {error}{place_of(error)}") from error


def find_objective(name: str) -> Method:
    if is_code(name):
        own: Estimator = find_code("objective", name, find_estimator)
        return own
    if name not in _BASELINES and (row := METHODS.get(name) or ALIASES.get(name)):
        return row
    raise InputError(
        "objective must be one that `python -m maxrl_fast.objectives` lists, such as maxpo, maxrl, "
        f"pacs, grpo and ppo, or FILE.py:FUNCTION, got {name!r:.80}"
        f"{method_hint(name, [*OBJECTIVES, *ALIASES])}"
    )


def objective_defaults(name: str, num_rollouts: int) -> dict[str, Any]:
    """Return the defaults of options at N rollouts; None where one must be given or the
    configuration works it out."""
    row = find_objective(name)
    defaults = {option: x.default for option, x in row.options.items()}
    if isinstance(row, Estimator) and (size := row.size) is not None:
        largest = num_rollouts - size.below_n
        if size.name == "k":
            largest = max(size.smallest, min(DEFAULT_K, largest))
        defaults = {size.name: largest, **defaults}
    return defaults


def objective_class(name: str) -> Any:
    row = find_objective(name)
    return row if isinstance(row, Estimator) else row.function


def make_objective(
    name: str, given: Mapping[str, Any], num_rollouts: int, updates_per_step: int = 1
) -> Objective:
    """Return the objective of a run, which is built and tried once. Raise ValueError if an option
    does not fit it or N."""
    options = objective_defaults(name, num_rollouts) | dict(given)
    return _made(name, tuple(options.items()), num_rollouts, updates_per_step)


@lru_cache(maxsize=64)
def _made(
    name: str, items: tuple[tuple[str, Any], ...], num_rollouts: int, updates_per_step: int
) -> Objective:
    options, row = dict(items), find_objective(name)
    fewest = objective_class(name).min_rollouts
    if num_rollouts < fewest:
        raise ValueError(
            f"{row.name} needs at least {fewest} rollouts per prompt, got {num_rollouts}"
        )
    if not isinstance(row, Estimator):
        row.resolve(options)
        made: Objective = row.function(**options)
        return made
    row.resolve_size(num_rollouts, options.get("k"), options.get("order"))
    own = {key: value for key, value in options.items() if key in row.options and value is not None}
    check_options(row.name, row.options, own)
    estimator, per_token = row if is_code(name) else name, False
    if not row.state:
        per_token = try_out(row, estimator, num_rollouts, **options).dim() == 1
    if per_token and not {*RATIOS}.isdisjoint(row.inputs):
        raise ValueError(f"{row.name} asks for log-ratios of responses, so it must return [G, N]")
    return GroupObjective(estimator, options, per_token, updates_per_step=updates_per_step)


def weight_of(options: dict[str, Any], pass_rates: Sequence[float]) -> dict[str, Any]:
    """Return {"values": W_N(p) at these pass rates}, exact at the N of these options, or {"reason":
    why there is none}, for the report, which imports no PyTorch."""
    name, n = options["objective"], options["rollouts"]
    if is_code(name):
        return {"reason": f"{name} is a custom objective, whose W_N(p) is not known"}
    row = find_objective(name)
    if not isinstance(row, Estimator) or row.of_run:
        return {"reason": f"{name} has no W_N(p): it learns from more than a group's rewards"}
    if n > MOST_ROLLOUTS:
        return {"reason": f"rollouts per prompt must be 1 to {MOST_ROLLOUTS:,}, got {n}"}
    known = {"k", "order", *row.options}
    given = {key: options[key] for key in known if options.get(key) is not None}
    try:
        weights = effective_weight(name, n, torch.tensor(pass_rates, dtype=torch.float64), **given)
    except ValueError as error:
        return {"reason": str(error)}
    if not weights.isfinite().all():
        return {"reason": f"the weight of {name} is not finite"}
    return {"values": weights.tolist()}
