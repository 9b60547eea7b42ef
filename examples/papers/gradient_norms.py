"""The norm of a prompt's gradient by its pass rate, measured on the same rollouts for every
objective: MaxRL's Figure 6, on mazes.

    python examples/papers/gradient_norms.py

At the warm starts of the other experiments on mazes each step has one maze, and changes no weight.
Losses are sums over the tokens of a response, so that objectives differ in their advantages alone.
"""

import math
import sys
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from runner import (
    MazeSettings,
    TokenRun,
    build,
    cell,
    check_least,
    check_methods,
    maze_options,
    measure_all,
    run,
    warm_starts,
)

from maxrl_fast.training.learner import LearningRate

METHODS = ("maxrl", "grpo", "rloo")
BOUNDS = (0, 0.1, 0.3, 0.5, 0.7, 0.9, 1)  # of the pass rates in a row of the table


@dataclass(frozen=True)
class NormSettings(MazeSettings):
    """Gradient norms of single mazes by pass rate, for MaxRL, GRPO and RLOO: 3 minutes on one
    core."""

    methods: tuple[str, ...] = METHODS
    """Of maxrl, grpo and rloo."""
    mazes: int = 128
    """Mazes of a seed."""
    rollouts: int = 64
    """Rollouts of a maze."""
    work: Path = Path("runs/mazes")
    """Folder of the warm starts and the finished measurements."""


def experiment(settings: NormSettings) -> dict[str, Any]:
    check_methods(settings.methods, METHODS, settings)
    check_least(settings, mazes=1)
    only = {"prompts": 1, "rollouts": settings.rollouts, "aggregation": "seq_mean_token_sum"}
    runs = [
        TokenRun(
            name,
            seed,
            {**maze_options(settings, seed, policy), **only, "objective": name},
            settings.mazes,
            0,
            settings.work / f"norms-{name}-{seed}.json",
        )
        for seed, policy in warm_starts(settings, settings.work).items()
        for name in settings.methods
    ]
    found = measure_all(measure, runs, settings.threads)
    results = [{"method": x.name, **outcome} for x, outcome in zip(runs, found, strict=True)]
    show(results)
    return {"runs": results}


def measure(one: TokenRun) -> dict[str, Any]:
    trainer, _ = build(one.options)
    trainer.learning_rate = LearningRate(0.0, one.tokens, 0, "constant")
    trainer.learner.clip_grad = math.inf
    metrics = [trainer.step(n + 1, n).metrics for n in range(one.tokens)]
    return {name: [step[name] for step in metrics] for name in ("reward_mean", "grad_norm")}


def show(runs: list[dict[str, Any]]) -> None:
    """Print the mean norm by pass rate, of the mazes of all seeds."""
    names = list(dict.fromkeys(one["method"] for one in runs))
    print(f"{'pass rate':<12}{'mazes':<8}", *(f"{name:<16}" for name in names))
    for low, high in pairwise(BOUNDS):
        cells = []
        for name in names:
            own = [one for one in runs if one["method"] == name]
            rates = torch.tensor([x for one in own for x in one["reward_mean"]])
            norms = torch.tensor([x for one in own for x in one["grad_norm"]])
            inside = norms[(rates > low) & (rates <= high) & (rates < 1)]
            cells.append(cell(inside) if len(inside) else "")
        print(f"{f'{low} to {high}':<12}{len(inside):<8}", *(f"{x:<16}" for x in cells))


def draw(record: dict[str, Any]) -> Figure:
    """Draw a dot for each maze: its norm by its pass rate, in a panel for each objective."""
    runs = record["results"]["runs"]
    names = list(dict.fromkeys(one["method"] for one in runs))
    figure = Figure(figsize=(4 * len(names), 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for one in runs:
            if one["method"] == name:
                axes.plot(one["reward_mean"], one["grad_norm"], ".", alpha=0.5)
        axes.set(title=name, xlabel="pass rate of a maze", ylabel="norm of its gradient")
        axes.grid(alpha=0.3)
    return figure


main = partial(run, "gradient_norms", NormSettings, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
