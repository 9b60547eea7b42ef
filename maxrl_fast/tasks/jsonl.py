"""Read prompts from JSON Lines, Parquet or the Hugging Face hub. The data is untrusted: an error
names the invalid line.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from maxrl_fast.errors import InputError
from maxrl_fast.model.hub import why_unreachable
from maxrl_fast.model.tokenizer import REASONING, Message, Prompt
from maxrl_fast.runtime.files import check_regular, printable
from maxrl_fast.tasks.dataset_specs import AsLine, keys_of

ROLES = ("system", "user", "assistant", "tool", "developer")
CONVERT = "pandas.read_csv or read_json(FILE).to_parquet(NEW) converts a CSV file or an array"

Line = tuple[str, dict[str, Any]]  # its place, for error messages, and its JSON object
# its place, its prompt (text or messages) and its response (text or the assistant's message)
Demonstration = tuple[str, Any, str | Message]


def read_lines(path: Path, prompt_key: str, option: str = "--data") -> list[Line]:
    """Return the JSON object of each line of a file, or of each row if its name ends in .parquet,
    with its place. Each has a prompt: text, or chat messages {"role": ..., "content": ...}."""
    return [(place, _checked(x, place, prompt_key)) for place, x in _read_objects(path, option)]


def read_demonstrations(path: Path, prompt_key: str) -> list[Demonstration]:
    """Return the demonstrations in a file of --sft-data. A line has a prompt as in `read_lines` and
    text at "response", or messages at `prompt_key` or "messages" of which the last is the response.
    """
    return [_demonstration(x, place, prompt_key) for place, x in _read_objects(path, "--sft-data")]


def _read_objects(path: Path, option: str) -> list[tuple[str, Any]]:
    try:
        check_regular(path)
        lines = [*(_read_parquet if path.suffix == ".parquet" else _read_json_lines)(path)]
    except OSError as error:
        raise InputError(
            f"{option} must be a readable JSON Lines or Parquet file, got {printable(path)}: "
            f"{error}"
        ) from error
    if not lines:
        raise InputError(f"{printable(path)} must have a JSON object on each line, got none")
    return lines


def read_hub(
    name: str, splits: Sequence[str], prompt_key: str, as_line: AsLine | None = None
) -> list[list[Line]]:
    """Return the rows of a data set of the Hugging Face hub, NAME or NAME:CONFIG, with their
    places: of the first split, and of others if it has them; where the hub cannot be reached, from
    the cache of `datasets`."""
    try:
        import datasets

        offline = why_unreachable()
    except ImportError as error:
        raise InputError(
            f"loading {name} needs datasets (pip install datasets) or a local copy with "
            f"--data FILE: {error}"
        ) from error
    repository, _, config = name.partition(":")
    # Otherwise it retries for 24 s, and then looks into its cache.
    datasets.config.HF_HUB_OFFLINE = bool(offline)
    try:
        found = datasets.load_dataset(repository, config or None)
    except Exception as error:  # errors of the network, the hub, or the parsers of its files
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
        if offline:
            cause = f"it cannot be reached ({offline}), and the cache has no copy"
        raise InputError(
            f"cannot load {splits[0]} data of {name} from the hub: {cause}; --data FILE and "
            "--test-data FILE read a local copy"
        ) from error
    if splits[0] not in found:
        raise InputError(f"{name} has no split {splits[0]}, but {', '.join(found)} (NAME@SPLIT)")
    lines: list[list[Line]] = []
    for split in dict.fromkeys(x for x in splits if x in found):
        kinds = found[split].features.arrow_schema
        places = (f"{name}, {split} row {i}" for i in itertools.count(1))
        lines.append([])
        for place, row in zip(places, found[split], strict=False):
            row = {key: _shortest(x, kinds.field(key).type) for key, x in row.items()}
            try:
                line = as_line(row) if as_line else row
            except InputError as error:
                raise InputError(f"{place}: {error}; {keys_of(row)}") from error
            lines[-1].append((place, _checked(line, place, prompt_key)))
    return lines


def _read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with open(path, "rb") as file:
        for i, line in enumerate(file, start=1):
            location = f"{printable(path)}, line {i}"
            if not line.strip():
                continue
            try:
                yield location, json.loads(line, object_pairs_hook=_without_duplicates)
            # invalid JSON, invalid UTF-8, an integer of too many digits, or too deep
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"{location}: it must be a JSON object in UTF-8, got {line!r:.60}: {error}"
                    f"; {CONVERT}"
                ) from error


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise InputError(
            f"reading {printable(path)} needs pyarrow: pip install pyarrow ({error})"
        ) from error
    try:
        with ParquetFile(path) as file:
            table = file.read()
    except (ArrowException, OSError, ValueError) as error:
        raise InputError(f"{printable(path)} must be a Parquet file: {error}") from error
    columns = {}
    for name, kind in zip(table.column_names, table.schema.types, strict=True):
        try:
            columns[name] = [_shortest(x, kind) for x in table.column(name).to_pylist()]
        # a repeated name, or values that Python has no type for
        except (ArrowException, KeyError, OverflowError, ValueError):
            columns[name] = [None] * len(table)
    for i in range(len(table)):
        yield f"{printable(path)}, row {i + 1}", {name: x[i] for name, x in columns.items()}


def _shortest(value: Any, kind: Any) -> Any:
    """Return a value of Arrow's type `kind` with narrow floats as the shortest decimals that they
    can be: .1 in float32 is 0.1, not 0.10000000149011612."""
    if "float" not in str(kind):
        return value
    if isinstance(value, float):
        return float(str(kind.to_pandas_dtype()(value)))
    if isinstance(value, dict):
        return {name: _shortest(x, kind.field(name).type) for name, x in value.items()}
    return [_shortest(x, kind.field(0).type) for x in value] if isinstance(value, list) else value


def _checked(fields: Any, place: str, prompt_key: str) -> dict[str, Any]:
    prompt = _prompt_of(fields, place, prompt_key)
    for name in ("response", "response_raw"):
        if name in fields:
            raise InputError(
                f"{place}: the key {name!r} is reserved for the response that is scored; rename it"
            )
    return {str(name): json_value(x) for name, x in fields.items()} | {prompt_key: prompt}


def _demonstration(fields: Any, place: str, prompt_key: str) -> Demonstration:
    if isinstance(fields, dict) and prompt_key not in fields and "messages" in fields:
        prompt_key = "messages"
    prompt = _prompt_of(fields, place, prompt_key)
    response = said = fields.get("response")
    is_chat = isinstance(prompt, list) and len(prompt) > 1
    if response is None and is_chat and prompt[-1]["role"] == "assistant":
        *prompt, response = prompt
        said = response["content"] or response.get(REASONING[0])
    if not isinstance(said, str) or not said:
        raise InputError(
            f"{place}: a demonstration must have text at 'response', or messages of which the last "
            f"is the assistant's, got {said!r:.80}; {keys_of(fields)}"
        )
    check_utf8(said, f"{place}: response")
    return place, prompt, response


def _prompt_of(fields: Any, place: str, key: str) -> Any:
    if not isinstance(fields, dict):
        raise InputError(f"{place}: it must be a JSON object, got {fields!r:.80}; {CONVERT}")
    if key not in fields:
        raise InputError(
            f"{place}: the line must have a prompt at {key!r} (--prompt-key), but {keys_of(fields)}"
        )
    return read_prompt(fields[key], f"{place}: {key}")


def read_prompt(prompt: Any, what: str) -> Prompt:
    """Return text, or messages as chat templates take them: a value that is null is absent, and a
    list of text parts is their text. Every prompt of a file or of a user's function comes here, by
    the name `what` in messages."""
    if isinstance(prompt, str) and prompt:
        check_utf8(prompt, what)
        return prompt
    if not isinstance(prompt, (list, tuple)) or not prompt:
        raise InputError(
            f"{what} must be text or a list of messages, not empty, got {prompt!r:.80}"
        )
    return [_message(message, what) for message in prompt]


def _message(given: Any, what: str) -> Message:
    if not isinstance(given, Mapping):
        raise InputError(f"{what} must have messages with a role and a content, got {given!r:.80}")
    # Arrow gives every message the keys of all
    message = {k: x for k, x in given.items() if x is not None and (k == "content" or x != [])}
    if isinstance(parts := message.get("content"), (list, tuple)):
        texts = [x["text"] for x in parts if isinstance(x, Mapping) and "text" in x]
        if len(texts) == len(parts) and all(isinstance(x, str) for x in texts):
            message["content"] = "".join(texts)
    if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
        raise InputError(
            f"{what} must have a role in {', '.join(ROLES)} and text as content in each message, "
            f"got {given!r:.80}"
        )
    names = {"role": "role", "content": "content"}
    if message["role"] == "assistant":
        names |= dict.fromkeys(REASONING, REASONING[0])
    for key, value in message.items():
        if key not in names or not isinstance(value, str):
            raise InputError(
                f"{what} must have messages with a role and a content, of the assistant also with "
                f"{REASONING[0]}, each as text, got {key!r} in {given!r:.200}"
            )
        check_utf8(value, what)
    return {names[key]: value for key, value in message.items()}


def check_utf8(text: Any, what: str) -> None:
    try:
        text.encode()
    except (AttributeError, UnicodeEncodeError) as error:  # no text, or half a surrogate pair
        raise InputError(f"{what} must be text in UTF-8: {error}") from error


def json_value(value: Any) -> Any:
    """Return a value of a column in the types of JSON. Nothing refuses a file here: nobody may use
    the column. Dates and decimal numbers become text; NaN, bytes and what else JSON lacks null."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_value(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(x) for x in value]
    if isinstance(value, (date, time)):
        return value.isoformat()
    return str(value) if isinstance(value, (Decimal, UUID, timedelta)) else None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key appears twice")
    return fields
