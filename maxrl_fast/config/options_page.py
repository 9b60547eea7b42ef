"""The page of all options in Markdown: `python -m maxrl_fast.config.options_page > docs/options.md`."""

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from maxrl_fast.config import options
from maxrl_fast.config.parse import field_docstrings

_HEAD = """# Options

`python -m maxrl_fast.config.options_page > docs/options.md` writes this page from `maxrl_fast/config/options.py`;
`python -m maxrl_fast.train --help` prints the options that the default job takes. `--task chain --help` prints the options of
that task, and `--objective pacs --help` the options of that objective; other tasks and objectives refuse them.

Every option is a flag, and a key of the TOML file of `--config`. The key is the flag's name with `_` for `-`: `--maze-size 11`
is `maze_size = 11`, and `--compile` is `compile = true`. Keys stand at the top of the file, without tables. A flag
overrides the file. A table, an unknown key or a wrong value is refused with the file and the line. For the names that TRL,
verl, OpenRLHF and others give an option, as for a misspelled one, the message has the name here: `--num-generations 8` is
answered by "did you mean --rollouts?".
"""
_NOT_IN_A_FILE = ("config", "resume")
_METAVARS = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}


@dataclass(frozen=True)
class Option:
    """A row of the page, in Markdown."""

    flag: str
    key: str
    kind: str  # type or choices
    default: str
    help: str


def groups() -> Iterator[tuple[str, str, list[Option]]]:
    """Name, purpose and options of every group, in the order of --help."""
    for group in dataclasses.fields(options.Config):
        cls = type(getattr(options.Config(), group.name))
        hints, helps = get_type_hints(cls, include_extras=True), field_docstrings(cls)
        rows = [_option(option, hints[option.name], helps[option.name]) for option in dataclasses.fields(cls)]
        yield group.name.replace("_", " "), inspect.cleandoc(cls.__doc__ or ""), rows


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, purpose, rows in groups():
        parts.append(f"## {name.capitalize()} options\n\n{_escaped(purpose)}\n\n{_table(rows)}")
    return "\n".join(parts)


def _option(option: "dataclasses.Field[Any]", hint: Any, help_text: str) -> Option:
    shown = None
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        shown = next((note for note in notes if hasattr(note, "help_behavior_hint")), None)  # of tyro.conf.arg
    default = _default(option.default)
    if shown is not None and isinstance(shown.help_behavior_hint, str):
        default = _escaped(shown.help_behavior_hint.removeprefix("(default: ").removesuffix(")"))
    name = "--" + option.name.replace("_", "-")
    flag = f"`{name}`" if hint is not bool else f"`{name}`, `--no-{name[2:]}`"
    key = "none" if option.name in _NOT_IN_A_FILE else f"`{option.name}`"
    return Option(flag, key, _kind(hint, shown.metavar if shown else None), default, _escaped(help_text))


def _kind(hint: Any, metavar: str | None) -> str:
    """Choices where there are some, else what --help shows in the value's place."""
    if NoneType in get_args(hint):  # X | None
        hint = next(part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if hint is bool:
        return "flag"
    return f"`{metavar or _METAVARS.get(hint, str(hint))}`"


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value in (None, "") else f"`{value}`"


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is, also in a table; what stands in backquotes is left alone."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if i % 2 else re.sub(r"([*<\[\]])", r"\\\1", part) for i, part in enumerate(parts)).replace("|", r"\|")


def _table(rows: list[Option]) -> str:
    lines = ["| flag | key | value | default | |", "|---|---|---|---|---|"]
    lines += [f"| {row.flag} | {row.key} | {row.kind} | {row.default} | {row.help} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command line. Returns 0."""
    sys.stdout.write(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
