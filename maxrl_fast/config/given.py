"""Where options are given: flags, a TOML file, the config.json of a run, or Python; and the one
conversion of their values.
"""

import difflib
import json
import os
import pwd
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from maxrl_fast.algorithms.options import Aka, Option, nearest
from maxrl_fast.config.metadata import Note, Resume, as_list, names_with, options_of
from maxrl_fast.config.options import Config, objective_table
from maxrl_fast.errors import InputError
from maxrl_fast.runtime.files import JSON_BYTES, check_regular, printable
from maxrl_fast.runtime.loading import is_code

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # the same code, before it came with Python

OPTIONS = options_of(Config)
ANY_OBJECTIVES = {name: next(iter(rows.values())) for name, rows in objective_table().items()}
OTHER_NAMES = {
    name: f"{option.name} {other.value}".strip()
    for option in (OPTIONS | ANY_OBJECTIVES).values()
    for other in option.of(Aka)
    for name in other.names
}
SAME = {"bf16": "bfloat16", "fp32": "float32", "gpu": "cuda"}  # as others call a choice
_TEXT = "text without null bytes or half characters"


@dataclass(frozen=True)
class Given:
    """The value of an option as a user gives it.

    Args:
        value: the text of a flag, or a value of TOML, JSON or Python.
        name: the option as the user writes it: "--lr" or "lr".
        place: "FILE, line N: " or nothing.
    """

    value: Any
    name: str
    place: str = ""


def convert(option: Option, given: Given) -> Any:
    """Return the value in the type of its option.

    Raises:
        InputError: where it has another type.
    """
    value = given.value
    # a flag that stands alone, or no flag
    if Note.OPTIONAL_VALUE in option.notes and isinstance(value, bool):
        return "" if value else None
    if option.takes_several:
        one = replace(option, kind=get_args(option.kind)[0])
        return tuple(convert(one, replace(given, value=item)) for item in as_list(value))
    if value == "None" and option.default is None:
        return None
    try:
        return _convert(option.kind, value)
    except ValueError:
        wanted = {int: "an integer", float: "a number", bool: "true or false"}.get(
            option.kind, _TEXT
        )
        wanted = f"one of {', '.join(option.choices)}" if option.choices else wanted
        meant = nearest(str(value), option.choices)
        raise InputError(
            f"{given.place}{given.name} must be {wanted}, got {value!r:.80}{meant}"
        ) from None


def _convert(kind: Any, value: Any) -> Any:
    """Return a value as a `kind`, through its text; raise ValueError where it has another type."""
    if kind is bool and isinstance(value, bool):
        return value
    if kind is bool or isinstance(value, bool) or not isinstance(value, (int, float, str, Path)):
        raise ValueError
    text = str(value)
    if kind in (int, float):
        return kind(text)
    text = SAME.get(text, text) if SAME.get(text) in get_args(kind) else text
    # which raises on half characters
    if text not in get_args(kind) if get_args(kind) else b"\0" in os.fsencode(text):
        raise ValueError
    return kind(text) if kind is Path else text


def read_flags(
    arguments: Sequence[str], options: Mapping[str, Option]
) -> tuple[dict[str, Given], list[str]]:
    """Return what flags give by name of the option, and the words that belong to no flag. The last
    of equal flags wins.

    Raises:
        InputError: where a flag has too few or too many values.
    """
    given: dict[str, Given] = {}
    others, words = [], list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            others.append(word)
            continue
        flag, equals, text = word.partition("=")
        name = flag[2:].replace("-", "_")
        positive = options.get(name.removeprefix("no_"))
        if positive is not None and positive.kind is bool:
            if equals:
                raise InputError(f"{flag} must be given without a value, got {text!r:.80}")
            given[positive.name] = Given(name == positive.name, flag)
            continue
        option = options.get(name)
        takes_several = option is not None and option.takes_several
        values = [text] if equals else []
        while (
            not equals and words and not words[0].startswith("--") and (takes_several or not values)
        ):
            values.append(words.pop(0))
        if (
            option is not None
            and not values
            and not takes_several
            and Note.OPTIONAL_VALUE not in option.notes
        ):
            raise InputError(f"{flag} needs a value")
        given[name] = Given(values if takes_several else values[0] if values else "", flag)
    return given, others


def read_toml(path: Path) -> dict[str, Given]:
    """Return the options in a TOML file by name.

    Raises:
        InputError: where it cannot be read, is not TOML, or has a table.
    """
    try:
        check_regular(path, JSON_BYTES)
        text = path.read_text()
        options = tomllib.loads(text)
    # of TOML, of UTF-8, of a number of too many digits
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"--config must be a readable TOML file, got {path}: {error}") from error
    given = {}
    for key, value in options.items():
        place = _place(path, text, key)
        if isinstance(value, dict) or (
            isinstance(value, list) and any(isinstance(item, dict) for item in value)
        ):
            there = "write its keys there"
            if key in OPTIONS and Note.JSON in OPTIONS[key].notes:
                there = "give it as a string of JSON"
            elif key in OPTIONS and OPTIONS[key].takes_several:
                there = 'give a list such as ["kl=0"]'
            wanted = "options must stand at the top of the file, without tables"
            raise InputError(f"{place}: {wanted}, got the table [{key:.80}]; {there}")
        if key in OPTIONS and Note.NOT_IN_A_FILE in OPTIONS[key].notes:
            raise InputError(f"{place}: {key} is only a flag")
        given[key] = Given(value, key, f"{place}: ")
    return given


