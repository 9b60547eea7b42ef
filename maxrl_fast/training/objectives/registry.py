"""The objectives by name, their options, and how they are built."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from maxrl_fast.algorithms.estimator import RATIOS, TRAINING_ESTIMATORS
from maxrl_fast.algorithms.estimators import ALIASES, ESTIMATORS, Estimator, find_estimator
from maxrl_fast.algorithms.known import method_hint
from maxrl_fast.algorithms.method import Method
from maxrl_fast.algorithms.options import check_options
from maxrl_fast.errors import InputError
from maxrl_fast.ops.group_advantage import try_out
from maxrl_fast.runtime.loading import is_code, load_code, place_of
from maxrl_fast.training.objectives import ppo as ppo  # each fills OBJECTIVE_CLASSES
from maxrl_fast.training.objectives import verifree as verifree
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.objectives.objective import OBJECTIVE_CLASSES, Objective

DEFAULT_K = 4
_BASELINES = ("leave_two_out",)  # a baseline only; its gradient is zero
METHODS: Mapping[str, Method] = {**ESTIMATORS, **TRAINING_ESTIMATORS, **OBJECTIVE_CLASSES}
OBJECTIVES = tuple(name for name in METHODS if name not in _BASELINES)


def find_code(option: str, name: str, find: Callable[[Any], Any]) -> Any:
    function = load_code(option, name, "FUNCTION")
    try:
        return find(function)
    except ValueError as error:
        raise InputError(f"--{option} {name} cannot be used: {error}{place_of(error)}") from error


def find_objective(name: str) -> Method:
    if is_code(name):
        row: Estimator = find_code("objective", name, find_estimator)
        return row
    known: dict[str, Method] = {**METHODS, **ALIASES, **ESTIMATORS}  # registered ones too
    if name in known and name not in _BASELINES:
        return known[name]
    raise InputError(
        "objective must be one that `python -m maxrl_fast.objectives` lists, such as maxpo, maxrl, "
        f"pacs, grpo and ppo, or FILE.py:FUNCTION, got {name!r:.80}"
        f"{method_hint(name, [*OBJECTIVES, *ALIASES])}"
    )


def objective_defaults(name: str, num_rollouts: int) -> dict[str, Any]:
    """Return the defaults of an objective's options at N rollouts; None where one must be given or
    the configuration works it out."""
    row = find_objective(name)
    defaults = {option: x.default for option, x in row.options.items()}
    if isinstance(row, Estimator) and (size := row.size) is not None:
        largest = num_rollouts - size.below_n
        if size.name == "k":
            largest = max(size.smallest, min(DEFAULT_K, largest))
        defaults = {size.name: largest, **defaults}
    return defaults


def objective_presets(name: str) -> Mapping[str, Any]:
    return getattr(METHODS.get(name), "presets", {})


def objective_class(name: str) -> Any:
    row = find_objective(name)
    return row if isinstance(row, Estimator) else row.function


def make_objective(
    name: str, given: Mapping[str, Any], num_rollouts: int, updates_per_step: int = 1
) -> Objective:
    """Return the objective of a run, which is built and tried once; options that are not `given`
    take their defaults.

    Raises:
        ValueError: if an option does not fit the objective or N.
    """
    options = objective_defaults(name, num_rollouts) | dict(given)
    return _made(name, tuple(options.items()), num_rollouts, updates_per_step)


@lru_cache(maxsize=64)
def _made(
    name: str, items: tuple[tuple[str, Any], ...], num_rollouts: int, updates_per_step: int
) -> Objective:
    options, row = dict(items), find_objective(name)
    limits: Any = row if isinstance(row, Estimator) else row.function
    fewest = limits.min_rollouts
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
        given = name if name in ESTIMATORS | ALIASES else row
        per_token = try_out(row, given, num_rollouts, **options).dim() == 1
    if per_token and not {*RATIOS}.isdisjoint(row.inputs):
        raise ValueError(f"{row.name} asks for log-ratios of responses, so it must return [G, N]")
    return GroupObjective(estimator, options, per_token, updates_per_step=updates_per_step)
