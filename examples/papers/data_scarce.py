"""Few mazes for many epochs: MaxRL's data-scarce regime (section 6.3, Figure 4, Table 4) at small
scale.

    python examples/papers/data_scarce.py

Objectives train on the same fixed set of mazes, from the same warm starts. The paper has GSM8K's
7,473 problems for 50 epochs, and finds that GRPO and RLOO have the highest pass@1 after about 10
epochs, and that MaxRL overtakes them after about 30. Finished runs are kept in --work, and the same
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

from maxrl_fast.errors import InputError

METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"objective": "grpo"},
    "rloo": {"objective": "rloo"},
    "maxrl": {"objective": "maxrl"},
    "pkpo-4": {"objective": "pkpo", "k": 4},
    "smoothing": {"objective": "differential_smoothing"},
}
ROLLOUTS = 16
REFERENCE = "maxrl"  # the others' differences from it are paired by seed


@dataclass(frozen=True)
class ScarceSettings(MazeSettings):
    """GRPO, RLOO, MaxRL, PKPO and Differential Smoothing on few mazes for many epochs: about 15
    minutes on one core. --threads is the number of simultaneous runs, each with one thread."""

    methods: tuple[str, ...] = tuple(METHODS)
    """Of grpo, rloo, maxrl, pkpo-4 and smoothing; each has 16 rollouts of a maze."""
    training_mazes: int = 128
    """Mazes that are trained on: a multiple of --prompts."""
    epochs: int = 80
    """Passes over them."""
    evaluations: int = 20
    """Evaluations of a run besides that of the warm start; a divisor of --epochs."""
    prompts: int = 16
    """Prompts of a step."""
    eval_samples: int = 16


def experiment(settings: ScarceSettings) -> dict[str, Any]:
    check_methods(settings.methods, METHODS, settings)
    for name, part in (("training_mazes", "prompts"), ("epochs", "evaluations")):
        value, divisor = getattr(settings, name), getattr(settings, part)
        if value < 1 or divisor < 1 or value % divisor:
            flags = f"--{name.replace('_', '-')} must be a multiple of --{part}"
            raise InputError(f"{flags}, got {value} and {divisor}")
    methods = {name: {**METHODS[name], "rollouts": ROLLOUTS} for name in settings.methods}
    steps = settings.epochs * settings.training_mazes // settings.prompts
    of_runs = methods, steps, settings.evaluations, settings.training_mazes
    results = {"runs": run_steps(settings, *of_runs)}
    show(results["runs"], settings.epochs)
    return results


def show(runs: list[dict[str, Any]], epochs: int) -> None:
    """Print means over seeds with standard errors: the evaluation at which the mean of pass@1 is
    highest; and the last quarter, of the evaluations and of training, because single ones are
    noisy. Differences from MaxRL are by seed."""
    names = list(dict.fromkeys(one["method"] for one in runs))
    table = Table("", "epoch of the highest pass@1", "pass@1 then", "pass@16 then")
    for title in ("pass@1, last quarter", "pass@16", f"pass@1 - {REFERENCE}'s"):
        table.add_column(title)
    for title in ("training pass@1", "training pass@16", "entropy"):
        table.add_column(title)

    last = partial(late, runs, share=0.25)
    for name in names:
        one, many = (series(runs, name, f"pass@{k}") for k in (1, 16))
        best = int(one.mean(0).argmax())
        ahead = ""
        if REFERENCE in names and name != REFERENCE:
            ahead = cell(last(name, "pass@1") - last(REFERENCE, "pass@1"))
        table.add_row(
            name,
            f"{epochs * best // (one.shape[1] - 1)}",
            *(cell(x[:, best]) for x in (one, many)),
            *(cell(last(name, x)) for x in ("pass@1", "pass@16")),
            ahead,
            *(cell(last(name, x)) for x in ("reward_mean", "frac_prompts_solved")),
            cell(last(name, "entropy"), 2),
        )
    show_table(table)


def draw(record: dict[str, Any]) -> Figure:
    """Draw pass@1 and pass@16 of held-out and of training mazes by epoch."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True)
    keys = ("pass@1", "pass@16", "reward_mean", "frac_prompts_solved")
    titles = (f"pass@{k} of {mazes} mazes" for mazes in ("held-out", "training") for k in (1, 16))
    for axes, key, title in zip(panels.flat, keys, titles, strict=True):
        draw_series(axes, record["results"]["runs"], key, record["settings"]["epochs"])
        axes.set(title=title, xlabel="epoch")
    panels[0, 0].legend()
    return figure


main = partial(run, "data_scarce", ScarceSettings, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
