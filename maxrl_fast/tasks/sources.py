"""Where the lines of a data set come from: files and the Hugging Face hub."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from maxrl_fast.errors import InputError
from maxrl_fast.tasks.dataset_specs import NAMED_SETS, UNNAMED, NamedSet, look_up
from maxrl_fast.tasks.jsonl import Line, read_hub, read_lines

TEST_SHARE = 10  # about one prompt in this many is held out if no test prompts are given
TEST = "test"  # the name of a held-out set without others


@dataclass(frozen=True)
class Part:
    """The lines of a file, or of a split of a data set of the hub."""

    shown: str  # in messages
    name: str  # of a held-out set
    key: str  # of its prompts
    number: int | None  # =INT of its option
    lines: list[Line]
    form: NamedSet = UNNAMED


def file_part(given: Path, key: str, option: str) -> Part:
    text, number = _number(str(given))
    path = Path(text)
    is_split = path.stem in ("train", TEST)  # of a data set that has the folder's name
    name = f"{path.absolute().parent.name}-{path.stem}" if is_split else path.stem
    return Part(path.name, name, key, number, read_lines(path, key, option))


def hub_parts(text: str, key: str, *splits: str) -> list[Part]:
    """Return NAME[:CONFIG][@SPLIT] by its first split, and others if they exist."""
    text, number = _number(text)
    name, _, split = text.partition("@")
    form = NAMED_SETS.get(name, UNNAMED)
    place, _, own = (form.hub or name).partition("@")
    key = form.prompt_key or key
    found = read_hub(place, [split or own or splits[0], *splits[1:]], key, form.as_line)
    return [Part(place, text.replace("/", "-"), key, number, lines, form) for lines in found]


def _number(text: str) -> tuple[str, int | None]:
    name, _, number = text.rpartition("=")
    return (name, int(number)) if name and number.isdecimal() and int(number) else (text, None)


def divided(part: Part) -> tuple[Part, Part]:
    """Return the lines to train on, and a tenth, by a CRC of the prompt, to hold out."""
    lines: tuple[list[Line], list[Line]] = [], []
    for place, line in part.lines:
        crc = zlib.crc32(json.dumps(line[part.key]).encode())
        lines[crc % TEST_SHARE == 0].append((place, line))
    return replace(part, lines=lines[0]), replace(part, lines=lines[1], number=None)


def filtered(where: Sequence[str], parts: list[Part]) -> list[Part]:
    """Return the lines with a value of --where in each of its columns. A set that does not have the
    column keeps all its lines."""
    for column in dict.fromkeys(text.partition("=")[0] for text in where):
        texts = [text for text in where if text.partition("=")[0] == column]
        told, is_known = " or ".join(texts), False
        for i, part in enumerate(parts):
            own = [f"{column}={_text(look_up(line, column))}" for _, line in part.lines]
            if {*own} == {f"{column}="}:
                continue
            left, is_known = [x for x, y in zip(part.lines, own, strict=True) if y in texts], True
            if not left:
                raise InputError(
                    f"--where {told} must leave lines of {part.shown}, got none of "
                    f"{', '.join(sorted({*own})):.200}"
                )
            shown = f"{part.shown} ({len(left)} of {len(own)} lines with {told})"
            parts[i] = replace(part, lines=left, shown=shown)
        if not is_known:
            raise InputError(f"--where {told} must name a column of a training set, got another")
    return parts


def _text(value: object) -> str:
    """Return a value of a column as --where gives it, "" for none."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)
