"""Where the lines of a data set come from: files and the Hugging Face hub."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from maxrl_fast.errors import InputError
from maxrl_fast.tasks.dataset_specs import NAMED_SETS, UNNAMED, DatasetSpec, NamedSet, look_up
from maxrl_fast.tasks.jsonl import Line, read_hub, read_lines

TEST_SHARE = 10  # about one prompt in this many is held out if no test prompts are given
MOST_LINES = 10_000_000  # of a file in an epoch, or samples, by =INT
TEST = "test"  # the name of a held-out set without others


@dataclass(frozen=True)
class Part:
    """The lines of a file, or of a split of a data set of the hub. number: =INT of its option."""

    shown: str  # in messages
    name: str  # of a held-out set
    key: str  # of its prompts
    number: int | None
    lines: list[Line]
    form: NamedSet = UNNAMED


def read_sources(
    spec: DatasetSpec,
    key: str,
    data: Sequence[Path],
    hub: Sequence[str],
    test_data: Sequence[Path],
    test_hub: Sequence[str],
    where: Sequence[str],
    test_only: bool,
) -> tuple[list[Part], list[Part]]:
    """Return training and held-out lines: given, or the task's, or of test splits, or a tenth."""
    if not data and not hub and spec.hub and spec.test_hub:
        hub, test_hub = (spec.hub,), test_hub if test_hub or test_data else (spec.test_hub,)
    held_out = [_of_file(x, key, "--test-data") for x in test_data]
    held_out += [part for x in test_hub for part in _of_hub(x, key, TEST)]
    train, splits = list[Part](), ["train"] if held_out else ["train", TEST]
    if not (held_out and test_only):
        train = [_of_file(x, key, "--data") for x in data]
        for x in hub:
            first, *own = _of_hub(x, key, *splits)
            train.append(first)
            held_out += [replace(part, number=None) for part in own]
        train = _filtered(where, train)
    if not held_out:
        for i, part in enumerate(train):
            left = [x for x in part.lines if not _is_test(x[1][part.key])]
            test = [x for x in part.lines if _is_test(x[1][part.key])]
            train[i] = replace(part, lines=left)
            held_out.append(replace(part, lines=test, number=None))
    if not held_out[1:]:
        held_out = [replace(part, name=TEST) for part in held_out]
    names = [part.name for part in held_out]
    if len({*names}) < len(names):
        raise InputError(f"held-out sets must have different names, got {', '.join(names)}")
    for part in (*train, *held_out):
        if (part.number or 0) * len(part.lines) > MOST_LINES:
            wanted = f"{part.shown}=INT must give at most {MOST_LINES:,} lines or samples"
            raise InputError(f"{wanted}, got {part.number:,} x {len(part.lines):,}")
    return train, held_out


def _filtered(where: Sequence[str], parts: list[Part]) -> list[Part]:
    """Return the lines with a value of --where in each of its columns. A set that does not have the
    column keeps all its lines."""
    for column in dict.fromkeys(text.partition("=")[0] for text in where):
        wanted = [x for x in where if x.partition("=")[0] == column]
        values, told, is_known = {x.partition("=")[2] for x in wanted}, " or ".join(wanted), False
        for i, part in enumerate(parts):
            own = [_text(look_up(line, column)) for _, line in part.lines]
            if not any(own):
                continue
            left, is_known = [x for x, y in zip(part.lines, own, strict=True) if y in values], True
            if not left:
                raise InputError(
                    f"--where {told} must leave lines of {part.shown}, got none; its values are "
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


def _is_test(prompt: object) -> bool:
    return zlib.crc32(json.dumps(prompt).encode()) % TEST_SHARE == 0


def _number(text: str) -> tuple[str, int | None]:
    name, _, number = text.rpartition("=")
    return (name, int(number)) if name and number.isdecimal() and int(number) else (text, None)


def _of_file(given: Path, key: str, option: str) -> Part:
    text, number = _number(str(given))
    path = Path(text)
    is_split = path.stem in ("train", TEST)  # of a data set that has the folder's name
    name = f"{path.absolute().parent.name}-{path.stem}" if is_split else path.stem
    return Part(path.name, name, key, number, read_lines(path, key, option))


def _of_hub(text: str, key: str, *splits: str) -> list[Part]:
    """Return NAME[:CONFIG][@SPLIT] by its first split, and others if they exist."""
    text, number = _number(text)
    name, _, split = text.partition("@")
    form = NAMED_SETS.get(name, UNNAMED)
    place, _, own = (form.hub or name).partition("@")
    key = form.prompt_key or key
    wanted = [split or own or splits[0], *splits[1:]]
    shown = place, text.replace("/", "-"), key, number
    return [Part(*shown, lines, form) for lines in read_hub(place, wanted, key, form.as_line)]
