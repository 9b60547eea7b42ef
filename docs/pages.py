"""Write the generated parts of these pages: `python docs/pages.py`, from the root of the project.

options.md is written from the options of a configuration and of the objectives. A page of
docs/objectives gets its section "Facts" from the registry: the objectives that its title names,
each with formula, weight, needs, options and source.
"""

import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from maxrl_fast.algorithms.estimators import ESTIMATORS
from maxrl_fast.algorithms.method import Method
from maxrl_fast.algorithms.options import Default, Option
from maxrl_fast.config.aliases import OTHER_NAMES
from maxrl_fast.config.help_page import default_text, grouped, metavar
from maxrl_fast.config.metadata import Note
from maxrl_fast.config.options import Config, known_options, objective_table
from maxrl_fast.training.objectives.registry import (
    OBJECTIVE_CLASSES,
    OBJECTIVES,
    objective_options,
)

OTHER_LIBRARIES = """## Names in other libraries

What TRL, the Trainer of transformers, verl, OpenRLHF, slime and prime-rl call these options,
without their prefixes (verl's `actor_rollout_ref.rollout.n` is `n`). None is accepted; each is
answered with the name here. An option may count differently: `per_device_train_batch_size` counts
responses, `--prompts` prompts. `use_vllm` (`vllm`) means: write `--rollout vllm`.

| here | elsewhere |
|---|---|"""
OBJECTIVE_PAGES = Path(__file__).parent / "objectives"
HEADING = "## Facts"
METHODS: dict[str, Method] = {**ESTIMATORS, **OBJECTIVE_CLASSES}
COLUMNS = ("name", "advantage", "weight W_N(p)", "needs", "options", "source")

HEAD = """# Options

`python docs/pages.py` writes this page from `maxrl_fast/config/options.py` and the signatures of
the objectives. `python -m maxrl_fast.train --help` prints the options of the default job, and with
`--task chain` or `--objective pacs` before `--help` those of that task or objective, your own
included.

Every option is a flag, and a key of the TOML file of `--config`. The key is the flag's name with
`_` for `-`: `--maze-size 11` is `maze_size = 11`, and `--compile` is `compile = true`. Keys stand
at the top of the file, without tables. A flag overrides the file. A table, an unknown key or a
wrong value is refused with the file and the line. Misspelled names, and those of TRL, verl,
OpenRLHF and others, are answered with the name here: `--num-generations 8` by
"did you mean --rollouts?".
"""


def facts(name: str) -> list[str]:
    """Return the cells of the row of an objective, or of an estimator that is only a baseline."""
    row = METHODS[name]
    options = objective_options(name) if name in OBJECTIVES else {}
    flags = [f"`{option.flag}` ({default_text(option)})" for option in options.values()]
    texts = [escaped(text) for text in (row.formula, row.weight, row.needs)]
    return [f"`{name}`", *texts, ", ".join(flags) or "-", escaped(row.source)]


def with_facts(page: str) -> str:
    """Return the page of an objective with its facts as the registry has them, before Source."""
    title = page.split("\n", 1)[0]
    rows = [facts(name) for name in re.split(r"[#, ]+", title) if name in METHODS]
    table = "\n".join(
        f"| {' | '.join(cells)} |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows)
    )
    section = f"{HEADING}\n\nFrom the registry, by `python docs/pages.py`.\n\n{table}\n\n"
    page = re.sub(rf"^{HEADING}\n.*?(?=^## )", "", page, flags=re.DOTALL | re.MULTILINE)
    before, source, after = page.partition("## Source")
    return before + section + source + after


def options_page() -> str:
    """Return docs/options.md."""
    table, parts = objective_table(), [HEAD]
    for name, group, members in grouped(Config, known_options()):
        title, purpose = name.replace("_", " ").capitalize(), escaped(inspect.getdoc(group) or "")
        rows = [option_row(x, table.get(x.name, {"": x})) for x in members]
        head = "| flag | key | value | default | |\n|---|---|---|---|---|"
        parts.append("\n".join([f"## {title} options\n\n{purpose}\n", head, *rows, ""]))
    parts.append(OTHER_LIBRARIES)
    for option in known_options().values():
        names = [f"`{x}`" for x, meant in OTHER_NAMES.items() if meant == option.name]
        for x, meant in OTHER_NAMES.items():
            name, _, value = meant.partition(" ")
            names += [f"`{x}` (`{value}`)"] * (name == option.name and value != "")
        if names:
            parts.append(f"| **`{option.flag}`** | {', '.join(names)} |")
    return "\n".join([*parts, ""])


def option_row(option: Option, owners: Mapping[str, Option]) -> str:
    """Return the row of an option that these objectives have, each with its own help and
    default.
    """
    flag, is_flag = f"`{option.flag}`", option.kind is bool
    choices = ", ".join(f"`{choice}`" for choice in option.choices)
    defaults = {default_cell(x) for x in owners.values()}
    helps = {
        x.help: [name for name, y in owners.items() if y.help == x.help] for x in owners.values()
    }
    said = option.help
    if "" not in owners:
        said = " ".join(f"{text[:-1]} ({', '.join(names)})." for text, names in helps.items())
    cells = (
        f"{flag}, `--no-{option.flag[2:]}`" if is_flag else flag,
        "none" if Note.NOT_IN_A_FILE in option.notes else f"`{option.name}`",
        "flag" if is_flag else choices or f"`{metavar(option)}`",
        defaults.pop() if len(defaults) == 1 else "the objective's",
        escaped(said),
    )
    return f"| {' | '.join(cells)} |"


def default_cell(option: Option) -> str:
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


def main() -> None:
    (Path(__file__).parent / "options.md").write_text(options_page())
    for path in sorted(OBJECTIVE_PAGES.glob("*.md")):
        if path.name != "README.md":
            path.write_text(with_facts(path.read_text()))


if __name__ == "__main__":
    sys.exit(main())
