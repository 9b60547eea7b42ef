"""Files of a checkpoint directory, which may come from anyone: only regular ones, and none that is larger than it needs be.

Links are followed wherever they lead, for the cache of Hugging Face keeps its files as links to ../../blobs. What they lead to
is read as JSON, tensors or a tokenizer, or refused.
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
    """Refuse what is no file, as a pipe that would be waited for, or is larger than `most_bytes`.

    Raises:
        OSError, ValueError: on a file that is not there, or a name that cannot be.
        InputError: naming the file.
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
    """The object of a JSON file.

    Raises:
        InputError: naming the file, where it cannot be read, is larger than JSON_BYTES, or holds something else.
    """
    try:
        content = json.loads(_read(path))
    except (OSError, ValueError) as error:  # of JSON, of UTF-8, of a number of too many digits
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read the checkpoint's {shown(path)}: {error}") from error
    except RecursionError as error:
        raise InputError(f"cannot read the checkpoint's {shown(path)}: it is nested too deeply") from error
    if not isinstance(content, dict):
        raise InputError(f"{shown(path)} must hold a JSON object, got {content!r:.80}")
    return content


def _read(path: Path) -> bytes:
    # Without waiting for who might write to a pipe; what was opened is what is looked at.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        _check_status(path, os.fstat(file.fileno()), JSON_BYTES)
        content = file.read(JSON_BYTES + 1)  # a file of /proc says it has no bytes
    if len(content) > JSON_BYTES:
        raise InputError(f"{shown(path)} must have at most {JSON_BYTES} bytes, and has more")
    return content


def shown(name: object) -> str:
    """A path or name as a message has it: one line, and not all of a long one."""
    text = str(name)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 300 else f"{text[:150]}...{text[-150:]}"
