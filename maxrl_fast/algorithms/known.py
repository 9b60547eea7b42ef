"""The names of methods in words: what an alias stands for, and what to write for another name."""

import re
from collections.abc import Iterable
from typing import Any

from maxrl_fast.algorithms.estimators import ALIASES, ESTIMATORS
from maxrl_fast.algorithms.losses import ALIASES as LOSS_ALIASES
from maxrl_fast.algorithms.losses import LOSSES
from maxrl_fast.errors import nearest


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
    other letters, the option that has it, or the most similar name."""
    plain = re.sub(r"[-. @]+", "_", name.lower())
    if plain in names:
        return f"; did you mean {plain!r}?"
    if plain in LOSSES | LOSS_ALIASES:
        return f"; did you mean --objective grpo --loss {plain}?"
    if plain in ESTIMATORS | ALIASES:
        return f"; did you mean --objective {plain}?"
    return nearest(plain, names)
