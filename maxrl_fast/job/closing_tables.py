"""The tables at the end of a run."""

from rich.table import Table

from maxrl_fast.evaluation.evaluator import Evaluation
from maxrl_fast.evaluation.tables import new_table
from maxrl_fast.job.screen import Screen


def closing_tables(
    screen: Screen,
    evaluations: list[Evaluation],
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


def _evaluation_table(before: Evaluation, after: Evaluation) -> Table:
    table = new_table("held-out prompts", "before", "after", "change")
    rows = {
        f"pass@{k}": (before.pass_at_k[k], after.pass_at_k[k], ".3f")
        for k in before.pass_at_k
        if k in after.pass_at_k
    }
    rows["response length, tokens"] = (
        before.response_length_mean,
        after.response_length_mean,
        ".1f",
    )
    rows["truncated"] = (before.truncated, after.truncated, ".3f")
    for name, (x, y, form) in rows.items():
        table.add_row(name, f"{x:{form}}", f"{y:{form}}", f"{y - x:+{form}}")
    return table
