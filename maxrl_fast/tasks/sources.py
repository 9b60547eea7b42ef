"""Where the lines of a data set come from: files and the Hugging Face hub."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from maxrl_fast.errors import InputError
from maxrl_fast.tasks.dataset_specs import NAMED_SETS, UNNAMED, DatasetSpec, NamedSet
from maxrl_fast.tasks.jsonl import Line, read_hub, read_lines

TEST_SHARE = 10  # about one prompt in this many is held out if no test prompts are given
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

    def __str__(self) -> str:
        return self.place.name if isinstance(self.place, Path) else self.place

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
    held_out += [(source, source.read(TEST)[0]) for source in test]
    if not held_out:
        whole, parts = parts, []
        for source, lines in whole:
            parts.append((source, [x for x in lines if not _is_test(x[1][source.key])]))
            test_lines = [x for x in lines if _is_test(x[1][source.key])]
            held_out.append((replace(source, number=None), test_lines))
    names = [x.name for x, _ in held_out] if held_out[1:] else [TEST]
    if len({*names}) < len(names):
        raise InputError(f"held-out sets must have different names, got {', '.join(names)}")
    parts = [(x, lines * (x.number or 1)) for x, lines in parts]
    return parts, dict(zip(names, held_out, strict=True))


def _is_test(prompt: object) -> bool:
    return zlib.crc32(json.dumps(prompt).encode()) % TEST_SHARE == 0


def _number(text: str) -> tuple[str, int | None]:
    name, _, number = text.rpartition("=")
    return (name, int(number)) if name and number.isdecimal() and int(number) else (text, None)


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
