"""The parts of a run that are chosen by name, and the options of each."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from maxrl_fast.algorithms.known import method_hint
from maxrl_fast.algorithms.losses import ALIASES, LOSSES
from maxrl_fast.algorithms.losses.registry import Clips, TokenLoss, find_loss
from maxrl_fast.algorithms.method import Method
from maxrl_fast.algorithms.options import Option, make_option, options_of, parameters_of
from maxrl_fast.config.options import Config, EvaluationConfig
from maxrl_fast.errors import InputError
from maxrl_fast.rollout.vllm import VllmOptions
from maxrl_fast.runtime.loading import is_code, load_code
from maxrl_fast.tasks.dataset import DatasetOptions
from maxrl_fast.tasks.dataset_specs import DATASETS, GYM, OBJECT, is_reward
from maxrl_fast.tasks.gym import GymOptions, generator_options
from maxrl_fast.tasks.maze import MazeOptions
from maxrl_fast.training.correction import CORRECTIONS
from maxrl_fast.training.objectives.registry import (
    OBJECTIVES,
    find_code,
    find_objective,
    objective_class,
)

# in the order of choice: the default of a later one follows from earlier ones
SECTIONS = ("objective", "rollout", "task", "loss", "correction")
ENGINES: dict[str, Any] = {"native": None, "vllm": VllmOptions}
_BUILT_IN: dict[str, Any] = {
    "objective": OBJECTIVES,
    "loss": LOSSES | ALIASES,
    "correction": CORRECTIONS,
    "task": {"maze": MazeOptions} | dict.fromkeys(DATASETS, DatasetOptions),
    "rollout": ENGINES,
}
# arguments that a user's class may ask for, which are no options
OFFERED = {
    "task": ("seed", "model"),
    "rollout": ("model", "dtype", "max_batch", "ranks", "cache_bytes"),
}


def part(section: str, name: str) -> Any:
    """Return what --SECTION NAME names: a method, a dataclass of options, a user's class, or None
    for a part without options."""
    if section == "objective":
        return find_objective(name)
    if name in (built_in := _BUILT_IN[section]):
        return built_in[name]
    if section == "task" and name.startswith((GYM, OBJECT)):
        return GymOptions if name.startswith(GYM) else None
    if section == "task" and is_reward(name):
        return DatasetOptions
    if is_code(name):
        return loss_of(name) if section == "loss" else load_code(section, name, "CLASS")
    names = ", ".join([*built_in, *["gym:NAME"] * (section == "task")])
    raise InputError(
        f"--{section} must be one of {names}, or FILE.py:NAME or package.module:NAME, got "
        f"{name!r:.80}{method_hint(name, built_in)}",
        section,
    )


def loss_of(name: str) -> TokenLoss:
    """Return the token loss of --loss, a name that `part` knows."""
    is_known = name in _BUILT_IN["loss"]
    found: TokenLoss = find_loss(name) if is_known else find_code("loss", name, find_loss)
    return found


def _signature(section: str, name: str) -> Mapping[str, Option]:
    """Return the options of a part by the names in its signature."""
    found = part(section, name)
    if isinstance(found, Method):
        clips = options_of(Clips) if getattr(found, "clips", False) else {}
        size = getattr(found, "size", None)
        return {**clips, **({size.name: size.option} if size else {}), **found.options}
    if name.startswith(GYM):
        return {**options_of(found), **generator_options(name.removeprefix(GYM))}
    if name in _BUILT_IN[section] or found is DatasetOptions:
        return options_of(found) if found else {}
    own = {}
    for x in parameters_of(found) if inspect.isclass(found) else ():
        if x.name not in OFFERED[section] and x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY):
            hint = type(x.default) if x.annotation is x.empty else x.annotation
            own[x.name] = make_option(x.name, hint, x.default)
    return own


def purpose_of(section: str, name: str) -> str:
    """Return the line that --help shows of a part."""
    found = part(section, name)
    return found.formula if isinstance(found, Method) else inspect.getdoc(found) or ""


@lru_cache(maxsize=256)
def options_of_part(section: str, name: str) -> dict[str, Option]:
    """Return the options of a part by flag. Where a group or a built-in part of an earlier section
    has the name, the part's own is before it: simko_k, icepop_low."""
    evaluated = EvaluationConfig.names() if section in ("task", "rollout") else ()
    earlier = {"loss": ("objective",), "correction": ("objective", "loss")}.get(section, ())
    used = Config.names().union(evaluated, *map(owners_by_option, earlier))
    signature, short = _signature(section, name).items(), short_name(name)
    flags = {f"{short}_{key}" if key in used else key: (key, x) for key, x in signature}
    return {flag: replace(x, name=flag, own_name=key) for flag, (key, x) in flags.items()}


def short_name(name: str) -> str:
    """Return the name of a part without its file."""
    return name.rpartition(":")[2]


@lru_cache
def owners_by_option(section: str) -> dict[str, tuple[str, ...]]:
    """Return the built-in parts of a section that have each option."""
    owners: dict[str, tuple[str, ...]] = {}
    for name in _BUILT_IN[section]:
        for key in options_of_part(section, name):
            owners[key] = (*owners.get(key, ()), name)
    return owners


def default_of(section: str, chosen: Mapping[str, str], ahead: int, has_cap: bool) -> str:
    """Return the loss or the correction that follows from the parts chosen before it, for a
    correction with --ahead and whether --importance-cap is given."""
    objective = objective_class(chosen["objective"])
    if section == "loss":
        return objective.loss
    # samples of older weights, and the loss has no ratio
    is_stale = ahead and chosen["loss"] == "reinforce"
    is_other = chosen["rollout"] != "native" or is_stale
    return "tis" if has_cap or (is_other and not objective.owns_loss) else "none"
