"""Read prompts from JSON Lines, Parquet or the Hugging Face hub. The data is untrusted: an error
names the invalid line.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.model.hub import why_unreachable
from maxrl_fast.runtime.files import check_regular, printable
from maxrl_fast.tasks.dataset_specs import keys_of

ROLES = ("system", "user", "assistant", "tool")


Line = tuple[str, dict[str, Any]]  # its place, for error messages, and its JSON object
Demonstration = tuple[str, Any, str]  # its place, its prompt (text or messages) and its response


def read_lines(path: Path, prompt_key: str, option: str = "--data") -> list[Line]:
    """Return the JSON object of each line of a file, or of each row if its name ends in .parquet,
    with its place. Each has a prompt: text, or chat messages {"role": ..., "content": ...}."""
    return [
        (location, _checked(fields, location, prompt_key))
        for location, fields in _read_objects(path, option)
    ]


def read_demonstrations(path: Path, prompt_key: str) -> list[Demonstration]:
    """Return the demonstrations in a file of --sft-data. A line has a prompt as in `read_lines` and
    text at "response", or messages at `prompt_key` or "messages" of which the last is the response.
    """
    return [
        _demonstration(fields, location, prompt_key)
        for location, fields in _read_objects(path, "--sft-data")
    ]


def _read_objects(path: Path, option: str) -> list[Line]:
    read = _read_parquet if path.suffix == ".parquet" else _read_json_lines
    try:
        check_regular(path)
        lines = [(location, _checked_object(fields, location)) for location, fields in read(path)]
    except OSError as error:
        raise InputError(
            f"{option} must be a readable JSON Lines or Parquet file, got {printable(path)}: "
            f"{error}"
        ) from error
    if not lines:
        raise InputError(f"{printable(path)} must have a JSON object on each line, got none")
    return lines


def read_hub(name: str, split: str, prompt_key: str) -> list[Line]:
    """Return the rows of a data set of the Hugging Face hub, NAME or NAME:CONFIG, with their
    places; where the hub cannot be reached, from the cache of `datasets`."""
    try:
        import datasets

        offline = why_unreachable()
    except ImportError as error:
        raise InputError(
            f"loading {name} needs datasets (pip install 'maxrl_fast[data]') or a local copy with "
            f"--data FILE: {error}"
        ) from error
    repository, _, config = name.partition(":")
    # Otherwise it retries for 24 s, and then looks into its cache.
    datasets.config.HF_HUB_OFFLINE = bool(offline)
    try:
        rows = datasets.load_dataset(repository, config or None, split=split)
    except Exception as error:  # errors of the network, the hub, or the parsers of its files
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
        if offline:
            cause = f"it cannot be reached ({offline}), and the cache has no copy"
        raise InputError(
            f"cannot load {split} data of {name} from the hub: {cause}; --data FILE reads a local "
            "copy"
        ) from error
    places = (f"{name}, {split} row {i}" for i in itertools.count(1))
    return [
        (place, _checked(_checked_object(row, place), place, prompt_key))
        for place, row in zip(places, rows, strict=False)
    ]


def _read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with open(path, "rb") as file:
        for i, line in enumerate(file, start=1):
            location = f"{printable(path)}, line {i}"
            if not line.strip():
                continue
            try:
                yield location, json.loads(line, object_pairs_hook=_without_duplicates)
            # invalid JSON, invalid UTF-8, or an integer of too many digits
            except ValueError as error:
                raise InputError(
                    f"{location}: it must be a JSON object in UTF-8: {error}"
                ) from error


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise InputError(
            f"reading {printable(path)} needs pyarrow: pip install 'maxrl_fast[data]' ({error})"
        ) from error
    try:
        with ParquetFile(path) as file:
            for i, row in enumerate(file.read().to_pylist(), start=1):
                yield f"{printable(path)}, row {i}", row
    except (ArrowException, ValueError) as error:
        raise InputError(f"{printable(path)} must be a Parquet file: {error}") from error


def _checked(fields: dict[str, Any], location: str, prompt_key: str) -> dict[str, Any]:
    if "response" in fields:
        raise InputError(
            f"{location}: the key 'response' is reserved for the response that is scored; rename it"
        )
    _prompt_of(fields, location, prompt_key)
    return fields


def _demonstration(fields: dict[str, Any], location: str, prompt_key: str) -> Demonstration:
    if prompt_key not in fields and "messages" in fields:
        prompt_key = "messages"
    prompt, response = _prompt_of(fields, location, prompt_key), fields.get("response")
    is_chat = isinstance(prompt, list) and len(prompt) > 1
    if response is None and is_chat and prompt[-1]["role"] == "assistant":
        *prompt, last = prompt
        response = last["content"]
    if not isinstance(response, str) or not response:
        raise InputError(
            f"{location}: a demonstration must have text at 'response', or messages of which the "
            "last is the assistant's, "
            f"got {response!r:.80}; {keys_of(fields)}"
        )
    return location, prompt, response


def _prompt_of(fields: dict[str, Any], location: str, key: str) -> Any:
    if key not in fields:
        raise InputError(
            f"{location}: the line must have a prompt at {key!r} (--prompt-key), but "
            f"{keys_of(fields)}"
        )
    prompt, name = fields[key], f"{location}: {key}"
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise InputError(f"{name} must be text or a list of messages, got {prompt!r:.80}")
    for message in prompt:
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise InputError(
                f"{name} must have messages with a role and a content, got {message!r:.80}"
            )
        if message["role"] not in ROLES or not isinstance(message["content"], str):
            roles = ", ".join(ROLES)
            raise InputError(
                f"{name} must have a role in {roles} and text as content in each message, got "
                f"{message!r:.80}"
            )
    return prompt


def _checked_object(fields: Any, location: str) -> dict[str, Any]:
    try:
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()  # no half a surrogate pair
    except (TypeError, ValueError) as error:
        raise InputError(f"{location}: it must be a JSON object in UTF-8: {error}") from error
    if not isinstance(fields, dict):
        raise InputError(f"{location}: it must be a JSON object, got {fields!r:.80}")
    return fields


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key appears twice")
    return fields
