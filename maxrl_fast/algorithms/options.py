"""Options: the fields of a dataclass, or the keyword-only parameters of a function.

    lr: Positive | None = None
    \"\"\"Peak learning rate. By default 3e-4; with --model 1e-6.\"\"\"

    def w_reinforce(g: Group, *, correct_weight: Annotated[float, Help("...")] = 0.1) -> Tensor:

A part that is chosen by name, your own too, has those of its signature: flags while it is chosen.
"""

import ast
import contextlib
import dataclasses
import inspect
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from maxrl_fast.errors import InputError, nearest
from maxrl_fast.runtime.loading import absolute_name


@dataclass(frozen=True)
class Limit:
    wanted: str
    holds: Callable[[Any], bool]


FINITE = Limit("a finite number", math.isfinite)
Count = Annotated[int, Limit("an integer from 1 to 2^31 - 1", lambda x: 1 <= x < 2**31)]
CountOrZero = Annotated[int, Limit("an integer from 0 to 2^31 - 1", lambda x: 0 <= x < 2**31)]
Seed = Annotated[int, Limit("an integer in [0, 2^63)", lambda x: 0 <= x < 2**63)]
NotNegative = Annotated[float, Limit("a finite number of at least 0", lambda x: 0 <= x < math.inf)]
Positive = Annotated[float, Limit("a finite number above 0", lambda x: 0 < x < math.inf)]
Share = Annotated[float, Limit("a number above 0 and at most 1", lambda x: 0 < x <= 1)]
UnitInterval = Annotated[float, Limit("a number from 0 to 1", lambda x: 0 <= x <= 1)]
BetweenZeroAndOne = Annotated[float, Limit("a number above 0 and below 1", lambda x: 0 < x < 1)]
BelowOne = Annotated[float, Limit("a number of at least 0 and below 1", lambda x: 0 <= x < 1)]
REQUIRED: Any = inspect.Parameter.empty
DERIVED: Any = None  # a default that resolving replaces
_WANTED: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false"}
_WANTED |= {str: "text without null bytes or half characters", Path: "a path", dict: "a JSON value"}
Code = Annotated[str, absolute_name]  # of the user's: FILE.py:NAME or package.module:NAME
Folder = Annotated[Path, Path]  # as it is given; other paths become absolute
# as other libraries call a choice
_SAME = {"bf16": "bfloat16", "fp32": "float32", "gpu": "cuda"}


def absolute_path(text: str) -> Path:
    return Path(text).absolute()


@dataclass(frozen=True)
class Help:
    """What --help shows of a parameter; a field has a docstring below it instead."""

    text: str


