"""The lines of data sets: JSON Lines, and with the library `datasets` Parquet files and the Hugging
Face hub. The data is untrusted: an error names the invalid line."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError, printable
from maxrl_fast.model.tokenizer import REASONING, Message, Prompt
from maxrl_fast.runtime.files import check_regular
from maxrl_fast.tasks.dataset_specs import NAMED_SETS, UNNAMED, NamedSet, keys_of, look_up

ROLES = ("system", "user", "assistant", "tool", "developer")

Line = tuple[str, dict[str, Any]]  # its place, for error messages, and its JSON object


def read_lines(path: Path, prompt_key: str, option: str = "--data") -> list[Line]:
    """Return the lines of a file, or the rows of a name in .parquet, each with a prompt."""
    return [_checked(x, place, prompt_key) for place, x in _read_objects(path, option)]


def read_demonstrations(path: Path, prompt_key: str) -> list[tuple[str, Any, str | Message]]:
    """Return place, prompt and response of each line of --sft-data. A line has a prompt and text at
    "response", or messages at `prompt_key` or "messages" of which the last is the response."""
    found = []
    for place, fields in _read_objects(path, "--sft-data"):
        is_chat = prompt_key not in fields and "messages" in fields
        prompt = _prompt_of(fields, place, "messages" if is_chat else prompt_key)
        said: Any = fields.get("response")
        response: Any = said
        if said is None and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            *prompt, response = prompt
            said = (response["content"] or response.get(REASONING[0])) if prompt else None
        if not isinstance(said, str) or not said:
            raise InputError(
                f"{place}: a demonstration must have text at 'response', or messages of which the "
                f"last is the assistant's, got {said!r:.80}; {keys_of(fields)}"
            )
        check_utf8(said, f"{place}: response")
        found.append((place, prompt, response))
    return found


def _read_objects(path: Path, option: str) -> list[Line]:
    shown = printable(path)
    try:
        check_regular(path)
        if path.suffix == ".parquet":
            return _rows(_load(shown, "parquet", data_files=str(path))["train"], f"{shown}, row")
        with open(path, "rb") as file:
            numbered = [(f"{shown}, line {i}", x) for i, x in enumerate(file, 1) if x.strip()]
    except OSError as error:
        wanted = f"{option} must be a readable JSON Lines or Parquet file"
        raise InputError(f"{wanted}, got {shown}: {error}") from error
    if not numbered:
        raise InputError(f"{shown} must have a JSON object on each line, got none")
    return [(place, _object(line, place)) for place, line in numbered]


def _object(line: bytes, place: str) -> dict[str, Any]:
    """Return the object of a line; NaN and infinite numbers become null."""
    try:
        fields = json.loads(line, parse_constant=lambda _: None)
        if not isinstance(fields, dict):
            raise ValueError("it is no object")
        return fields
    # invalid JSON, invalid UTF-8, an integer of too many digits, or too deep
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{place}: it must be a JSON object in UTF-8, got {line!r:.60}: {error}; "
            "pandas.read_csv or read_json(FILE).to_parquet(NEW) converts a CSV file or an array"
        ) from error


def _load(shown: str, kind: str, *config: str | None, **files: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"reading {shown} needs datasets: pip install datasets, or give JSON Lines with --data "
            f"FILE ({error})"
        ) from error
    try:
        return datasets.load_dataset(kind, *config, **files)
    except Exception as error:  # errors of the network, the hub, or the parsers of its files
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
        advice = "" if files else "; --data FILE and --test-data FILE read a local copy"
        raise InputError(f"cannot read {shown}: {cause}{advice}") from error


def _rows(split: Any, place: str) -> list[Line]:
    """Return rows as lines of a file have them: bytes are null, and what else JSON lacks text."""

    def plain(value: object) -> str | None:
        return None if isinstance(value, bytes) else str(value)

    texts = (json.dumps(row, default=plain) for row in split)
    return [(x := f"{place} {i}", _object(row.encode(), x)) for i, row in enumerate(texts, 1)]


def _checked(fields: dict[str, Any], place: str, prompt_key: str) -> Line:
    prompt = _prompt_of(fields, place, prompt_key)
    if taken := fields.keys() & {"response", "response_raw"}:
        what = "is reserved for the response that is scored; rename it"
        raise InputError(f"{place}: the key {min(taken)!r} {what}")
    return place, {**fields, prompt_key: prompt}


def _prompt_of(fields: dict[str, Any], place: str, key: str) -> Any:
    if key not in fields:
        wanted = f"the line must have a prompt at {key!r} (--prompt-key)"
        raise InputError(f"{place}: {wanted}, but {keys_of(fields)}")
    return read_prompt(fields[key], f"{place}: {key}")


def read_prompt(prompt: Any, what: str) -> Prompt:
    """Return text, or messages as chat templates take them: a value that is null is absent, and a
    list of text parts is their text. `what` it is, for error messages."""
    if isinstance(prompt, str) and prompt:
        check_utf8(prompt, what)
        return prompt
    if not isinstance(prompt, (list, tuple)) or not prompt:
        wanted = "text or a list of messages, not empty"
        raise InputError(f"{what} must be {wanted}, got {prompt!r:.80}")
    return [_message(message, what) for message in prompt]


def _message(given: Any, what: str) -> Message:
    fields = given if isinstance(given, Mapping) else {}
    # Arrow gives every message the keys of all
    message = {
        REASONING[0] if key in REASONING else key: x
        for key, x in fields.items()
        if x is not None and (key == "content" or x != [])
    }
    if isinstance(parts := message.get("content"), (list, tuple)):
        texts = [x.get("text") if isinstance(x, Mapping) else None for x in parts]
        is_text = all(isinstance(x, str) for x in texts)
        message["content"] = "".join(map(str, texts)) if is_text else None
    others = message.keys() - {"role", "content"}
    is_known = len(message) == len(others) + 2 and message["role"] in ROLES
    if message.get("role") == "assistant":
        others -= {REASONING[0]}
    if others or not is_known or not all(isinstance(x, str) for x in message.values()):
        raise InputError(
            f"{what} must have messages with a role in {', '.join(ROLES)} and a content, of the "
            f"assistant also with {REASONING[0]}, each as text, got {given!r:.200}"
        )
    for value in message.values():
        check_utf8(value, what)
    return message


def check_utf8(text: Any, what: str) -> None:
    try:
        text.encode()
    except (AttributeError, UnicodeEncodeError) as error:  # no text, or half a surrogate pair
        raise InputError(f"{what} must be text in UTF-8: {error}") from error


TEST_SHARE = 10  # about one prompt in this many is held out if no test prompts are given
TEST = "test"  # the name of a held-out set without others


@dataclass(frozen=True)
class Part:
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
    """Return the rows of NAME[:CONFIG][@SPLIT] of the hub, or of the library's cache, by its first
    split, and by others if it has them."""
    text, number = _number(text)
    name, _, split = text.partition("@")
    form = NAMED_SETS.get(name, UNNAMED)
    place, _, own = (form.hub or name).partition("@")
    key, first = form.prompt_key or key, split or own or splits[0]
    repository, _, config = place.partition(":")
    found, parts = _load(place, repository, config or None), list[Part]()
    if first not in found:
        raise InputError(f"{place} has no split {first}, but {', '.join(found)} (NAME@SPLIT)")
    for split in [x for x in dict.fromkeys([first, *splits[1:]]) if x in found]:
        lines = list[Line]()
        for at, row in _rows(found[split], f"{place}, {split} row"):
            try:
                line = form.as_line(row)
            except InputError as error:
                raise InputError(f"{at}: {error}; {keys_of(row)}") from error
            lines.append(_checked(line, at, key))
        parts.append(Part(place, text.replace("/", "-"), key, number, lines, form))
    return parts


def _number(text: str) -> tuple[str, int | None]:
    name, _, number = text.rpartition("=")
    return (name, int(number)) if name and number.isdecimal() and int(number) else (text, None)


def divided(part: Part) -> tuple[Part, Part]:
    """Return the lines to train on, and a tenth, by a CRC of the prompt, to hold out."""
    train, test = list[Line](), list[Line]()
    for x in part.lines:
        crc = zlib.crc32(json.dumps(x[1][part.key]).encode())
        (train if crc % TEST_SHARE else test).append(x)
    return replace(part, lines=train), replace(part, lines=test, number=None)


def filtered(where: Sequence[str], parts: list[Part]) -> list[Part]:
    """Return the lines with a value of --where in each of its columns. A set without the column
    keeps all its lines."""
    for column in dict.fromkeys(text.partition("=")[0] for text in where):
        texts = [text for text in where if text.startswith(f"{column}=")]
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
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)
