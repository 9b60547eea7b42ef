"""Where the lines of a data set come from: files and the Hugging Face hub."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from maxrl_fast.errors import InputError
from maxrl_fast.tasks.dataset_specs import (
    NAMED_SETS,
    UNNAMED,
    DatasetSpec,
    NamedSet,
    keys_of,
    look_up,
)
from maxrl_fast.tasks.jsonl import Line, read_hub, read_lines

TEST_SHARE = 10  # about one prompt in this many is held out if no test prompts are given
MOST_LINES = 10_000_000  # of a file in an epoch, or samples, by =INT
TEST = "test"  # the name of a held-out set without others


@dataclass(frozen=True)
class Source:
    """A file, or NAME[:CONFIG] of the hub. number: =INT of its option."""

    place: Path | str
    name: str
    key: str  # of its prompts
    number: int | None
    form: NamedSet = UNNAMED
    split: str = ""  # "": train or test, by its use
    kept: str = ""  # what --where has left of it, for messages

    def __str__(self) -> str:
        return (self.place.name if isinstance(self.place, Path) else self.place) + self.kept

    def read(self, *splits: str) -> list[list[Line]]:
        """Return the lines of the first split, and of others if they exist."""
        if isinstance(self.place, Path):
            option = "--test-data" if splits[0] == TEST else "--data"
            return [read_lines(self.place, self.key, option)]
        wanted = [self.split or splits[0], *splits[1:]]
        return read_hub(self.place, wanted, self.key, self.form.as_line)


Part = tuple[Source, list[Line]]


def read_sources(
    spec: DatasetSpec,
    key: str,
    data: Sequence[Path],
    hub: Sequence[str],
    test_data: Sequence[Path],
    test_hub: Sequence[str],
    where: Sequence[str],
    test_only: bool,
) -> tuple[list[Part], dict[str, Part]]:
    """Return training and held-out lines: given, or the task's, or of test splits, or a tenth."""
    if not data and not hub and spec.hub and spec.test_hub:
        hub, test_hub = [spec.hub], test_hub if test_hub or test_data else [spec.test_hub]
    train, test = (
        [*(_file(x, key) for x in files), *(_of_hub(x, key) for x in names)]
        for files, names in ((data, hub), (test_data, test_hub))
    )
    parts: list[Part] = []
    held_out: list[Part] = []
    for source in [] if test and test_only else train:
        lines, *own = source.read("train", *[] if test else [TEST])
        parts.append((source, lines))
        held_out += [(replace(source, number=None), lines) for lines in own]
    parts = _having(where, parts) if parts else parts
    held_out += [(source, source.read(TEST)[0]) for source in test]
    if not held_out:
        for i, (source, lines) in enumerate(parts):
            left = [x for x in lines if _is_test(x[1][source.key])]
            held_out.append((replace(source, number=None, kept=""), left))
            parts[i] = source, [x for x in lines if not _is_test(x[1][source.key])]
    # A set has the name of no split.
    names = [x.name + "-set" * (x.name in ("train", TEST)) for x, _ in held_out]
    names = names if held_out[1:] else [TEST]
    if len({*names}) < len(names):
        raise InputError(f"held-out sets must have different names, got {', '.join(names)}")
    for source, lines in (*parts, *held_out):
        if (source.number or 0) * len(lines) > MOST_LINES:
            wanted = f"{source}=INT must give at most {MOST_LINES:,} lines or samples"
            raise InputError(f"{wanted}, got {source.number:,} x {len(lines):,}")
    return parts, dict(zip(names, held_out, strict=True))


def _having(where: Sequence[str], parts: list[Part]) -> list[Part]:
    """Return the lines with a value of --where in each of its columns. A set that does not have the
    column keeps all its lines."""
    wanted: dict[str, list[str]] = {}
    for text in where:
        column, _, value = text.partition("=")
        wanted.setdefault(column, []).append(value)
    for column, values in wanted.items():
        shown, is_known = " or ".join(f"{column}={x}" for x in values), False
        for i, (source, lines) in enumerate(parts):
            own = [_text(look_up(line, column)) for _, line in lines]
            if not any(own):
                continue
            left, is_known = [x for x, y in zip(lines, own, strict=True) if y in values], True
            if not left:
                known = ", ".join(sorted({x for x in own if x}))
                raise InputError(
                    f"--where {shown} must leave lines of {source}, got none; its values are "
                    f"{known:.200}"
                )
            kept = f"{source.kept} ({len(left)} of {len(lines)} lines with {shown})"
            parts[i] = replace(source, kept=kept), left
        if not is_known:
            raise InputError(
                f"--where {shown} must name a column of a training set; a line of {source} does "
                f"not have it: {keys_of(lines[0][1] if lines else {})}"
            )
    return parts


def _text(value: object) -> str:
    """Return a value of a column as --where gives it, "" for none."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def _is_test(prompt: object) -> bool:
    return zlib.crc32(json.dumps(prompt).encode()) % TEST_SHARE == 0


def _number(text: str) -> tuple[str, int | None]:
    name, _, number = text.rpartition("=")
    count = int(number[:18]) if name and number.isdecimal() else 0  # more is refused anyway
    return (name, count) if count else (text, None)


def _file(path: Path, key: str) -> Source:
    text, number = _number(str(path))
    path = Path(text)
    is_split = path.stem in ("train", TEST)  # of a data set that has the folder's name
    return Source(path, path.absolute().parent.name if is_split else path.stem, key, number)


def _of_hub(text: str, key: str) -> Source:
    text, number = _number(text)
    name, _, split = text.partition("@")
    form = NAMED_SETS.get(name, UNNAMED)
    place, _, own = (form.hub or name).partition("@")
    key = form.prompt_key or key
    return Source(place, text.replace("/", "-"), key, number, form, split or own)
