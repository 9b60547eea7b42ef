"""The options of a loss or an estimator: keyword-only parameters of its function, whose annotations say what they may be."""

import contextlib
import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from maxrl_fast.algorithms.arguments import check_number


@dataclass(frozen=True)
class Limit:
    """The numbers that an option may be: in words, and as a condition."""

    wanted: str
    holds: Callable[[float], bool]


FINITE = Limit("a finite number", math.isfinite)
NotNegative = Annotated[float, Limit("a finite number of at least 0", lambda x: 0 <= x < math.inf)]
Positive = Annotated[float, Limit("a finite number above 0", lambda x: 0 < x < math.inf)]
Share = Annotated[float, Limit("a number above 0 and at most 1", lambda x: 0 < x <= 1)]
UnitInterval = Annotated[float, Limit("a number from 0 to 1", lambda x: 0 <= x <= 1)]


@dataclass(frozen=True)
class Option:
    """A number that a function takes. Without a default it must be given."""

    default: float | None
    limit: Limit


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function, with their annotations evaluated where that is possible; [] if Python cannot read
    its signature."""
    for evaluated in (True, False):
        with contextlib.suppress(Exception):  # an annotation may be anything
            return list(inspect.signature(function, eval_str=evaluated).parameters.values())
    return []


def formula_of(function: Callable[..., Any]) -> str:
    """Return the docstring up to an empty line, as one line without a full stop."""
    return " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split()).rstrip(".")


def options_of(function: Callable[..., Any]) -> dict[str, Option]:
    """Return the keyword-only parameters of a function that are numbers, by name."""
    options = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        hint = float if parameter.annotation is parameter.empty else parameter.annotation
        number = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if parameter.kind is parameter.KEYWORD_ONLY and number in (int, float):
            limits = [extra for extra in get_args(hint)[1:] if isinstance(extra, Limit)]
            default = None if parameter.default is parameter.empty else float(parameter.default)
            options[name] = Option(default, limits[0] if limits else FINITE)
    return options


def check_options(owner: str, options: Mapping[str, Option], given: Mapping[str, float]) -> dict[str, float]:
    """Return all options of `owner`, the given numbers and the defaults of the others.

    Raises:
        ValueError: if an option is unknown or missing, or if a number is out of its range.
    """
    for name in given:
        if name not in options:
            close = difflib.get_close_matches(str(name), options, n=1, cutoff=0.4)
            takes = f"the options {', '.join(options)}" if options else "no options"
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{owner} takes {takes}, got {name!r:.80}{hint}")
    checked = {}
    for name, option in options.items():
        value = given.get(name, option.default)
        if value is None:
            raise ValueError(f"{owner} needs {name}, {option.limit.wanted}")
        checked[name] = check_number(f"{name} of {owner}", value, option.limit.wanted, option.limit.holds)
    return checked
