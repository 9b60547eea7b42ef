"""Write options.md: `python docs/pages.py`, from the root of the project.

It is written from the options of the groups and of the parts, and from other_names.txt.
"""

import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from maxrl_fast.algorithms.options import Option, options_of
from maxrl_fast.config.options import Config
from maxrl_fast.config.read import metavar
from maxrl_fast.config.rules import SECTIONS, options_of_part, owners_by_option

OTHER_LIBRARIES = """## Names in other libraries

What TRL, the Trainer of transformers, verl, OpenRLHF, slime and prime-rl call these options,
without their prefixes (verl's `actor_rollout_ref.rollout.n` is `n`). None is accepted; each is
answered with the name here. An option may count differently: `per_device_train_batch_size` counts
responses, `--prompts` prompts. `use_vllm` (`vllm`) means: write `--rollout vllm`.

| here | elsewhere |
|---|---|"""
HEAD = """# Options

`python docs/pages.py` writes this page from `maxrl_fast/config/options.py` and the signatures of
the parts. A run has five parts that are chosen by name: objective, loss, correction, task and
rollout engine. Each adds the options in its signature, also a part that you wrote: `--loss sapo
--tau-negative 1.1`, `--task mine.py:Sort --length 7`. If another part has an option with that name,
the flag starts with the part's name: `--simko-k`. `python -m maxrl_fast.train --help` prints the
options of the default job, and with `--task gsm8k` or `--objective pacs` before `--help` those of
that task or objective.

Every option is a flag, and, except `--config` and `--resume`, a key of the TOML file of `--config`.
The key is the flag's name with `_` for `-`: `--maze-size 11` is `maze_size = 11`, and
`--checkpoint-activations` is `checkpoint_activations = true`. Keys stand at the top of the file,
without tables. A flag overrides the file. A table, an unknown key or a wrong value is refused with
the file and the line. Misspelled names, and those of TRL, verl, OpenRLHF and others, are answered
with the name here: `--num-generations 8` by "did you mean --rollouts?".
"""


def options_page() -> str:
    """Return docs/options.md."""
    parts = [HEAD]
    head = "| flag | value | default | |\n|---|---|---|---|"
    for name, group in Config.groups().items():
        title, purpose = name.replace("_", " ").capitalize(), escaped(inspect.getdoc(group) or "")
        rows = [option_row(x) for x in options_of(group).values()]
        parts.append("\n".join([f"## {title} options\n\n{purpose}\n", head, *rows, ""]))
    for section in SECTIONS:
        rows = []
        for flag, owners in owners_by_option(section).items():
            options = {name: options_of_part(section, name)[flag] for name in owners}
            rows.append(option_row(options[owners[0]], options))
        if rows:
            parts.append("\n".join([f"## Options of --{section} NAME\n", head, *rows, ""]))
    parts.append(OTHER_LIBRARIES)
    table = (Path(__file__).parent / "other_names.txt").read_text().partition("\n\n")[2]
    names: dict[str, list[str]] = {}
    for line in re.sub(r"\n +", " ", table.strip()).splitlines():
        option, others = line.split(": ")
        option, _, value = option.partition(" ")
        shown = [f"`{x}`" + f" (`{value}`)" * bool(value) for x in others.split()]
        names.setdefault(option, []).extend(shown)
    for option, others in names.items():
        parts.append(f"| **`--{option.replace('_', '-')}`** | {', '.join(others)} |")
    return "\n".join([*parts, ""])


def option_row(option: Option, owners: Mapping[str, Option] | None = None) -> str:
    """Return the row of an option, of the parts by name that have it."""
    flag, is_flag = f"`{option.flag}`", option.kind is bool
    choices = ", ".join(f"`{choice}`" for choice in option.choices)
    all_of_it = (owners or {"": option}).values()
    defaults = {x.shown_default for x in all_of_it}
    shown = defaults.pop() if len(defaults) == 1 else "the part's"
    said = " ".join(dict.fromkeys(x.help for x in all_of_it if x.help))
    if owners:
        said = f"{said} Of {', '.join(f'`{name}`' for name in owners)}.".strip()
    cells = (
        f"{flag}, `--no-{option.flag[2:]}`" if is_flag else flag,
        "flag" if is_flag else choices or f"`{metavar(option)}`",
        f"`{shown}`" if shown not in ("", "on", "off", "the part's") else shown,
        escaped(said),
    )
    return f"| {' | '.join(cells)} |"


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


if __name__ == "__main__":
    sys.exit(main())
