"""The options as --help shows them, and all of them as the page that `python -m
maxrl_fast.config.options_page` prints.
"""

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
from maxrl_fast.config.options import Config, objective_table

_HEAD = """# Options

`python -m maxrl_fast.config.options_page > docs/options.md` writes this page from
`maxrl_fast/config/options.py` and the signatures of the objectives. `python -m maxrl_fast.train
--help` prints the options of the default job, and with `--task chain` or `--objective pacs` before
`--help` those of that task or objective, your own included.

Every option is a flag, and a key of the TOML file of `--config`. The key is the flag's name with
`_` for `-`: `--maze-size 11` is `maze_size = 11`, and `--compile` is `compile = true`. Keys stand
at the top of the file, without tables. A flag overrides the file. A table, an unknown key or a
wrong value is refused with the file and the line. Misspelled names, and those of TRL, verl,
OpenRLHF and others, are answered with the name here: `--num-generations 8` by
"did you mean --rollouts?".
"""


# of --help: the widest page in columns, and the widest flag with its help on the same line
WIDEST, FLAG_WIDTH = 110, 20
_METAVARS = {int: "INT", float: "FLOAT", Path: "PATH"}


def grouped(
    config: type, options: Mapping[str, Option]
) -> Iterator[tuple[str, type, list[Option]]]:
    """Give the name and the class of each group, and the options that are in it."""
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
    sys.exit(0)


def help_row(option: Option, values: Mapping[str, Any]) -> tuple[str, str]:
    """Return the flag with what it takes, and the help with the default."""
    default = option.find(Default)
    text = default.chosen(values) if default and default.chosen else default_text(option)
    if option.kind is bool:
        return f"{option.flag}, --no-{option.flag[2:]}", f"{option.help} (default: {text})"
    if Note.POSITIONAL in option.notes:
        return _metavar(option), option.help
    return f"{option.flag} {_metavar(option)}", f"{option.help} (default: {text})"


def print_help(
    prog: str, description: str, groups: Sequence[tuple[str, str, Sequence[tuple[str, str]]]]
) -> None:
    """Print a page of options.

    Args:
        groups: title, purpose, and rows of a flag and its help.
    """
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


def split_help(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Return the arguments without -h and --help, and whether they ask for the options."""
    words = [word for word in arguments if word not in ("-h", "--help")]
    return words, len(words) < len(arguments)


def _metavar(option: Option) -> str:
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


def page() -> str:
    """Return docs/options.md."""
    table, static = objective_table(), options_of(Config)
    own = {name: next(iter(rows.values())) for name, rows in table.items()}
    parts = [_HEAD]
    for name, group, members in grouped(
        Config, {"objective": static["objective"], **own, **static}
    ):
        title, purpose = name.replace("_", " ").capitalize(), escaped(inspect.getdoc(group) or "")
        rows = [_row(x, table.get(x.name, {"": x})) for x in members]
        head = "| flag | key | value | default | |\n|---|---|---|---|---|"
        parts.append("\n".join([f"## {title} options\n\n{purpose}\n", head, *rows, ""]))
    return "\n".join(parts)


def _row(option: Option, owners: Mapping[str, Option]) -> str:
    """Return the row of an option that these objectives have, each with its own help and
    default.
    """
    flag, is_flag = f"`{option.flag}`", option.kind is bool
    choices = ", ".join(f"`{choice}`" for choice in option.choices)
    defaults = {_default_cell(x) for x in owners.values()}
    helps = {
        x.help: [name for name, y in owners.items() if y.help == x.help] for x in owners.values()
    }
    said = option.help
    if "" not in owners:
        said = " ".join(f"{text[:-1]} ({', '.join(names)})." for text, names in helps.items())
    cells = (
        f"{flag}, `--no-{option.flag[2:]}`" if is_flag else flag,
        "none" if Note.NOT_IN_A_FILE in option.notes else f"`{option.name}`",
        "flag" if is_flag else choices or f"`{_metavar(option)}`",
        defaults.pop() if len(defaults) == 1 else "the objective's",
        escaped(said),
    )
    return f"| {' | '.join(cells)} |"


def _default_cell(option: Option) -> str:
    is_code = option.kind is not bool and option.default not in (None, "")
    text = default_text(option)
    return f"`{text}`" if is_code and not option.of(Default) else escaped(text)


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, also in a table; what stands in backquotes is left
    alone.
    """
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if i % 2 else re.sub(r"([*<\[\]])", r"\\\1", part) for i, part in enumerate(parts)
    ).replace("|", r"\|")


if __name__ == "__main__":
    sys.stdout.write(page())
