"""The options as --help shows them."""

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from maxrl_fast.algorithms.options import Option
from maxrl_fast.config.options import Options
from maxrl_fast.config.parts import purpose_of

WIDEST, FLAG_WIDTH = 110, 30  # of the page and its column of flags
_METAVARS = {int: "INT", float: "FLOAT", Path: "PATH", dict: "JSON"}


def show_help(config: Options, known: Mapping[str, Mapping[str, Option]], prog: str) -> NoReturn:
    """Print the options that a run of this configuration uses, and exit."""
    pages, groups = [], config.groups()
    for name, options in known.items():
        title, purpose = f"{name.replace('_', ' ')} options", inspect.getdoc(groups.get(name))
        if name not in groups:
            part = getattr(config.chosen, name[2:])
            title, purpose = f"options of {name} {part}", purpose_of(name[2:], part)
        rows = [help_row(x) for flag, x in options.items() if flag not in config.unused]
        pages.append((title, purpose or "", rows))
    print_help(prog, inspect.getdoc(type(config)) or "", pages)


def help_row(option: Option) -> tuple[str, str]:
    """Return the flag with what it takes, and its help."""
    default = f" (default: {option.shown_default})" if option.shown_default else ""
    takes = f", --no-{option.flag[2:]}" if option.kind is bool else f" {metavar(option)}"
    return option.flag + takes, option.help + default


def print_help(
    prog: str, description: str, groups: Sequence[tuple[str, str, Sequence[tuple[str, str]]]]
) -> NoReturn:
    """Print a page, and exit. groups: title, purpose, and rows of a flag and its help."""
    console = Console(highlight=False)
    console.width = min(console.width, WIDEST)
    paragraphs = re.sub(r"(?<=\S)\n(?=\S)", " ", description)
    console.print(Text(f"usage: {prog} [OPTIONS]\n\n{paragraphs}\n"))
    for title, purpose, rows in groups:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(max_width=FLAG_WIDTH, overflow="fold", style="bold")
        for row in rows:
            table.add_row(*map(Text, row))
        content = Group(*[Text(purpose, "italic")] * bool(purpose), table)
        if rows:
            console.print(Panel(content, title=title, title_align="left", border_style="dim"))
    sys.exit(0)


def split_help(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Return the arguments without -h and --help, and whether these are among them."""
    words = [word for word in arguments if word not in ("-h", "--help")]
    return words, len(words) < len(arguments)


def metavar(option: Option) -> str:
    """Return what --help shows in the value's place."""
    if option.choices:
        return "{" + ", ".join(option.choices) + "}"
    return _METAVARS.get(option.kind, "STR") + " ..." * option.takes_several
