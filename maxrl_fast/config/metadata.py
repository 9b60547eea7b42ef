"""What an option says of itself in the `Annotated[...]` of its field, and the one pass that reads
it.

    vllm_tensor_parallel: Annotated[Count, when.VLLM, Resume.ROUNDING] = 1

A `Limit`, here that of Count, bounds its numbers, a `Refusal` says what it does not go with, and
`Default` how --help shows a default that is derived when the run starts; the others are below.
"""

import ast
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from maxrl_fast.algorithms.options import Limit, Option, Refusal, make_option
from maxrl_fast.errors import InputError

AnyGroups = TypeVar("AnyGroups", bound="Groups")


@dataclass(frozen=True)
class When:
    """The runs that use an option.

    Args:
        otherwise: what to say of the option in other runs: a format of the options by name, or a
            function of them.
        holds: whether a run of these options by name uses it.
    """

    otherwise: str | Callable[[Mapping[str, Any]], str]
    holds: Callable[[Mapping[str, Any]], Any]


class Resume(Enum):
    """What it means that a run resumes with another value. Without a note it changes what is
    computed, or, as eval_prompts and eval_samples do, what is measured: the evaluation after the
    checkpoint is made again, and `best` compares evaluations."""

    SEMANTIC = auto()  # needs --allow-changes
    ROUNDING = auto()  # the numbers are no longer bitwise identical, which is a warning
    FREE = auto()  # nothing that is learned depends on it
    POLICY = auto()  # it fixes the shape of the policy and cannot change
    NOT_COMPARED = auto()  # it says how a run was started


class LessMemory:
    """How an option reduces the memory in some phases of a step: a format of its flag, as in "a
    lower {}".
    """

    def __init__(self, advice: str, *phases: str):
        self.advice, self.phases = advice, phases


class Note(Enum):
    # its default follows from --objective: a run that resumes with another takes that one's
    FOLLOWS_OBJECTIVE = auto()
    FOLLOWS_LOSS = auto()  # the same for --loss
    # it may name a file or a module that the run imports
    MAY_NAME_CODE = auto()
    NAMES_CODE = auto()  # each of its values does
    JSON = auto()  # its text is a JSON object
    NOT_IN_A_FILE = auto()  # a flag without a key of --config
    POSITIONAL = auto()  # a word of the command without a flag
    OPTIONAL_VALUE = auto()  # its flag may stand alone, which gives ""
    ADVANCED = auto()  # --help has only its name; docs/options.md has all of it


@dataclass(frozen=True)
class Groups:
    """A configuration: a dataclass of groups of options, which are dataclasses with a docstring
    below each field.
    """

    def flat(self) -> dict[str, Any]:
        """All options by flag name, in the types of JSON and TOML."""
        return {
            name: as_json(value)
            for group in vars(self).values()
            for name, value in vars(group).items()
        }

    def replace(self: AnyGroups, **options: Any) -> AnyGroups:
        """A copy with other values for some options, by flag name."""
        changed = {}
        for name, group in vars(self).items():
            if own := {key: options[key] for key in vars(group).keys() & options.keys()}:
                changed[name] = dataclasses.replace(group, **own)
        return dataclasses.replace(self, **changed)


def as_json(value: Any) -> Any:
    """Return an option's value in the types of JSON and TOML: of several values a list, of one the
    value, of none None.
    """
    if isinstance(value, tuple):
        return [*map(as_json, value)] if len(value) > 1 else as_json(value[0]) if value else None
    return str(value) if isinstance(value, Path) else value


def as_list(value: Any) -> list[Any]:
    """Return the values that `as_json` made one value of."""
    return [*value] if isinstance(value, (list, tuple)) else [] if value is None else [value]


@lru_cache
def options_of(config: Any) -> dict[str, Option]:
    groups = get_type_hints(config).values()
    return {option.name: option for group in groups for option in read_options(group)}


@lru_cache
def read_options(group: Any) -> tuple[Option, ...]:
    hints, helps = get_type_hints(group, include_extras=True), {}
    for cls in group.__mro__[-2::-1]:  # without object
        (definition,) = ast.parse(inspect.getsource(cls)).body
        assert isinstance(definition, ast.ClassDef)
        for statement, text_below in itertools.pairwise(definition.body):
            match statement, text_below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    helps[name] = text
    return tuple(
        make_option(field.name, hints[field.name], field.default, helps.get(field.name, ""))
        for field in dataclasses.fields(group)
        if field.default is not dataclasses.MISSING
    )


def names_with(config: type, note: Note | Resume) -> tuple[str, ...]:
    return tuple(name for name, option in options_of(config).items() if note in option.notes)


def check_limits(config: type, values: Mapping[str, Any]) -> None:
    """Refuse the first option whose value is out of its limits; None is a value not given."""
    for name, option in options_of(config).items():
        for limit in option.of(Limit):
            if values.get(name) is not None and not limit.holds(values[name]):
                raise InputError(f"{name} must be {limit.wanted}, got {values[name]!s:.80}", name)


def check_refusals(config: type, values: Mapping[str, Any]) -> None:
    """Refuse the first options that do not go together."""
    for option in options_of(config).values():
        for refusal in option.of(Refusal):
            refusal.check(values)


def inapplicable_options(config: type, values: Mapping[str, Any]) -> dict[str, str]:
    """Return the options that a run of these options does not use, each with what to say of it."""
    found: dict[str, str] = {}
    for name, option in options_of(config).items():
        for condition in option.of(When):
            if not condition.holds(values):
                said = condition.otherwise
                found.setdefault(
                    name, said.format_map(values) if isinstance(said, str) else said(values)
                )
    return found
