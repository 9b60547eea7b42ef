"""The options as --help shows them, and all of them as the page that `python -m
maxrl_fast.config.options_page` prints.
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import tyro

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


def show_help(
    config: Groups, options: Mapping[str, Option], arguments: Sequence[str], prog: str
) -> None:
    """Print the options that a run of this configuration uses, or a completion of its flags for a
    shell, and exit: by tyro.
    """
    values = config.flat()
    hidden, groups, seldom = inapplicable_options(type(config), values), [], []
    for name, group, members in grouped(
        type(config), {key: x for key, x in options.items() if key not in hidden}
    ):
        seldom += [option.flag for option in members if Note.SELDOM in option.notes]
        listed = [option for option in members if Note.SELDOM not in option.notes]
        fields = [
            (option.name, _for_tyro(option, values), dataclasses.field(default=option.default))
            for option in listed
        ]
        shown = dataclasses.make_dataclass(
            group.__name__, fields, namespace={"__doc__": group.__doc__}
        )
        groups.append((name, shown, dataclasses.field(default_factory=shown)))
    others = f"More, in docs/options.md: {', '.join(seldom)}." if seldom else ""
    tyro.cli(
        dataclasses.make_dataclass(type(config).__name__, groups),
        args=["--help"]
        if not any(word.startswith("--tyro") for word in arguments)
        else list(arguments),
        prog=prog,
        description="\n\n".join(filter(None, [inspect.getdoc(type(config)), others])),
        config=(tyro.conf.OmitArgPrefixes,),
    )


def split_help(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Return the arguments without -h and --help, and whether they ask for the options, or for a
    completion by tyro.
    """
    if any(word.startswith("--tyro") for word in arguments):
        return [], True
    words = [word for word in arguments if word not in ("-h", "--help")]
    return words, len(words) < len(arguments)


def _for_tyro(option: Option, values: Mapping[str, Any]) -> Any:
    kind: Any = option.kind if option.default is not None else option.kind | None
    if Note.POSITIONAL in option.notes:
        return Annotated[
            kind,
            tyro.conf.Positional,
            tyro.conf.arg(help=option.help, metavar=_metavar(option), help_behavior_hint=""),
        ]
    if option.find(Default) is None and option.default is not None:
        return Annotated[kind, tyro.conf.arg(help=option.help)]
    default = option.find(Default)
    text = default.chosen(values) if default and default.chosen else default_text(option)
    hint = f"(default: {text})"
    return Annotated[
        kind, tyro.conf.arg(help=option.help, metavar=_metavar(option), help_behavior_hint=hint)
    ]


def _metavar(option: Option) -> str:
    """Return what --help shows in the value's place."""
    default = option.find(Default)
    kind = (get_args(option.kind) or [option.kind])[0]
    return (default and default.metavar) or (
        "{" + ",".join(option.choices) + "}" if option.choices else _METAVARS.get(kind, "STR")
    )


def default_text(option: Option) -> str:
    default = option.find(Default)
    return (
        default.text
        if default
        else "must be given"
        if option.default is None
        else str(option.default)
    )


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
    table, static = objective_table(), options_of(Config)
    own = {name: next(iter(rows.values())) for name, rows in table.items()}
    for name, group, members in grouped(
        Config, {"objective": static["objective"], **own, **static}
    ):
        rows = [_row_of_objectives(table[x.name]) if x.name in table else _row(x) for x in members]
        yield name.replace("_", " "), inspect.cleandoc(group.__doc__ or ""), rows


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, purpose, rows in groups():
        parts.append(f"## {name.capitalize()} options\n\n{escaped(purpose)}\n\n{_table(rows)}")
    return "\n".join(parts)


def _row_of_objectives(options: Mapping[str, Option]) -> Row:
    """Return the row of an option that these objectives have, each with its own help and
    default.
    """
    rows = {objective: _row(option) for objective, option in options.items()}
    first, helps = next(iter(rows.values())), dict.fromkeys(row.help for row in rows.values())
    said = [
        f"{text[:-1]} ({', '.join(name for name, row in rows.items() if row.help == text)})."
        for text in helps
    ]
    is_same = all(row.default == first.default for row in rows.values())
    return dataclasses.replace(
        first, default=first.default if is_same else "the objective's", help=" ".join(said)
    )


def _row(option: Option) -> Row:
    flag, is_flag = f"`{option.flag}`", option.kind is bool
    default = (
        f"`{option.default}`" if option.find(Default) is None else escaped(default_text(option))
    )
    if is_flag or option.default == "":
        default = "on" if option.default else "off" if is_flag else "none"
    kind = (
        "flag"
        if is_flag
        else ", ".join(f"`{choice}`" for choice in option.choices) or f"`{_metavar(option)}`"
    )
    return Row(
        flag=f"{flag}, `--no-{option.flag[2:]}`" if is_flag else flag,
        key="none" if Note.NOT_IN_A_FILE in option.notes else f"`{option.name}`",
        kind=kind,
        default=default if option.default is not None or option.of(Default) else "must be given",
        help=escaped(option.help),
    )


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, also in a table; what stands in backquotes is left
    alone.
    """
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if i % 2 else re.sub(r"([*<\[\]])", r"\\\1", part) for i, part in enumerate(parts)
    ).replace("|", r"\|")


def _table(rows: list[Row]) -> str:
    lines = ["| flag | key | value | default | |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.flag} | {row.key} | {row.kind} | {row.default} | {row.help} |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command line. Returns 0."""
    sys.stdout.write(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
