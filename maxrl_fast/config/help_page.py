"""The options as --help shows them."""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from maxrl_fast.algorithms.options import Default, Option
from maxrl_fast.config.metadata import Groups, Note, inapplicable_options, options_of, read_options

# of --help: the widest page in columns, and the widest flag with its help on the same line
WIDEST, FLAG_WIDTH = 110, 20
_METAVARS = {int: "INT", float: "FLOAT", Path: "PATH"}


def grouped(
    config: type, options: Mapping[str, Option]
) -> Iterator[tuple[str, type, list[Option]]]:
    static = options_of(config)
    for name, group in get_type_hints(config).items():
        names = {option.name for option in read_options(group)}
        if name == "objective":
            names |= options.keys() - static.keys()  # those of its function
        yield name, group, [option for option in options.values() if option.name in names]


def show_help(config: Groups, options: Mapping[str, Option], prog: str) -> NoReturn:
    """Print the options that a run of this configuration uses, and exit."""
    values, groups, advanced = config.flat(), [], []
    hidden = inapplicable_options(type(config), values)
    for name, group, members in grouped(type(config), options):
        used = [option for option in members if option.name not in hidden]
        advanced += [option.flag for option in used if Note.ADVANCED in option.notes]
        rows = [help_row(x, values) for x in used if Note.ADVANCED not in x.notes]
        groups.append((f"{name.replace('_', ' ')} options", inspect.getdoc(group) or "", rows))
    description = inspect.getdoc(type(config)) or ""
    if advanced:
        description += f"\n\nMore, in docs/options.md: {', '.join(advanced)}."
    print_help(prog, description, groups)


def help_row(option: Option, values: Mapping[str, Any]) -> tuple[str, str]:
    """Return the flag with what it takes, and the help with the default."""
    default = option.find(Default)
    text = default.chosen(values) if default and default.chosen else default_text(option)
    if option.kind is bool:
        return f"{option.flag}, --no-{option.flag[2:]}", f"{option.help} (default: {text})"
    if Note.POSITIONAL in option.notes:
        return metavar(option), option.help
    return f"{option.flag} {metavar(option)}", f"{option.help} (default: {text})"


def print_help(
    prog: str, description: str, groups: Sequence[tuple[str, str, Sequence[tuple[str, str]]]]
) -> NoReturn:
    """Print a page, and exit. groups: title, purpose, and rows of a flag and its help."""
    console = Console(highlight=False)
    console.width = min(console.width, WIDEST)
    paragraphs = re.sub(r"(?<=\S)\n(?=\S)", " ", description)
    console.print(Text(f"usage: {prog} [OPTIONS]\n\n{paragraphs}\n"))
    for title, purpose, rows in groups:
        lines: list[RenderableType] = [Text(purpose, "italic")] if purpose else []
        for flag, text in rows:
            help_text = Text(text)
            help_text.highlight_regex(r"\(default: .*\)$", "cyan")
            if len(flag) > FLAG_WIDTH:
                lines += [Text(flag, "bold"), Padding(help_text, (0, 0, 0, FLAG_WIDTH + 1))]
                continue
            table = Table.grid(padding=(0, 1, 0, 0))
            table.add_column(width=FLAG_WIDTH)
            table.add_row(Text(flag, "bold"), help_text)
            lines.append(table)
        if rows:
            console.print(Panel(Group(*lines), title=title, title_align="left", border_style="dim"))
    sys.exit(0)


def split_help(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Return the arguments without -h and --help, and whether they ask for the options."""
    words = [word for word in arguments if word not in ("-h", "--help")]
    return words, len(words) < len(arguments)


def metavar(option: Option) -> str:
    """Return what --help shows in the value's place."""
    default = option.find(Default)
    if default and default.metavar:
        return default.metavar
    if option.choices:
        return "{" + ",".join(option.choices) + "}"
    kind = (get_args(option.kind) or [option.kind])[0]
    return _METAVARS.get(kind, "STR") + " ..." * option.takes_several


def default_text(option: Option) -> str:
    default = option.find(Default)
    if default is not None:
        return default.text
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    if option.takes_several:
        return " ".join(map(str, option.default))
    return "must be given" if option.default is None else str(option.default) or "none"
