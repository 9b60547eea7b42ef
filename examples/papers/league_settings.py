"""The three objectives that end below their warm start in the league, with other settings; and
MaxPO by K (its Figure 10).

    python examples/papers/league_settings.py

Each of `pacs_paper`, `riskpo` and `bon_off_policy` is trained as in objectives_league.py, with what
its paper or its authors' script has and this policy can have (rollouts, prompts, updates of a
step), and at a third of the league's learning rate. Finished runs are kept in --work, and the same
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

# every step has about 480 rollouts
METHODS: dict[str, dict[str, Any]] = {
    "pacs_paper": {},
    # PACS, Table 4: 8 rollouts; 1024 prompts, of which an update has 256
    "pacs_paper, 4 updates": {"prompts": 60, "rollouts": 8, "updates_per_step": 4},
    "pacs_paper, lr 1e-4": {"lr": 1e-4},
    "pacs_paper, baseline": {"baseline": "rloo"},
    "riskpo": {},
    # the authors' script: 5 rollouts, two updates of a step, bundles of 5
    "riskpo, 5 rollouts": {"prompts": 90, "rollouts": 5},
    "riskpo, lr 1e-4": {"lr": 1e-4},
    "bon_off_policy": {},
    "bon_off_policy, 1 update": {"updates_per_step": 1},
    "bon_off_policy, clamped": {"clamp_delta": 0.2},
    "bon_off_policy, lr 1e-4": {"lr": 1e-4},
    # MaxPO, Figure 10; K = 1 is rloo
    **{f"maxpo, K = {k}": {"k": k} for k in (1, 2, 4, 8, 15)},
}
LEAGUE = {"rollouts": 16, "updates_per_step": 2}
EVALUATIONS = 6


@dataclass(frozen=True)
class LeagueSettings(MazeSettings):
    """pacs_paper, riskpo and bon_off_policy on mazes, as in the league and with other settings, and
    maxpo by K: 16 minutes on one core. --threads is the number of simultaneous runs, each with one
    thread."""

    methods: tuple[str, ...] = tuple(METHODS)
    """Of the rows of the table."""
    steps: int = 60
    """Steps; a multiple of 6, the evaluations besides that of the warm start."""
    prompts: int = 30
    """Prompts of a step, of 16 rollouts each, where a row does not say otherwise."""
    eval_mazes: int = 128
    eval_samples: int = 16


def experiment(settings: LeagueSettings) -> dict[str, Any]:
    check_methods(settings.methods, METHODS, settings)
    methods = {
        name: {"objective": name.partition(",")[0], **LEAGUE, **METHODS[name]}
        for name in settings.methods
    }
    runs = run_steps(settings, methods, settings.steps, EVALUATIONS)
    show(runs)
    return {"runs": runs}


def show(runs: list[dict[str, Any]]) -> None:
    """Print means over seeds with their standard errors, of the last half of the evaluations."""
    names = list(dict.fromkeys(one["method"] for one in runs))
    keys = ("pass@1", "pass@4", "pass@16", "reward_mean", "entropy")
    table = Table("", *keys)
    table.add_row("warm start", *(cell(series(runs, names[0], key)[:, 0]) for key in keys[:3]))
    last = partial(late, runs, share=0.5)
    for name in names:
        table.add_row(name, *(cell(last(name, key)) for key in keys))
    show_table(table)


def draw(record: dict[str, Any]) -> Figure:
    """Draw pass@1 by step, in a panel for each objective."""
    runs = record["results"]["runs"]
    objectives = list(dict.fromkeys(one["method"].partition(",")[0] for one in runs))
    figure = Figure(figsize=(4.5 * len(objectives), 4), layout="constrained")
    grid = figure.subplots(1, len(objectives), sharey=True, squeeze=False)
    for axes, objective in zip(grid[0], objectives, strict=True):
        shown = [one for one in runs if one["method"].partition(",")[0] == objective]
        draw_series(axes, shown, "pass@1", record["settings"]["steps"])
        axes.set(xlabel="step", title="pass@1 of held-out mazes")
        axes.legend()
    return figure


main = partial(run, "league_settings", LeagueSettings, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
