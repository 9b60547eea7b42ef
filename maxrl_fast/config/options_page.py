"""The page of all options in Markdown: `python -m maxrl_fast.config.options_page > docs/options.md`."""

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from maxrl_fast.config.metadata import Default, Note, Option, read_options
from maxrl_fast.config.options import Config

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


@dataclass(frozen=True)
class Row:
    """A row of the page, in Markdown."""

    flag: str
    key: str
    kind: str  # type or choices
    default: str
    help: str


def groups() -> Iterator[tuple[str, str, list[Row]]]:
    """Name, purpose and options of every group, in the order of --help."""
    for group in dataclasses.fields(Config):
        cls = type(getattr(Config(), group.name))
        yield group.name.replace("_", " "), inspect.cleandoc(cls.__doc__ or ""), [_row(x) for x in read_options(cls)]  # type: ignore[arg-type]


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, purpose, rows in groups():
        parts.append(f"## {name.capitalize()} options\n\n{_escaped(purpose)}\n\n{_table(rows)}")
    return "\n".join(parts)


def _row(option: Option) -> Row:
    shown = option.find(Default)
    default = _default(option.default) if shown is None else _escaped(shown.text)
    name = "--" + option.name.replace("_", "-")
    flag = f"`{name}`" if option.kind is not bool else f"`{name}`, `--no-{name[2:]}`"
    key = "none" if Note.NOT_IN_A_FILE in option.notes else f"`{option.name}`"
    return Row(flag, key, _kind(option), default, _escaped(option.help))


def _kind(option: Option) -> str:
    """Choices where there are some, else what --help shows in the value's place."""
    kinds = [kind for kind in (get_args(option.kind) or [option.kind]) if kind is not NoneType]  # of X | None
    literal = option.kind if get_origin(option.kind) is Literal else kinds[0]
    if get_origin(literal) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(literal))
    return "flag" if option.kind is bool else f"`{option.metavar}`"


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value in (None, "") else f"`{value}`"


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is, also in a table; what stands in backquotes is left alone."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if i % 2 else re.sub(r"([*<\[\]])", r"\\\1", part) for i, part in enumerate(parts)).replace("|", r"\|")


def _table(rows: list[Row]) -> str:
    lines = ["| flag | key | value | default | |", "|---|---|---|---|---|"]
    lines += [f"| {row.flag} | {row.key} | {row.kind} | {row.default} | {row.help} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command line. Returns 0."""
    sys.stdout.write(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
