"""PACS's ablations on mazes: beta (Figure 4), scores (Tables 9 to 13) and class weights (Tables 2,
6 to 8), and the entropy of training (Figure 5a), beside GRPO and RLOO.

    python examples/papers/pacs_ablations.py

As in the paper, a step has four updates, each on a quarter of its prompts: in the first one all
scores are 0, and beta only scales the gradient. Finished runs are kept in --work, and the same
command continues with those that are missing.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table
from runner import (
    MazeSettings,
    cell,
    check_methods,
    draw_series,
    late,
    run,
    run_steps,
    series,
    show_table,
)

PACS = "pacs"  # beta 1, score rloo, class weights
METHODS: dict[str, dict[str, Any]] = {
    PACS: {},
    **{f"beta-{beta:g}": {"beta": beta} for beta in (0.1, 0.5, 2.0, 10.0)},
    "no-weight": {"class_weight": "none"},
    **{f"score-{score}": {"score": score} for score in ("grpo", "dr_grpo", "naive")},
    "grpo": {"objective": "grpo"},
    "rloo": {"objective": "rloo"},
}
PANELS = {
    "beta": (PACS, "beta-0.1", "beta-0.5", "beta-2", "beta-10"),
    "scores": (PACS, "score-grpo", "score-dr_grpo", "score-naive"),
    "weight and other objectives": (PACS, "no-weight", "grpo", "rloo"),
}
KS = (1, 4, 16)
UPDATES, EVALUATIONS = 4, 6


@dataclass(frozen=True)
class AblationSettings(MazeSettings):
    """PACS on mazes with other values of beta, other scores, and without class weights: about 10
    minutes on one core. --threads is the number of simultaneous runs, each with one thread."""

    methods: tuple[str, ...] = tuple(METHODS)
    """Of pacs (beta 1, score rloo, class weights), beta-0.1, beta-0.5, beta-2, beta-10, no-weight,
    score-grpo, score-dr_grpo, score-naive, grpo and rloo."""
    seeds: int = 5
    """Seeds from --seed on; each has its own warm start and mazes."""
    steps: int = 24
    """Steps of four updates; a multiple of 6, the evaluations besides that of the warm start."""
    eval_samples: int = 32


def experiment(settings: AblationSettings) -> dict[str, Any]:
    check_methods(settings.methods, METHODS, settings)
    shared = {"objective": PACS, "rollouts": 16, "updates_per_step": UPDATES}
    methods = {name: {**shared, **METHODS[name]} for name in settings.methods}
    runs = run_steps(settings, methods, settings.steps, EVALUATIONS)
    show(runs)
    return {"runs": runs}


def show(runs: list[dict[str, Any]]) -> None:
    """Print means over seeds with their standard errors, of the last half of the evaluations and of
    training; differences from PACS are by seed."""
    names = list(dict.fromkeys(one["method"] for one in runs))
    keys = [*(f"pass@{k}" for k in KS if f"pass@{k}" in runs[0]), "entropy"]
    table = Table("", *keys, *(f"{key} - {PACS}'s" for key in ("pass@1", keys[-2], "entropy")))
    table.add_row("warm start", *(cell(series(runs, names[0], key)[:, 0]) for key in keys[:-1]))
    last = partial(late, runs, share=0.5)
    for name in names:
        cells = [cell(last(name, key)) for key in keys]
        if PACS in names and name != PACS:
            apart = (last(name, x) - last(PACS, x) for x in ("pass@1", keys[-2], "entropy"))
            cells += map(cell, apart)
        table.add_row(name, *cells)
    show_table(table)


def draw(record: dict[str, Any]) -> Figure:
    """Draw pass@1, pass@16 and entropy by step: a column each for beta, scores, and the rest."""
    runs = record["results"]["runs"]
    figure = Figure(figsize=(14, 10), layout="constrained")
    rows = [key for key in ("pass@1", "pass@16", "entropy") if key in runs[0]]
    grid = figure.subplots(len(rows), len(PANELS), sharex=True, sharey="row", squeeze=False)
    for column, (title, names) in enumerate(PANELS.items()):
        shown = [one for one in runs if one["method"] in names]
        for axes, key in zip(grid[:, column], rows, strict=True):
            draw_series(axes, shown, key, record["settings"]["steps"])
        grid[0, column].set(title=title)
        grid[-1, column].set(xlabel="step")
        if shown:
            grid[0, column].legend()
    for axes, key in zip(grid[:, 0], rows, strict=True):
        axes.set(ylabel=f"{key} of held-out mazes" if key != "entropy" else "entropy, nats")
    return figure


main = partial(run, "pacs_ablations", AblationSettings, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
