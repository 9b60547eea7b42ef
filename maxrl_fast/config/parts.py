"""The parts of a run that are chosen by name, and the options of each."""

import dataclasses
import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from maxrl_fast.algorithms.known import method_hint
from maxrl_fast.algorithms.losses import ALIASES, LOSSES
from maxrl_fast.algorithms.losses.registry import Clips, TokenLoss, find_loss
from maxrl_fast.algorithms.options import (
    REQUIRED,
    Option,
    make_option,
    nearest,
    options_of,
    parameters_of,
)
from maxrl_fast.errors import InputError
from maxrl_fast.rollout.names import check_engine_name
from maxrl_fast.rollout.vllm_options import VllmOptions
from maxrl_fast.runtime.loading import is_code, load_code
from maxrl_fast.tasks.dataset import DatasetOptions
from maxrl_fast.tasks.dataset_specs import DATASETS
from maxrl_fast.tasks.gym import GymOptions, generator_options
from maxrl_fast.tasks.maze import MazeOptions
from maxrl_fast.tasks.names import GYM, OBJECT, check_known, is_reward
from maxrl_fast.training.correction import CORRECTIONS
from maxrl_fast.training.objectives.registry import (
    OBJECTIVES,
    find_code,
    objective_class,
    objective_options,
)

# The order in which a run's parts are chosen: the default of a later one follows from earlier ones.
SECTIONS = ("objective", "rollout", "task", "loss", "correction")
TASKS: dict[str, Any] = {"maze": MazeOptions}
TASKS |= dict.fromkeys(DATASETS, DatasetOptions)
ENGINES: dict[str, Any] = {"native": None, "vllm": VllmOptions}
# arguments that a user's class may ask for, which are no options
OFFERED = {
    "task": ("seed", "model"),
    "rollout": ("model", "dtype", "max_batch", "ranks", "cache_bytes"),
}
_BUILT_IN = {
    "objective": OBJECTIVES,
    "loss": (*LOSSES, *ALIASES),
    "correction": tuple(CORRECTIONS),
    "task": (*TASKS, f"{GYM}NAME"),
    "rollout": tuple(ENGINES),
}


def loss_of(name: str) -> TokenLoss:
    """Return the token loss of --loss: a name in LOSSES, or one of your own."""
    if name in LOSSES or name in ALIASES:
        return find_loss(name)
    if not is_code(name):
        raise InputError(
            f"loss must be one of {', '.join(_BUILT_IN['loss'])}, or FILE.py:FUNCTION, got "
            f"{name!r:.80}{method_hint(name, _BUILT_IN['loss'])}"
        )
    found: TokenLoss = find_code("loss", name, find_loss)
    return found


def _signature(section: str, name: str) -> Mapping[str, Option]:
    """Return the options in the signature of a part, by the names there."""
    if section == "objective":
        return objective_options(name)
    if section == "loss":
        loss = loss_of(name)
        return {**(options_of(Clips) if loss.clips else {}), **loss.options}
    if section == "correction":
        if name not in CORRECTIONS:
            wanted = f"--correction must be one of {', '.join(CORRECTIONS)}, got {name!r:.80}"
            raise InputError(wanted + nearest(name, CORRECTIONS), section)
        return CORRECTIONS[name].options
    if section == "rollout":
        check_engine_name(name)
        return _of_class(section, name, ENGINES.get(name, name))
    check_known(name)
    if name.startswith(GYM):
        return {**options_of(GymOptions), **generator_options(name.removeprefix(GYM))}
    kind = DatasetOptions if is_reward(name) else name
    return _of_class(section, name, TASKS.get(name, kind))


def _of_class(section: str, name: str, kind: Any) -> Mapping[str, Option]:
    """Return the options of a dataclass, of the parameters of a user's class, or of nothing."""
    if isinstance(kind, type):  # of options
        return options_of(kind)
    if kind is None or name.startswith(OBJECT):
        return {}
    cls, found = load_code(section, name, "CLASS"), {}
    for x in parameters_of(cls) if inspect.isclass(cls) else ():
        if x.name not in OFFERED[section] and x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY):
            hint = type(x.default) if x.annotation is x.empty else x.annotation
            found[x.name] = make_option(x.name, hint, x.default)
    return found


@lru_cache(maxsize=256)
def options_of_part(section: str, name: str, taken: frozenset[str]) -> dict[str, Option]:
    """Return the options of the part that --SECTION NAME names, by the names of their flags. Where
    a group (`taken`) or a built-in part of an earlier section has the name, the part's own is
    before it: simko_k, icepop_low."""
    before = {"loss": ("objective",), "correction": ("objective", "loss")}.get(section, ())
    used = taken.union(*(owners_by_option(x, taken) for x in before))
    short = name.rpartition(":")[2]
    found = {}
    for key, option in _signature(section, name).items():
        flag = f"{short}_{key}" if key in used else key
        found[flag] = dataclasses.replace(option, name=flag)
    return found


@lru_cache
def owners_by_option(section: str, taken: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Return the built-in parts of a section that have each option, by its name."""
    owners: dict[str, tuple[str, ...]] = {}
    for name in _BUILT_IN[section]:
        if name != f"{GYM}NAME":
            for key in options_of_part(section, name, taken):
                owners[key] = (*owners.get(key, ()), name)
    return owners


def by_signature(section: str, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a part's options, which are by the names of their flags, by the names in
    its signature."""
    short = name.rpartition(":")[2]
    return {key: values.get(f"{short}_{key}", values.get(key)) for key in _signature(section, name)}


def part_options(section: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a part by the names in its signature, with defaults."""
    defaults = {key: x.default for key, x in _signature(section, name).items()}
    return {key: x for key, x in {**defaults, **given}.items() if x is not REQUIRED}


def default_of(section: str, chosen: Mapping[str, str], given: Mapping[str, Any]) -> str:
    """Return the loss or the correction that follows from the other parts and from what is
    given."""
    objective = objective_class(chosen["objective"])
    if section == "loss":
        return objective.loss
    if (cap := given.get("importance_cap")) is not None:
        return "tis" if cap else "none"
    # samples of older weights, and the loss has no ratio
    is_stale = given.get("ahead") and chosen["loss"] == "reinforce"
    is_other = chosen["rollout"] != "native" or is_stale
    return "tis" if is_other and not objective.owns_loss else "none"
