"""Custom tasks, objectives, losses and engines: FILE.py:NAME, and the entry points of installed
distributions.

Nothing is imported before it is used, and entry points are looked up only for names that are not
built in.
"""

import inspect
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from maxrl_fast.errors import InputError
from maxrl_fast.runtime.loading import LoadError, describe_error, load

GROUPS = {  # of entry points, by option
    "task": "maxrl_fast.tasks",
    "objective": "maxrl_fast.objectives",
    "loss": "maxrl_fast.losses",
    "rollout": "maxrl_fast.engines",
}


def is_file(name: str) -> bool:
    return name.rpartition(":")[0].endswith(".py")


def installed(option: str) -> list[EntryPoint]:
    return sorted(entry_points(group=GROUPS[option]), key=lambda point: point.name)


def is_installed(option: str, name: str) -> bool:
    return any(point.name == name for point in installed(option))


def owner(point: EntryPoint) -> str:
    if point.dist is not None:
        return f"{point.dist.name} {point.dist.version}"
    return "an unknown distribution"


def find(option: str, name: str) -> EntryPoint | None:
    found = [point for point in installed(option) if point.name == name]
    if len(found) > 1:
        owners = " and ".join(map(owner, found))
        raise InputError(
            f"--{option} {name} must be of one distribution, got {owners}; uninstall all but one "
            "of them"
        )
    return found[0] if found else None


def describe_installed() -> str:
    """Return a paragraph for --help."""
    found = entry_points()  # once: it reads the metadata of every distribution
    points = [
        (option, point) for option, group in GROUPS.items() for point in found.select(group=group)
    ]
    if points:
        return "Installed: " + "; ".join(
            f"--{option} {point.name} ({owner(point)})" for option, point in points
        )
    return ""


def place_of(option: str, name: str) -> str:
    """Return FILE.py:NAME or package.module:name, without importing it; "" if built in."""
    point = None if is_file(name) else find(option, name)
    return name if is_file(name) else "" if point is None else f"{point.module}:{point.attr}"


@cache
def load_plugin(option: str, name: str, wanted: str) -> Any:
    """Return the object that an option's value names. `wanted`: "FUNCTION" or "CLASS"."""
    if is_file(name):
        try:
            return load(name)[0]
        except LoadError as error:
            raise InputError(f"--{option} {name} must be FILE.py:{wanted}: {error}") from error
    point = find(option, name)
    if point is None:
        raise InputError(f"--{option} {name} is the name of nothing that is installed")
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        which = f"{GROUPS[option]}: {point.name} = {point.value}"
        raise InputError(
            f"--{option} {name} is of {owner(point)}, whose entry point ({which}) cannot be "
            f"loaded: {type(error).__name__}: {error}"
        ) from error


def build_plugin(
    option: str,
    name: str,
    protocol: type,
    offered: Mapping[str, Any],
    arguments: Mapping[str, Any] | None = None,
    hint: str = "",
) -> Any:
    """Construct the class that an option's value names with `arguments` and those of `offered` that
    it has parameters for, and check the object against a protocol. `hint` ends the message about a
    parameter without an argument."""
    who, cls = f"--{option} {name}", load_plugin(option, name, "CLASS")
    if not inspect.isclass(cls):
        raise InputError(f"{who} must be a class, got {cls!r:.80}")
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{who} must have a constructor whose signature Python can read: {error}"
        ) from error
    takes_all = any(x.kind == x.VAR_KEYWORD for x in parameters.values())
    given = {key: value for key, value in offered.items() if key in parameters} | dict(
        arguments or {}
    )
    if unknown := [key for key in given if key not in parameters and not takes_all]:
        raise InputError(
            f"{who} takes {', '.join(parameters) or 'no arguments'}, got {', '.join(unknown)}"
        )
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        key for key, x in parameters.items() if x.default is x.empty and x.kind not in variadic
    ]
    if missing := [key for key in needed if key not in given]:
        raise InputError(
            f"{who} has the parameter {missing[0]} without a default, which nothing gives{hint}"
        )
    try:
        plugin = cls(**given)
    except Exception as error:
        if isinstance(error, (InputError, MemoryError, torch.OutOfMemoryError)):
            raise
        file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
        raise InputError(f"{who} cannot be made: {describe_error(error, file)}") from error
    check_protocol(who, plugin, protocol)
    return plugin


def check_protocol(who: str, plugin: object, protocol: type) -> None:
    """A method that the class only inherits from the protocol counts as missing."""
    methods = {
        key: value
        for key, value in vars(protocol).items()
        if inspect.isfunction(value) and not key.startswith("_")
    }
    for name, asked in methods.items():
        own = getattr(plugin, name, None)
        wanted = f"{who} must have the method {name}{_bare(inspect.signature(asked))}"
        if not callable(own) or getattr(own, "__func__", None) is asked:
            raise InputError(f"{wanted}, which it does not")
        if not _can_be_called_as(own, asked):
            raise InputError(f"{wanted}, got {name}{_bare(inspect.signature(own))}")
    for name, hint in get_type_hints(protocol).items():
        if not hasattr(plugin, name):
            raise InputError(
                f"{who} must have the attribute {name}, {_shown(hint)}, which it does not"
            )
        if not _is_of(getattr(plugin, name), hint):
            raise InputError(
                f"{who} must have the attribute {name}, {_shown(hint)}, got "
                f"{getattr(plugin, name)!r:.80}"
            )


def _bare(signature: inspect.Signature) -> inspect.Signature:
    kept = [
        x.replace(annotation=x.empty) for x in signature.parameters.values() if x.name != "self"
    ]
    return signature.replace(parameters=kept, return_annotation=inspect.Signature.empty)


def _can_be_called_as(own: Any, asked: Any) -> bool:
    """Whether it accepts the trainer's calls of the protocol's method."""
    try:
        signature = inspect.signature(own)
    except (TypeError, ValueError):
        return False
    parameters = list(inspect.signature(asked).parameters.values())[1:]  # without self
    positional = [x for x in parameters if x.kind != x.KEYWORD_ONLY and x.default is x.empty]
    by_name = [x.name for x in parameters if x not in positional]
    try:
        signature.bind(*positional, **dict.fromkeys(by_name))
        # defaults left out
        signature.bind(
            *positional, **{x.name: None for x in parameters if x.kind == x.KEYWORD_ONLY}
        )
    except TypeError:
        return False
    return True


def _is_of(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(_is_of(value, part) for part in get_args(hint))
    if get_origin(hint) is tuple:  # tuple[int, ...]
        return isinstance(value, tuple) and all(_is_of(part, get_args(hint)[0]) for part in value)
    return isinstance(value, hint) and (not isinstance(value, bool) or hint is bool)


def _shown(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_shown(part) for part in get_args(hint))
    if hint is NoneType:
        return "None"
    return hint.__name__ if inspect.isclass(hint) and not get_args(hint) else str(hint)
