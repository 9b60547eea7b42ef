"""What an option says of itself in the `Annotated[...]` of its field, and the one pass that reads it.

    vllm_tensor_parallel: Annotated[Count, when.VLLM, Resume.ROUNDING, Aka("tensor_parallel_size")] = 1

A `Limit`, here that of Count, bounds its numbers; a `When` says which runs take it; a `Resume` what a change means for a run
that resumes; `Aka` what other libraries call it; `Default` how --help shows a default that is worked out when the run starts;
and a `Note` what else is special about it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import docstring_parser
import tyro

from maxrl_fast.algorithms.options import Limit
from maxrl_fast.errors import InputError

AnyNote = TypeVar("AnyNote")

_FITS_INT32 = Limit("below 2^31", lambda x: x < 2**31)
AT_LEAST_1 = Limit("at least 1", lambda x: x >= 1)
Count = Annotated[int, AT_LEAST_1, _FITS_INT32]
CountOrZero = Annotated[int, Limit("at least 0", lambda x: x >= 0), _FITS_INT32]
Seed = Annotated[int, Limit("in [0, 2^63)", lambda x: 0 <= x < 2**63)]
Positive = Annotated[float, Limit("a finite number above 0", lambda x: 0 < x < math.inf)]
NotNegative = Annotated[float, Limit("finite and at least 0", lambda x: 0 <= x < math.inf)]
Finite = Annotated[float, Limit("finite", math.isfinite)]
UnitInterval = Annotated[float, Limit("in [0, 1]", lambda x: 0 <= x <= 1)]
Share = Annotated[float, Limit("above 0 and at most 1", lambda x: 0 < x <= 1)]
BetweenZeroAndOne = Annotated[float, Limit("above 0 and below 1", lambda x: 0 < x < 1)]
BelowOne = Annotated[float, Limit("in [0, 1)", lambda x: 0 <= x < 1)]


@dataclass(frozen=True)
class When:
    """The runs that take an option.

    Args:
        others: who does not take it, for messages; a format of the choices, as in "task {0.task}".
        holds: whether a run of these choices takes the option of this name.
    """

    others: str
    holds: Callable[[Any, str], Any]


class Resume(Enum):
    """What it means that a run resumes with another value. Without a note it changes the mathematics, or, as eval_prompts and
    eval_samples do, what is measured: the evaluation after the checkpoint is made again, and `best` compares evaluations."""

    MATHEMATICS = auto()  # needs --allow-changes
    ROUNDING = auto()  # the numbers are no longer bitwise identical, which is a warning
    FREE = auto()  # nothing that is learned depends on it
    POLICY = auto()  # it fixes the shape of the policy and cannot change
    START = auto()  # it says how a run was started, and is not compared


class Aka:
    """What TRL, the Trainer of transformers, verl, OpenRLHF and slime call an option, without their prefixes
    (actor_rollout_ref.rollout.n is n).

    Args:
        names: separated by spaces.
        value: of our option, which their names stand for.
    """

    def __init__(self, *names: str, value: str = ""):
        self.names, self.value = " ".join(names).split(), value


@dataclass(frozen=True)
class Default:
    """A default that is worked out when the run starts, as --help shows it, and what --help shows in the value's place."""

    text: str
    metavar: str = ""


class Note(Enum):
    FOLLOWS_OBJECTIVE = auto()  # its default follows from --objective: a run that resumes with another takes that one's
    FOLLOWS_LOSS = auto()  # the same for --loss
    MAY_NAME_CODE = auto()  # it may name a file, a module or an installed plug-in that the run imports
    NAMES_CODE = auto()  # each of its values does
    NOT_IN_A_FILE = auto()  # a flag without a key of --config
    SELDOM = auto()  # --help has only its name; docs/options.md has all of it


@dataclass(frozen=True)
class Option:
    """An option of a configuration."""

    name: str
    kind: Any  # its type, without notes
    default: Any
    help: str  # on one line
    notes: tuple[Any, ...]

    def of(self, kind: type[AnyNote]) -> list[AnyNote]:
        """Return its notes of a class."""
        return [note for note in self.notes if isinstance(note, kind)]

    def find(self, kind: type[AnyNote]) -> AnyNote | None:
        """Return its note of a class, if it has one."""
        return next(iter(self.of(kind)), None)

    @property
    def takes_several(self) -> bool:
        return get_origin(self.kind) is tuple

    @property
    def metavar(self) -> str:
        """What --help shows in the value's place."""
        default = self.find(Default)
        kinds = [kind for kind in (get_args(self.kind) or [self.kind]) if kind is not NoneType]  # of X | None
        return (default and default.metavar) or _METAVARS.get(kinds[0], "STR")

    @property
    def shown(self) -> Any:
        """How tyro shows it."""
        if (default := self.find(Default)) is None:
            return tyro.conf.arg(help=self.help)
        return tyro.conf.arg(help=self.help, metavar=self.metavar, help_behavior_hint=f"(default: {default.text})")


_METAVARS = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}


@lru_cache
def options_of(config: type) -> dict[str, Option]:
    """Return the options of Config or EvaluationConfig by name, in the order of --help."""
    groups = [group for group in get_type_hints(config).values() if dataclasses.is_dataclass(group)]
    return {option.name: option for group in groups for option in read_options(group)}  # type: ignore[arg-type]


@lru_cache
def read_options(group: Any) -> tuple[Option, ...]:
    """Return the options of a group: a dataclass with a docstring below each field."""
    kinds, hints = get_type_hints(group), get_type_hints(group, include_extras=True)
    # tyro alone would keep the source's line breaks.
    texts = docstring_parser.parse_from_object(group).params
    helps = {text.arg_name: " ".join((text.description or "").split()) for text in texts}
    return tuple(
        Option(x.name, kinds[x.name], x.default, helps[x.name], tuple(_notes(hints[x.name]))) for x in dataclasses.fields(group)
    )


def _notes(hint: Any) -> Iterator[Any]:
    """Return what the Annotated in a type hint say, also those of the X in `X | None`."""
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
    yield from (note for part in get_args(hint) for note in _notes(part))


def names_with(config: type, note: Note | Resume) -> tuple[str, ...]:
    """Return the options with this note."""
    return tuple(name for name, option in options_of(config).items() if note in option.notes)


def check_limits(config: type, values: Mapping[str, Any]) -> None:
    """Raise InputError naming the first option whose value is out of its limits; None is a value not given."""
    for name, option in options_of(config).items():
        for limit in option.of(Limit):
            if values.get(name) is not None and not limit.holds(values[name]):
                raise InputError(f"{name} must be {limit.wanted}, got {values[name]}")


def inapplicable_options(config: type, choices: Any) -> dict[str, str]:
    """Return the options that a run of these choices does not take, each with who does not take it."""
    found = {}
    for name, option in options_of(config).items():
        for condition in option.of(When):
            if not condition.holds(choices, name):
                found[name] = condition.others.format(choices)
                break
    return found
