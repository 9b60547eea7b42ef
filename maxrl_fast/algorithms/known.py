"""What to write for methods that the field knows by one name, and that are options here."""

import re
from collections.abc import Iterable
from typing import Any

from maxrl_fast.algorithms.estimators import ALIASES, ESTIMATORS
from maxrl_fast.algorithms.losses import ALIASES as LOSS_ALIASES
from maxrl_fast.algorithms.losses import LOSSES
from maxrl_fast.errors import nearest

METHODS = {
    "dapo": "--objective grpo --loss ppo --clip-high 0.28 --dynamic-sampling 4 --overlong-buffer "
    "INT",
    "ppo_clip": "--objective ppo",
    "drgrpo": "--objective dr_grpo",
    "reinforce++": "--objective reinforce_pp",
    "reinforce_plus_plus": "--objective reinforce_pp",
    "verl_grpo": "--objective grpo_verl",
    "trl_grpo": "--objective grpo_trl",
    "max_k": "--objective maxpo",
    "pass_k": "--objective passk_training",
}


def explain_name(name: str) -> str:
    """Return the name of an objective or a loss, and what it stands for where it is an alias."""
    row: Any = (LOSS_ALIASES | ALIASES).get(name)
    if row is None:
        return name
    own: Any = (LOSSES | ESTIMATORS)[row.name]
    changes = [
        f"{key} {option.default:g}"
        for key, option in row.options.items()
        if option.default != own.options[key].default
    ]
    if row.aggregation != own.aggregation:
        changes.append(f"aggregation {row.aggregation}")
    return f"{name} is {row.name}{', by default with ' if changes else ''}{' and '.join(changes)}"


def method_hint(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean ...?" for what is not one of these objectives or losses: the name in
    other letters, the options that make the method, or the most similar name.
    """
    plain = re.sub(r"[-. @]+", "_", name.lower())
    if plain in names:
        return f"; did you mean {plain!r}?"
    flags = METHODS.get(plain, "")
    if not flags and plain in LOSSES | LOSS_ALIASES:
        flags = f"--objective grpo --loss {plain}"
    elif not flags and plain in ESTIMATORS | ALIASES:
        flags = f"--objective {plain}"
    return f"; did you mean {flags}?" if flags else nearest(plain, names)
