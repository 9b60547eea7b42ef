"""Checks of files that may come from anyone: they must be regular files of a bounded size.

Symbolic links are followed wherever they lead, because the Hugging Face cache keeps its files as links to ../../blobs. Their
targets are read only as JSON, tensors or a tokenizer, or refused.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError

JSON_BYTES = 1 << 24  # the index of a model of 500 shards has 5 MB
TOKENIZER_BYTES = 1 << 28


def check_regular(path: Path, most_bytes: int | None = None) -> None:
    """Refuse a path that is not a regular file (reading a pipe would block), or a file larger than `most_bytes`.

    Raises:
        OSError, ValueError: if the file does not exist, or its name is not valid.
        InputError: if the file is refused; it names the file.
    """
    _check_status(path, os.stat(path), most_bytes)


def _check_status(path: Path, status: os.stat_result, most_bytes: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFSOCK: "a socket"}
        got = kind.get(stat.S_IFMT(status.st_mode), "something else")
        raise InputError(f"{shown(path)} must be a regular file, got {got}")
    if most_bytes is not None and status.st_size > most_bytes:
        raise InputError(f"{shown(path)} must have at most {most_bytes} bytes, got {status.st_size}")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        InputError: if the file cannot be read, is larger than JSON_BYTES, or does not hold an object; it names the file.
    """
    try:
        content = json.loads(_read(path))
    except (OSError, ValueError) as error:  # ValueError: invalid JSON, invalid UTF-8, or a number with too many digits
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read the checkpoint's {shown(path)}: {error}") from error
    except RecursionError as error:
        raise InputError(f"cannot read the checkpoint's {shown(path)}: it is nested too deeply") from error
    if not isinstance(content, dict):
        raise InputError(f"{shown(path)} must hold a JSON object, got {content!r:.80}")
    return content


def _read(path: Path) -> bytes:
    # O_NONBLOCK: opening a pipe must not wait for a writer. The status is that of the open file, so it cannot be swapped.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        _check_status(path, os.fstat(file.fileno()), JSON_BYTES)
        content = file.read(JSON_BYTES + 1)  # files in /proc report a size of 0
    if len(content) > JSON_BYTES:
        raise InputError(f"{shown(path)} must have at most {JSON_BYTES} bytes, and has more")
    return content


def shown(name: object) -> str:
    """Return a path or name for use in a message: on one line, and shortened if it is long."""
    text = str(name)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 300 else f"{text[:150]}...{text[-150:]}"
