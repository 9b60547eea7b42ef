"""Prompts from JSON Lines, Parquet or the Hugging Face hub, which may come from anyone: a line that is not what it should be
is refused by its number."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.files.untrusted import check_regular, shown

LINE_BYTES = 1 << 20  # of a line; the longest prompts of mathematics and code have a tenth of it
MOST_UNPACKED, UNPACKED_RATIO = 1 << 26, 100  # bytes of a Parquet file's rows: so many, and so many for each of its own
ROLES = ("system", "user", "assistant", "tool")


def read_lines(path: Path, prompt_key: str, option: str = "--data") -> list[dict[str, Any]]:
    """The objects of a file's lines, or rows if its name ends in .parquet, each with a prompt: text, or chat messages
    {"role": ..., "content": ...}.

    Args:
        option: that named the file, for messages.

    Raises:
        InputError: naming the file and the line, where it cannot be read, is longer than LINE_BYTES, is no JSON object, or has
            no prompt.
    """
    read = _parquet if path.suffix == ".parquet" else _json_lines
    try:
        check_regular(path)
        lines = [_checked(fields, where, prompt_key) for where, fields in read(path)]
    except OSError as error:
        raise InputError(f"{option} must be a readable JSON Lines or Parquet file, got {shown(path)}: {error}") from error
    if not lines:
        raise InputError(f"{shown(path)} must have a JSON object on each line, got none")
    return lines


def read_hub(name: str, split: str, prompt_key: str) -> list[dict[str, Any]]:
    """The same of a data set of the Hugging Face hub, NAME or NAME:CONFIG, through `datasets`. None of its code is run.

    Raises:
        InputError: the same, and where `datasets` is missing or the hub cannot be reached.
    """
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"{name} needs --data FILE, or datasets to load it: pip install 'maxrl_fast[data]' ({error})"
        ) from error
    repository, _, config = name.partition(":")
    try:
        rows = datasets.load_dataset(repository, config or None, split=split)
    except Exception as error:  # of the network, of the hub, of its files' parsers
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise InputError(f"cannot load {split} of {name} from the hub: {what}; --data FILE takes a local copy") from error
    return [_checked(row, f"{name}, {split} row {i}", prompt_key) for i, row in enumerate(rows, start=1)]


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Where each object is, and the object."""
    with open(path, "rb") as file:
        bounded = iter(lambda: file.readline(LINE_BYTES + 1), b"")
        for i, line in enumerate(bounded, start=1):
            where = f"{shown(path)}, line {i}"
            if len(line) > LINE_BYTES:
                raise InputError(f"{where}: it must have at most {LINE_BYTES:,} bytes, and has more")
            if not line.strip():
                continue
            try:
                yield where, json.loads(line, object_pairs_hook=_unique, parse_constant=_refuse)
            except RecursionError:
                raise InputError(f"{where}: it is nested too deeply") from None
            except ValueError as error:  # of JSON, of UTF-8, of a number of too many digits
                raise InputError(f"{where}: it must be a JSON object in UTF-8: {error}") from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    """The same of a Parquet file, a few rows at a time: a short file can hold the same long text very often."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
        from pyarrow.types import is_dictionary
    except ImportError as error:
        raise InputError(f"{shown(path)} needs pyarrow to be read: pip install 'maxrl_fast[data]' ({error})") from error

    def rows() -> Iterable[Any]:
        left = MOST_UNPACKED + UNPACKED_RATIO * path.stat().st_size
        try:
            with ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=16):
                    left -= sum((x.dictionary_decode() if is_dictionary(x.type) else x).nbytes for x in batch.columns)
                    if left < 0:
                        raise InputError(f"{shown(path)} must not unpack to more than {UNPACKED_RATIO} times its size")
                    yield from batch.to_pylist()
        except InputError:  # which is a ValueError too
            raise
        except (ArrowException, ValueError) as error:
            raise InputError(f"{shown(path)} must be a Parquet file: {error}") from error

    for i, row in enumerate(rows(), start=1):
        yield f"{shown(path)}, row {i}", row


def _checked(fields: Any, where: str, prompt_key: str) -> dict[str, Any]:
    try:
        size = len(json.dumps(fields, ensure_ascii=False, allow_nan=False).encode())  # halves of surrogate pairs are no text
    except RecursionError:
        raise InputError(f"{where}: it is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: it must be a JSON object in UTF-8: {error}") from error
    if size > LINE_BYTES:
        raise InputError(f"{where}: it must have at most {LINE_BYTES:,} bytes, got {size:,}")
    if not isinstance(fields, dict):
        raise InputError(f"{where}: it must be a JSON object, got {fields!r:.80}")
    if "response" in fields:
        raise InputError(f"{where}: the key 'response' is what the reward function gets the response by; give it another name")
    _check_prompt(fields.get(prompt_key), f"{where}: {prompt_key}")
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key comes twice")
    return fields


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _check_prompt(prompt: Any, what: str) -> None:
    if isinstance(prompt, str) and prompt:
        return
    if not isinstance(prompt, list) or not prompt:
        raise InputError(f"{what} must be text or a list of messages, got {prompt!r:.80}")
    for message in prompt:
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise InputError(f"{what} must have messages of a role and a content, got {message!r:.80}")
        if message["role"] not in ROLES or not isinstance(message["content"], str):
            raise InputError(f"{what} must have roles of {', '.join(ROLES)} and contents of text, got {message!r:.80}")
