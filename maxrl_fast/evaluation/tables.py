"""The tables and the coverage plot of evaluations. Estimates are as in eval.json, by k."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from maxrl_fast.evaluation.coverage import Interval, mean_over_sets, powers_of_two
from maxrl_fast.evaluation.outcome import Outcome
from maxrl_fast.evaluation.scores import MAX, PASS, label_of

CONTINUOUS = "Some rewards are neither 0 nor 1. max@1 is the mean reward."


def new_table(*columns: str) -> Table:
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def _shown(interval: Interval, form: str = ".3f") -> str:
    return f"{interval['mean']:{form}} ({interval['low']:{form}}, {interval['high']:{form}})"


def summary_tables(
    content: dict[str, Any], own: Outcome, other: Outcome | None, confidence: float
) -> list[Table]:
    baseline, score = content["baseline"], content["score"]
    others = [PASS if score == MAX else MAX, "maj_at_k"]
    name, *names = (x.replace("_at_", "@") for x in (score, *others))
    columns = ["k", f"{name} ({confidence:.0%} interval)", *names]
    table = new_table(*columns, *(["baseline"] if other else []))
    beside = [*(content[x] for x in others), *([baseline[score]] if other else [])]
    for k, interval in content[score].items():
        table.add_row(str(k), _shown(interval), *(f"{x[k]['mean']:.3f}" for x in beside))
    if score == MAX:
        table.caption = CONTINUOUS
    if other is None:
        return [table, numbers_table(outcome_rows([own]), [""])]
    gain = f"{name} - baseline's ({confidence:.0%})"
    gains = new_table("k", gain, "samples to match", "fewer")
    for k, interval in baseline["gain"].items():
        match = baseline["samples_to_match"].get(k)  # None: the baseline has nothing to match
        needed, ratio = (match["samples"], match["ratio"]) if match else ("", None)
        needed = f"> {own.num_samples}" if needed is None else str(needed)
        fewer = "" if ratio is None else f"{ratio:.2f}x"
        gains.add_row(str(k), _shown(interval, "+.3f"), needed, fewer)
    classes = {name.replace("_", " "): [count] for name, count in baseline["support"].items()}
    numbers = numbers_table(outcome_rows([own, other]), ["this", "baseline"])
    return [table, gains, numbers, numbers_table(classes, ["prompts"])]


def sets_table(sets: Sequence[dict[int, Interval]], confidence: float) -> Table:
    """Return the mean of pass@k over held-out sets, at the k that all have."""
    table = new_table("k", f"mean pass@k of {len(sets)} sets ({confidence:.0%} interval)")
    for k in [k for k in sets[0] if all(k in x for x in sets)]:
        table.add_row(str(k), _shown(mean_over_sets([x[k] for x in sets])))
    return table


def numbers_table(rows: Mapping[str, Sequence[float | None]], columns: Sequence[str]) -> Table:
    """Return one row per name, with a number in each column; None gives an empty cell."""
    table = new_table("", *columns)
    for name, values in rows.items():
        cells = (
            "" if x is None else f"{x:,}" if isinstance(x, int) else f"{x:.3f}" for x in values
        )
        table.add_row(name, *cells)
    return table


def outcome_rows(outcomes: Sequence[Outcome]) -> dict[str, Sequence[float | None]]:
    """Return the numbers of evaluations other than pass@k and max@k, for numbers_table."""
    # values by another measure of diversity than the first's are not comparable
    diversity = [
        x.numbers["diversity"] if x.measure == outcomes[0].measure else None for x in outcomes
    ]
    return {
        "prompts solved at least once": [x.solved for x in outcomes],
        "response length, tokens": [x.numbers["response_length_mean"] for x in outcomes],
        "truncated": [x.numbers["truncated"] for x in outcomes],
        "failed rewards": [x.numbers["reward_errors"] for x in outcomes],
        "diversity of correct responses": diversity,
    }


def comparison_table(
    letters: Sequence[str],
    score: str,
    estimates: Sequence[dict[int, Interval]],
    gains: Sequence[dict[int, Interval] | None],
) -> Table:
    """Return the score by k, and the gain over the first evaluation; None: without interval."""
    changes = (f"{letter} - {letters[0]}" for letter in letters[1:])
    table = new_table("held-out prompts", *letters, *changes)
    for k, first in estimates[0].items():
        changes = (
            f"{own[k]['mean'] - first['mean']:+.3f}" if gain is None else _shown(gain[k], "+.3f")
            for own, gain in zip(estimates[1:], gains, strict=True)
        )
        table.add_row(label_of(score, k), *(f"{x[k]['mean']:.3f}" for x in estimates), *changes)
    return table


def draw_coverage(
    curves: Sequence[tuple[str, Tensor, dict[int, Interval]]],
    score: str,
    confidence: float,
    path: Path,
) -> None:
    """Each curve has a name, its value at every k [n], and intervals at some k."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for i, (name, curve, intervals) in enumerate(curves):
        color, ks = f"C{i}", [*intervals]
        mean, low, high = ([x[of] for x in intervals.values()] for of in ("mean", "low", "high"))
        # Matplotlib would typeset text between dollar signs as mathematics
        label = name.replace("$", r"\$")
        axes.plot(range(1, len(curve) + 1), curve.tolist(), color=color, label=label)
        axes.plot(ks, mean, color=color, marker="o", markersize=4, linestyle="none")
        axes.fill_between(ks, low, high, color=color, alpha=0.2, linewidth=0)
    ticks = powers_of_two(max(len(curve) for _, curve, _ in curves))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    shown = f"{score.replace('_at_', '@')}, with {confidence:.0%} intervals"
    axes.set(title="Coverage", xlabel="k, samples", ylabel=shown)
    if score == PASS:
        axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    figure.savefig(path, dpi=120, format="png")
