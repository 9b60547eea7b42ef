"""The tables at the end of a run."""

from typing import Any

from rich.table import Table

from maxrl_fast.evaluation.scores import PASS, label_of, score_of
from maxrl_fast.evaluation.tables import new_table
from maxrl_fast.job.screen import Screen


def closing_tables(
    screen: Screen,
    evaluations: list[dict[str, Any]],
    seconds: dict[str, float],
    tokens: dict[str, int],
    files: dict[str, str],
) -> None:
    """Print the first and last evaluation, each stage's seconds, and the files."""
    if len(evaluations) > 1:
        screen.console.print(_evaluation_table(evaluations[0], evaluations[-1]))
    table = new_table("stage", "seconds", "share", "tokens/s")
    total = sum(seconds.values())
    for stage, value in seconds.items():
        speed = f"{tokens[stage] / value:,.0f}" if tokens.get(stage) else ""
        table.add_row(stage, f"{value:.1f}", f"{value / max(total, 1e-9):.0%}", speed)
    table.add_row("total", f"{total:.1f}", "", "")
    screen.console.print(table)
    for name, path in files.items():
        screen.info(f"{name:<12}{path}")


def _evaluation_table(before: dict[str, Any], after: dict[str, Any]) -> Table:
    score = score_of([before, after])
    table = new_table("held-out prompts", "before", "after", "change")
    for k, x in before.get(score, before[PASS]).items():
        if (y := after.get(score, {}).get(k)) is not None:
            table.add_row(label_of(score, k), f"{x:.3f}", f"{y:.3f}", f"{y - x:+.3f}")
    x, y = before["response_length_mean"], after["response_length_mean"]
    table.add_row("response length, tokens", f"{x:.1f}", f"{y:.1f}", f"{y - x:+.1f}")
    x, y = before["truncated"], after["truncated"]
    table.add_row("truncated", f"{x:.3f}", f"{y:.3f}", f"{y - x:+.3f}")
    return table
