"""Prompts from a JSON Lines file, which may come from anyone: a line that is not what it should be is refused by its number."""

import json
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.model.files import check_regular, shown

LINE_BYTES = 1 << 20  # of a line; the longest prompts of mathematics and code have a tenth of it
ROLES = ("system", "user", "assistant", "tool")


def read_lines(path: Path, prompt_key: str) -> list[dict[str, Any]]:
    """The objects of the lines, each with a prompt: text, or chat messages {"role": ..., "content": ...}.

    Raises:
        InputError: naming the file and the line, where it cannot be read, is longer than LINE_BYTES, is no JSON object, or has
            no prompt.
    """
    try:
        check_regular(path)
        with open(path, "rb") as file:
            bounded = iter(lambda: file.readline(LINE_BYTES + 1), b"")
            numbered = enumerate(bounded, start=1)
            lines = [_read(line, f"{shown(path)}, line {i}", prompt_key) for i, line in numbered if line.strip()]
    except OSError as error:
        raise InputError(f"--data must be a readable JSON Lines file, got {shown(path)}: {error}") from error
    if not lines:
        raise InputError(f"{shown(path)} must have a JSON object on each line, got none")
    return lines


def _read(line: bytes, where: str, prompt_key: str) -> dict[str, Any]:
    if len(line) > LINE_BYTES:
        raise InputError(f"{where}: it must have at most {LINE_BYTES:,} bytes, and has more")
    try:
        fields = json.loads(line, object_pairs_hook=_unique, parse_constant=_refuse)
        json.dumps(fields, ensure_ascii=False).encode()  # halves of surrogate pairs are no text
    except RecursionError:
        raise InputError(f"{where}: it is nested too deeply") from None
    except ValueError as error:  # of JSON, of UTF-8, of a number of too many digits
        raise InputError(f"{where}: it must be a JSON object in UTF-8: {error}") from error
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