@dataclass(frozen=True)
class Option:
    name: str
    kind: Any  # int, float, bool, str, dict: a JSON value, or what converts a text
    default: Any  # None: derived when the run starts, or nothing; REQUIRED: must be given
    help: str = ""  # on one line
    choices: tuple[str, ...] = ()
    limit: Limit | None = None
    takes_several: bool = False
    own_name: str = ""  # in the signature of its part

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def shown_default(self) -> str:
        """As help shows it; "" where the help says it."""
        value = self.default
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, tuple):
            return " ".join(map(str, value))
        return "must be given" if value is REQUIRED else "" if value is None else str(value)

    @property
    def wanted(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return self.limit.wanted if self.limit else _WANTED.get(self.kind, _WANTED[str])

    def convert(self, value: Any, name: str) -> Any:
        """Return a value of Python, TOML or JSON as the option's, or the list of words of a flag,
        whose `name` begins with two dashes."""
        if self.takes_several:
            return tuple(self._one(x, name) for x in as_list(value))
        if self.name == "dry_run" and value in (True, []):
            return ""
        if name.startswith("--") and isinstance(value, list):
            words = value or [True] * (self.kind is bool)
            if len(words) != 1:
                got = " ".join(value) or "none"
                raise InputError(f"{name} must be one value, {self.wanted}, got {got:.80}")
            value = words[0]
        return self._one(value, name)

    def _one(self, value: Any, name: str) -> Any:
        if value is None:
            return None
        wanted, got = self.wanted, repr(value)
        try:
            found = self._converted(value)
            if self.limit is None or self.limit.holds(found):
                return found
            got = str(found)
        except (ValueError, TypeError, RecursionError):
            if callable(value):
                wanted = "a name: put the function into a file and give FILE.py:NAME"
            if isinstance(value, dict):
                wanted += "; keys stand at the top of a file, not in a table"
        meant = nearest(str(value), self.choices)
        raise InputError(f"{name} must be {wanted}, got {got:.80}{meant}")

    def _converted(self, value: Any) -> Any:
        if self.kind is dict:
            return json.loads(value if isinstance(value, str) else json.dumps(value))
        if self.kind is bool:
            return value if isinstance(value, bool) else ["false", "true"].index(value) > 0
        if isinstance(value, bool) or not isinstance(value, int | float | str | Path):
            raise ValueError
        text = _SAME.get(str(value), str(value)) if self.choices else str(value)
        # fsencode raises on half characters
        if (self.choices and text not in self.choices) or b"\0" in os.fsencode(text):
            raise ValueError
        return self.kind(text)


def as_list(value: Any) -> list[Any]:
    """Return several values that config.json has as one value or null, as a list."""
    return [*value] if isinstance(value, list | tuple) else [] if value is None else [value]


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return parameters, with evaluated annotations if possible; [] without a signature."""
    for evaluated in (True, False):
        with contextlib.suppress(Exception):  # an annotation may be anything
            return list(inspect.signature(function, eval_str=evaluated).parameters.values())
    return []


def notes_of(hint: Any) -> Iterator[Any]:
    """Yield the notes of a type hint, also those of the X in `X | None`."""
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
    yield from (note for part in get_args(hint) for note in notes_of(part))


def make_option(name: str, hint: Any, default: Any, text: str = "") -> Option:
    """Return the option of a type hint; anything but a number, text, path or choice is JSON."""
    notes, several, choices = [*notes_of(hint)], False, tuple[str, ...]()
    limit = next((note for note in notes if isinstance(note, Limit)), None)
    text = next((note.text for note in notes if isinstance(note, Help)), text)
    while origin := get_origin(hint):
        if origin in (Annotated, Union, UnionType):  # of X | None
            hint = next(part for part in get_args(hint) if part is not NoneType)
        elif origin is Literal:
            hint, choices = str, get_args(hint)
        elif origin in (tuple, list) and not several and get_args(hint)[0] in _WANTED:
            hint, several = get_args(hint)[0], True
        else:
            hint = dict
    kind = absolute_path if hint is Path else hint if hint in _WANTED else dict
    kind = next((note for note in notes if note in (absolute_name, Path)), kind)
    limit = limit or (FINITE if kind is float else None)
    return Option(name, kind, default, " ".join(text.split()), choices, limit, several)


@lru_cache
def options_of(part: Any, offered: tuple[str, ...] = ()) -> dict[str, Option]:
    """Return the options of a class, a dataclass among them, besides what it is `offered`; or of a
    function's keyword-only parameters that are numbers or one of several texts."""
    is_class, found = inspect.isclass(part), dict[str, Option]()
    helps = _helps(part) if dataclasses.is_dataclass(part) else {}
    signature = () if is_class else inspect.signature(part, eval_str=True).parameters.values()
    for x in parameters_of(part) if is_class else signature:
        is_own = x.kind is x.KEYWORD_ONLY or (is_class and x.kind is x.POSITIONAL_OR_KEYWORD)
        untyped = type(x.default) if is_class else float
        hint = untyped if x.annotation is x.empty else x.annotation
        option = make_option(x.name, hint, x.default, helps.get(x.name, ""))
        is_read = is_class or option.kind in (int, float) or option.choices
        if is_own and is_read and x.name not in offered:
            found[x.name] = option
    return found


def _helps(cls: Any) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and of those it derives from."""
    helps: dict[str, str] = {}
    for base in cls.__mro__[-2::-1]:
        with contextlib.suppress(OSError, TypeError, SyntaxError):  # without a source
            (definition,) = ast.parse(inspect.cleandoc(inspect.getsource(base))).body
            for field, below in itertools.pairwise(getattr(definition, "body", ())):
                text = getattr(getattr(below, "value", None), "value", None)
                if isinstance(field, ast.AnnAssign) and isinstance(text, str):
                    helps[ast.unparse(field.target)] = text
    return helps
