"""What an option says of itself in its `Annotated[...]`, at a field of a configuration or in the
signature of a function.

    def w_reinforce(g: Group, *, correct_weight: Annotated[float, Help("Weight of correct
    rollouts.")] = 0.1) -> Tensor:

An estimator, a loss or an objective has options: the keyword-only parameters of its function.
"""

import contextlib
import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from string import Formatter
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from maxrl_fast.algorithms.arguments import check_choice, check_number
from maxrl_fast.errors import InputError

AnyNote = TypeVar("AnyNote")
# a default that depends on other options; resolving the configuration replaces it
DERIVED: Any = None


@dataclass(frozen=True)
class Limit:
    """The numbers that an option may be: in words, and as a condition."""

    wanted: str
    holds: Callable[[float], bool]


FINITE = Limit("a finite number", math.isfinite)
AT_LEAST_1 = Limit("at least 1", lambda x: x >= 1)
_FITS_INT32 = Limit("below 2^31", lambda x: x < 2**31)
Count = Annotated[int, AT_LEAST_1, _FITS_INT32]
CountOrZero = Annotated[int, Limit("at least 0", lambda x: x >= 0), _FITS_INT32]
Seed = Annotated[int, Limit("in [0, 2^63)", lambda x: 0 <= x < 2**63)]
Finite = Annotated[float, FINITE]
NotNegative = Annotated[float, Limit("a finite number of at least 0", lambda x: 0 <= x < math.inf)]
Positive = Annotated[float, Limit("a finite number above 0", lambda x: 0 < x < math.inf)]
Share = Annotated[float, Limit("a number above 0 and at most 1", lambda x: 0 < x <= 1)]
UnitInterval = Annotated[float, Limit("a number from 0 to 1", lambda x: 0 <= x <= 1)]
BetweenZeroAndOne = Annotated[float, Limit("above 0 and below 1", lambda x: 0 < x < 1)]
BelowOne = Annotated[float, Limit("a number of at least 0 and below 1", lambda x: 0 <= x < 1)]


@dataclass(frozen=True)
class Help:
    """What --help shows of a parameter; a field has a docstring below it instead."""

    text: str


@dataclass(frozen=True)
class Default:
    """A default that is worked out when the run starts.

    Args:
        text: as --help shows it.
        metavar: what --help shows in the value's place.
        chosen: returns the text for a run of these options by name.
    """

    text: str
    metavar: str = ""
    chosen: Callable[[Mapping[str, Any]], str] | None = None


@dataclass(frozen=True)
class Refusal:
    """Options that do not go together; it stands at the row of one of them, or of a method.

    Args:
        message: a format of the options by name. Those that it shows are the wrong ones.
        holds: whether these options by name are refused.
    """

    message: str
    holds: Callable[[Mapping[str, Any]], Any]

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise InputError where the options are refused."""
        if self.holds(options):
            shown = [name for _, name, *_ in Formatter().parse(self.message) if name]
            raise InputError(self.message.format_map(options), *shown)


def multiple_of(part: str, whole: str) -> Refusal:
    """Return the refusal of a `whole` that is not a multiple of `part`, both names of options."""
    return Refusal(
        f"{whole} must be a multiple of {part}, got {{{whole}}} and {{{part}}}",
        lambda options: options[whole] % options[part],
    )


@dataclass(frozen=True)
class Option:
    """An option; required if it has neither a default nor a `Default`."""

    name: str
    kind: Any  # its type, without notes and without `| None`
    default: Any
    help: str  # on one line
    notes: tuple[Any, ...]

    def of(self, kind: type[AnyNote]) -> list[AnyNote]:
        return [note for note in self.notes if isinstance(note, kind)]

    def find(self, kind: type[AnyNote]) -> AnyNote | None:
        return next(iter(self.of(kind)), None)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def limits(self) -> list[Limit]:
        return self.of(Limit) or [FINITE]

    @property
    def takes_several(self) -> bool:
        return get_origin(self.kind) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()


def make_option(name: str, hint: Any, default: Any, text: str = "") -> Option:
    notes = tuple(notes_of(hint))
    help_text = next((note.text for note in notes if isinstance(note, Help)), text)
    while get_origin(hint) is Annotated or get_origin(hint) in (Union, UnionType):  # of X | None
        hint = next(part for part in get_args(hint) if part is not NoneType)
    return Option(name, hint, default, " ".join(help_text.split()), notes)


def notes_of(hint: Any) -> Iterator[Any]:
    """Yield the notes of a type hint, also those of the X in `X | None`."""
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
    yield from (note for part in get_args(hint) for note in notes_of(part))


def nearest(word: str, words: Iterable[str]) -> str:
    begin = [x for x in words if x[:1] == word[:1]]
    close = difflib.get_close_matches(word, begin, n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else ""


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return a function's parameters, annotations evaluated if possible; [] without a signature."""
    for evaluated in (True, False):
        with contextlib.suppress(Exception):  # an annotation may be anything
            return list(inspect.signature(function, eval_str=evaluated).parameters.values())
    return []


def formula_of(function: Callable[..., Any]) -> str:
    """Return the docstring up to an empty line, as one line without a full stop."""
    return " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split()).rstrip(".")


def options_of(function: Callable[..., Any]) -> dict[str, Option]:
    """Return a function's keyword-only parameters that are numbers or one of several texts."""
    options = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        hint = float if parameter.annotation is parameter.empty else parameter.annotation
        plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        is_option = plain in (int, float) or get_origin(plain) is Literal
        if is_option and parameter.kind is parameter.KEYWORD_ONLY:
            default = None if parameter.default is parameter.empty else parameter.default
            options[name] = make_option(name, hint, default)
    return options


def check_options(
    owner: str, options: Mapping[str, Option], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all options of `owner`: given values and defaults; numbers are floats."""
    for name in given:
        if name not in options:
            takes = f"the options {', '.join(options)}" if options else "no options"
            advice = nearest(str(name), options)
            raise ValueError(f"{owner} takes {takes}, got {name!r:.80}{advice}")
    checked: dict[str, Any] = {}
    for name, option in options.items():
        value = given.get(name, option.default)
        if value is None and option.of(Default):
            continue
        if value is None:
            raise ValueError(f"{owner} needs {name}, {option.limits[0].wanted}")
        if option.choices:
            check_choice(f"{name} of {owner}", value, option.choices)
            checked[name] = value
        for limit in () if option.choices else option.limits:
            checked[name] = check_number(f"{name} of {owner}", value, limit.wanted, limit.holds)
    return checked