def _place(path: Path, text: str, key: str) -> str:
    """Return "FILE, line N" for a key."""
    lines = text.splitlines()
    statement = re.compile(rf"\s*\[*\s*[\"']?{re.escape(key)}[\"']?\s*[].=]")
    for i, line in enumerate(lines):
        if statement.match(line) and _is_whole("\n".join(lines[:i])):
            return f"{path}, line {i + 1}"
    return str(path)  # a key that is written with escapes


def _is_whole(text: str) -> bool:
    """Return whether this beginning of a file ends with a statement, and not within a string or an
    array.
    """
    try:
        tomllib.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def read_run(out: Path, overriding: Mapping[str, Given]) -> dict[str, Given]:
    """Return the options in the config.json of a run that have a value, without those that say how
    it was started.

    A folder of another user prints a warning with the code that it names. Nothing is imported here.

    Raises:
        InputError: where it cannot be read.
    """
    file = out / "config.json"
    try:
        check_regular(file, JSON_BYTES)
        options = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        what = "has no config.json" if out.exists() else "does not exist"
        raise InputError(f"--resume must be the folder of a run, got {out}, which {what}") from None
    except OSError as error:
        raise InputError(f"--resume must be the folder of a run, got {out}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{file} must be JSON, got {error}; restore it, or use another --out"
        ) from error
    if not isinstance(options, dict):
        raise InputError(f"{file} must hold a JSON object, got {options!r:.80}")
    left_out = {"versions", "command", *names_with(Config, Resume.START)}
    given = {
        key: Given(value, key, f"{file}: ")
        for key, value in options.items()
        if key not in left_out and value is not None
    }
    if sentence := _foreign_code(
        out, {name: x.value for name, x in {**given, **overriding}.items()}
    ):
        print(f"warning: {sentence}", file=sys.stderr, flush=True)
    return given


def _foreign_code(out: Path, values: Mapping[str, Any]) -> str:
    """Return a sentence on the code that a run runs if its folder is another user's; "" if the
    folder is the user's own.
    """
    owners = sorted({path.stat().st_uid for path in (out, out / "config.json")} - {os.getuid()})
    if not owners:
        return ""
    code = [
        f"{option.name} {printable(value)}"
        for option in OPTIONS.values()
        for value in as_list(values.get(option.name))
        if Note.NAMES_CODE in option.notes
        or (Note.MAY_NAME_CODE in option.notes and is_code(str(value)))
    ]
    whose = " and ".join(map(_user, owners))
    return (
        f"{printable(out)} belongs to {whose}, and what its options name runs with your rights: "
        f"{', '.join(code) or 'no code'}"
    )


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name} (uid {number})"
    except KeyError:  # a user of another machine
        return f"uid {number}"


def meant_by(name: str, known: Mapping[str, Option]) -> str | None:
    """Return the option among `known` that is probably meant by a flag or key of this name, perhaps
    with a value, or None.

    The name may have the prefixes that other libraries give it (trainer.total_epochs).
    `maxrl_fast.evaluate` has other names for some options of the trainer.
    """
    renamed = {
        other: option.name
        for option in known.values()
        for aka in option.of(Aka)
        for other in aka.names
    }
    parts = name.lower().replace("-", "_").split(".")
    for word in ("_".join(parts), "_".join(parts[-2:]), parts[-1]):
        meant = word if word in known else OTHER_NAMES.get(word, "")
        for option in (meant, renamed.get(meant, "")):
            if option.partition(" ")[0] in known:
                return option
    # below are words that mean others
    close = difflib.get_close_matches("_".join(parts), list(known), n=1, cutoff=0.73)
    return close[0] if close else None


def hint(name: str, known: Mapping[str, Option], is_flag: bool = True) -> str:
    """Return "; did you mean --...?" for an option that does not exist or is not used, or
    nothing.
    """
    option, _, value = (meant_by(name, known) or "").partition(" ")
    meant = f"--{option.replace('_', '-')} {value}".strip() if is_flag else option
    return f"; did you mean {meant}?" if option else ""


def refuse_unknown(
    given: Mapping[str, Given], words: Sequence[str], known: Mapping[str, Option]
) -> None:
    """Raise InputError naming the first option or word that is not known, with the one that was
    probably meant.
    """
    for name, x in given.items():
        if name not in known:
            is_flag = x.name.startswith("--")
            found = hint(name, known, is_flag) or hint(name.removeprefix("no_"), known, is_flag)
            found = found or "; --help lists the options" * is_flag
            raise InputError(f"{x.place}unknown option {x.name:.80}{found}")
    for word in words:
        name = word.partition("=")[0]
        raise InputError(
            f"unknown option {name:.80}: options begin with two "
            f"dashes{hint(name.lstrip('-+'), known)}"
        )
