"""Tables of estimates, which are as in eval.json, by k."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from maxrl_fast.evaluation import MAX, PASS, label_of
from maxrl_fast.evaluation.coverage import Interval

CONTINUOUS = "Some rewards are neither 0 nor 1. max@1 is the mean reward."


def new_table(*columns: str) -> Table:
    """The first column has names, the others numbers, which stay whole."""
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=i > 0, overflow="fold")
    return table


def shown(interval: Interval, form: str = ".3f") -> str:
    bounds = [f"{interval[name]:{form}}" for name in ("low", "high") if name in interval]
    return f"{interval['mean']:{form}}" + f" ({', '.join(bounds)})" * bool(bounds)


def add_scores(
    table: Table,
    score: str,
    means: Sequence[Mapping[Any, float]],
    changes: Sequence[Mapping[Any, Interval]],
) -> None:
    """Add a row for each k that all have: its label, the means and the changes."""
    for k in means[0]:
        if all(k in own for own in means):
            cells = [f"{own[k]:.3f}" for own in means]
            table.add_row(label_of(score, k), *cells, *(shown(own[k], "+.3f") for own in changes))


def summary_table(content: Mapping[str, Any], confidence: float) -> Table:
    score = content["score"]
    others = [PASS if score == MAX else MAX, "maj_at_k"]
    name, *names = (x.replace("_at_", "@") for x in (score, *others))
    table = new_table("k", f"{name} ({confidence:.0%} interval)", *names)
    for k, interval in content[score].items():
        means = (f"{content[x][k]['mean']:.3f}" for x in others)
        table.add_row(str(k), shown(interval), *means)
    if score == MAX:
        table.caption = CONTINUOUS
    return table
