"""The objectives by name, their options, and how they are built."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from maxrl_fast.algorithms.estimator import Size
from maxrl_fast.algorithms.estimators import ALIASES, ESTIMATORS, Estimator, find_estimator
from maxrl_fast.algorithms.known import method_hint
from maxrl_fast.algorithms.options import Option, check_options
from maxrl_fast.errors import InputError
from maxrl_fast.ops.group_advantage import try_out
from maxrl_fast.runtime.loading import is_code, load_code, place_of
from maxrl_fast.training.objectives import distill as distill  # each fills OBJECTIVE_CLASSES
from maxrl_fast.training.objectives import pacs as pacs
from maxrl_fast.training.objectives import ppo as ppo
from maxrl_fast.training.objectives import riskpo as riskpo
from maxrl_fast.training.objectives import verifree as verifree
from maxrl_fast.training.objectives import zvp as zvp
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.objectives.objective import OBJECTIVE_CLASSES as OBJECTIVE_CLASSES
from maxrl_fast.training.objectives.objective import Objective, ObjectiveSpec
from maxrl_fast.training.objectives.off_policy import OffPolicyObjective

DEFAULT_K = 4
_BASELINES = ("leave_two_out",)  # a baseline only; its gradient is zero
OBJECTIVES = (*(name for name in ESTIMATORS if name not in _BASELINES), *OBJECTIVE_CLASSES)


def find_code(option: str, name: str, find: Callable[[Any], Any]) -> Any:
    """Return the method of an option's FILE.py:FUNCTION or package.module:FUNCTION."""
    function = load_code(option, name, "FUNCTION")
    try:
        return find(function)
    except ValueError as error:
        raise InputError(
            f"--{option} {name} cannot be used: {error}{place_of(error)}", option
        ) from error


def find_objective(name: str) -> ObjectiveSpec | Estimator:
    """Return the objective of --objective: a built-in one, or your own."""
    if name in OBJECTIVE_CLASSES:
        return OBJECTIVE_CLASSES[name]
    if is_code(name):
        row: Estimator = find_code("objective", name, find_estimator)
        return row
    if name in {*OBJECTIVES, *ESTIMATORS, *ALIASES} - {*_BASELINES}:  # registered ones too
        return find_estimator(name)
    raise InputError(
        "objective must be one that `python -m maxrl_fast.objectives` lists, such as maxpo, maxrl, "
        f"pacs, grpo and ppo, or FILE.py:FUNCTION, got {name!r:.80}"
        f"{method_hint(name, [*OBJECTIVES, *ALIASES])}",
        "objective",
    )


def _size(name: str) -> Size | None:
    row = find_objective(name)
    return row.size if isinstance(row, Estimator) else None


def objective_options(name: str) -> dict[str, Option]:
    """Return an objective's options: the ones in the signature of its function."""
    size = _size(name)
    return ({} if size is None else {size.name: size.option}) | dict(find_objective(name).options)


def objective_defaults(name: str, num_rollouts: int) -> dict[str, Any]:
    """Return the defaults of an objective's options at N rollouts; None where one must be given or
    the configuration works it out."""
    defaults = {option: row.default for option, row in objective_options(name).items()}
    if (size := _size(name)) is not None:
        largest = num_rollouts - size.below_n
        if size.name == "k":
            largest = max(size.smallest, min(DEFAULT_K, largest))
        defaults[size.name] = largest
    return defaults


def objective_presets(name: str) -> Mapping[str, Any]:
    return OBJECTIVE_CLASSES[name].presets if name in OBJECTIVE_CLASSES else {}


def objective_class(name: str) -> type[Objective]:
    """Return the class of an objective, whose `loss` and `owns_loss` are those of all its runs."""
    row = find_objective(name)
    if isinstance(row, Estimator):
        return OffPolicyObjective if "log_ratios" in row.inputs else GroupObjective
    cls: Any = row.function
    return cls


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
    wanted = f"{row.name} needs at least %d rollouts per prompt, got {num_rollouts}"
    if not isinstance(row, Estimator):
        row.resolve(options)
        made: Objective = row.function(**options)
        made.updates_per_step = updates_per_step
        if num_rollouts < made.min_rollouts:
            raise ValueError(f"{wanted % made.min_rollouts}: {row.needs}")
        return made
    if num_rollouts < row.min_rollouts:
        raise ValueError(wanted % row.min_rollouts)
    row.resolve_size(num_rollouts, options.get("k"), options.get("order"))
    own = {key: value for key, value in options.items() if key in row.options and value is not None}
    check_options(row.name, row.options, own)
    estimator = row if is_code(name) else name
    per_token = try_out(row, estimator, num_rollouts, **options).dim() == 1
    if "log_ratios" not in row.inputs:
        return GroupObjective(estimator, options, per_token=per_token)
    if len(row.inputs) > 1 or per_token:
        others = "; it may ask for k and valid besides them, and must return [G, N]"
        raise ValueError(f"{row.name} asks for log_ratios, which change with every update{others}")
    return OffPolicyObjective(estimator, options)
