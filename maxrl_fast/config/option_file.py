"""A TOML file of options: its keys with the lines where they stand."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.runtime.files import JSON_BYTES, check_regular

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # the same code, before it came with Python


_INSTEAD_OF_TABLE = {
    **dict.fromkeys(("gym_config", "task_args"), "give it as a string of JSON"),
    "loss_options": 'give a list such as ["kl=0"]',
}


@dataclass(frozen=True)
class OptionFile:
    """The options in a TOML file, by name."""

    path: Path
    options: dict[str, Any] = field(default_factory=dict)
    text: str = ""

    @classmethod
    def read(cls, path: Path) -> "OptionFile":
        """Read the file of --config.

        Raises:
            InputError: where it cannot be read, is no TOML, or has a table.
        """
        try:
            check_regular(path, JSON_BYTES)
            text = path.read_text()
            file = cls(path, tomllib.loads(text), text)
        except (OSError, ValueError, RecursionError) as error:  # of TOML, of UTF-8, of a number of too many digits
            raise InputError(f"--config must be a readable TOML file, got {path}: {error}") from error
        for key, value in file.options.items():
            if _is_table(value):
                there = _INSTEAD_OF_TABLE.get(key, "write its keys there")
                wanted = "options must stand at the top of the file, without tables"
                raise InputError(f"{file.place(key)}: {wanted}, got the table [{key:.80}]; {there}")
        return file

    def place(self, key: str) -> str:
        """Return "FILE, line N" for a key."""
        lines = self.text.splitlines()
        statement = re.compile(rf"\s*\[*\s*[\"']?{re.escape(key)}[\"']?\s*[].=]")
        for i, line in enumerate(lines):
            if statement.match(line) and _is_whole("\n".join(lines[:i])):
                return f"{self.path}, line {i + 1}"
        return str(self.path)  # a key that is written with escapes

    def source_location(self, sentence: str, overridden: Mapping[str, Any]) -> str:
        """Return " (lr: FILE, line N)" where a sentence refuses a value of this file, or nothing.

        Args:
            overridden: the options that flags give.
        """
        found = [
            f"{key}: {self.place(key)}"
            for key, value in self.options.items()
            if key not in overridden and _refuses(sentence, key, value) and self.place(key) not in sentence
        ]
        return f" ({'; '.join(found)})" if found else ""


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))


def _is_whole(text: str) -> bool:
    """Return whether this beginning of a file ends with a statement, and not within a string or an array."""
    try:
        tomllib.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _refuses(sentence: str, key: str, value: Any) -> bool:
    """Return whether a message is about an option: it begins with the name, ends with it, or says the name and the value."""
    flag = key.replace("_", "-")
    name = rf"(?:--)?(?:{re.escape(key)}|{re.escape(flag)})"
    if re.match(rf"{name} (?:must|needs|takes)\b", sentence) or re.search(rf"(?:takes no|does not support) {name}\b", sentence):
        return True
    is_named = re.search(rf"\b{name}\b", sentence)
    return bool(is_named and re.search(rf"got\b.*(?<!\w){re.escape(str(value))}(?!\w)", sentence))
