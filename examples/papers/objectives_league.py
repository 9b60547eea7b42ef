"""Every objective on the same mazes, at an equal number of sampled tokens: pass@k, entropy,
variance of the gradient, time.

    python examples/papers/objectives_league.py

For each seed one warm start is followed by reinforcement learning with each objective, on the same
mazes, until it has sampled --tokens tokens, or for 250 steps. Each finished run is a file in
--work, and the same command continues with those that are missing.
"""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from rich.table import Table
from runner import (
    Settings,
    TokenRun,
    build,
    maze_options,
    measure_all,
    run,
    show_table,
    standard_error,
    warm_starts,
)
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.training.learner import LearningRate
from maxrl_fast.training.objectives.registry import OBJECTIVES
from maxrl_fast.training.trainer import StepRecord, Trainer

LEFT_OUT = {
    "maxrl_ratio": "is maxrl for rewards of 0 or 1",
    "reinforce": "is rloo times (N-1)/N, a constant",
    "pkpo": "is expected_improvement times k/N, a constant",
    "pacs_first_update": "is pacs in the first update of a step",
    "noisy_verifier_backward": "is for a verifier with known error rates; with an exact one it is "
    "reinforce",
    "noisy_verifier_forward": "is for a verifier with known error rates; with an exact one it is "
    "nsr",
    "gdpo": "needs several rewards",
    "hero": "needs several rewards",
}
LEAGUE = tuple(name for name in OBJECTIVES if name not in LEFT_OUT)
WARM_START = "warm start"
ROLLOUTS, UPDATES, WARMUP_STEPS = 16, 2, 10
MOST_STEPS = 250  # a policy whose responses have become short would otherwise need thousands
COLUMNS = {  # and the label of its axis
    "pass@1": "held-out mazes",
    "pass@16": "held-out mazes",
    "pass@128": "held-out mazes",
    "entropy": "nats per token",
    "gradient_variance": "over the squared mean",
    "seconds": "training, on one thread",
}
NOT_OF_WARM_START = ("gradient_variance", "seconds")


@dataclass(frozen=True)
class LeagueSettings(Settings):
    """Every objective on 9x9 mazes, at an equal number of sampled tokens: pass@1, pass@16,
    pass@128, entropy, variance of the gradient, and time. --threads is the number of simultaneous
    runs, each with one thread. It takes about 30 minutes on two cores. The same command
    resumes it."""

    objectives: tuple[str, ...] = LEAGUE
    """Objectives, with their default options."""
    seeds: int = 3
    """Seeds from --seed on; each has its own warm start and mazes."""
    tokens: int = 600_000
    """Tokens of responses that a run samples; it ends with the step that reaches them, or after 250
    steps.
    """
    maze_size: int = 9
    """Cells along one side of a maze."""
    sft_steps: int = 150
    """Warm-start steps of 64 solutions."""
    prompts: int = 30
    """Prompts per step, of 16 rollouts each; there are two updates per step, of half of the prompts
    each.
    """
    lr: float = 3e-4
    """Learning rate, the same for all objectives; constant after 10 steps of warm-up."""
    eval_mazes: int = 256
    """Held-out mazes."""
    eval_samples: int = 128
    """Samples per held-out maze."""
    variance_steps: int = 12
    """Steps whose gradients the variance is estimated from."""
    work: Path = Path("runs/objectives_league")
    """Folder of the warm starts and the finished runs."""


def experiment(settings: LeagueSettings) -> dict[str, Any]:
    refuse(settings)
    starts = warm_starts(settings, settings.work)
    runs = [
        league_run(settings, objective, seed, policy)
        for seed, policy in starts.items()
        for objective in (WARM_START, *settings.objectives)
    ]
    found = measure_all(partial(measure, settings.variance_steps), runs, settings.threads)
    results = {
        "runs": [
            {"objective": x.name, "seed": x.seed, **y} for x, y in zip(runs, found, strict=True)
        ],
        "left_out": LEFT_OUT,
    }
    show(results, vars(settings))
    return results


def refuse(settings: LeagueSettings) -> None:
    """Raise InputError where the settings make no sense."""
    if unknown := [name for name in settings.objectives if name not in LEAGUE]:
        why = f"; {unknown[0]} {LEFT_OUT[unknown[0]]}" if unknown[0] in LEFT_OUT else ""
        raise InputError(
            f"--objectives must be of {', '.join(LEAGUE)}, got {', '.join(unknown)}{why}"
        )
    for name, least in (
        ("objectives", 1),
        ("seeds", 1),
        ("tokens", 1),
        ("eval_samples", 1),
        ("variance_steps", 2),
    ):
        value = getattr(settings, name)
        if (number := len(value) if isinstance(value, tuple) else value) < least:
            raise InputError(f"--{name.replace('_', '-')} must be at least {least}, got {number}")


def league_run(settings: LeagueSettings, objective: str, seed: int, policy: str) -> TokenRun:
    """Return a run of the league, or with WARM_START the evaluation of a warm start alone."""
    is_start = objective == WARM_START
    options = maze_options(settings, seed, policy) | {
        "objective": "rloo" if is_start else objective,
        "rollouts": ROLLOUTS,
        "warmup_steps": WARMUP_STEPS,
    }
    file = settings.work / f"{objective.replace(' ', '-')}-seed{seed}.json"
    return TokenRun(objective, seed, options, 0 if is_start else settings.tokens, 1, file)


def measure(variance_steps: int, one: TokenRun) -> dict[str, Any]:
    """Train and evaluate."""
    at_start, _ = build(one.options)
    before, variance = gradient_variance(at_start, variance_steps)
    trainer, evaluator = build(one.options | {"updates_per_step": UPDATES})
    start = time.perf_counter()
    records = [*steps(trainer, one.tokens)]
    seconds = time.perf_counter() - start
    latest = records[-max(len(records) // 10, 1) :] or before
    return {
        "pass_at_k": {str(k): rate for k, rate in evaluator.evaluate().pass_at_k.items()},
        "entropy": sum(record.metrics["entropy"] for record in latest) / len(latest),
        "gradient_variance": variance,
        "seconds": seconds,
        "steps": len(records),
        "tokens": sum(record.batch.num_tokens for record in records),
    }


def steps(trainer: Trainer, tokens: int) -> Iterator[StepRecord]:
    """Train until this many tokens of responses have been sampled, or for MOST_STEPS steps, and
    give what each step did.
    """
    n = 0
    while tokens > 0 and n < MOST_STEPS:
        record = trainer.step(n + 1, n * trainer.collector.options.prompts)
        yield record
        n, tokens = n + 1, tokens - record.batch.num_tokens


def gradient_variance(trainer: Trainer, num_steps: int) -> tuple[list[StepRecord], float]:
    """Return steps of a policy that does not change, and the variance of their gradient g relative
    to its mean.

    That is tr Cov(g) / |E g|^2. With M gradients, tr Cov(g) is estimated by
    sum_m |g_m - mean|^2 / (M - 1), and |E g|^2 by |mean|^2 - tr Cov(g) / M, both without bias;
    where the second is not above 0, the ratio is infinite. A constant factor of the advantages does
    not change it. All objectives see the same rollouts.
    """
    trainer.learning_rate, trainer.learner.clip_grad = (
        LearningRate(0.0, num_steps, 0, "constant"),
        math.inf,
    )
    if trainer.learner.critic is not None:
        trainer.learner.critic.lr = 0.0
    records, gradients = list[StepRecord](), list[Tensor]()
    for n in range(num_steps):
        records.append(trainer.step(n + 1, n * trainer.collector.options.prompts))
        parts = [p.grad.flatten() for p in trainer.learner.model.parameters() if p.grad is not None]
        gradients.append(torch.cat(parts).double())
    return records, relative_variance(torch.stack(gradients))


def relative_variance(gradients: Tensor) -> float:
    """Return tr Cov / |mean|^2 of vectors [M, P], as `gradient_variance` says."""
    variance = float(gradients.var(0).sum())
    square = float(gradients.mean(0).square().sum()) - variance / len(gradients)
    return variance / square if square > 0 else math.inf


def by_objective(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each objective, the highest pass@1 first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in results["runs"]:
        found.setdefault(one["objective"], []).append(one)
    return dict(sorted(found.items(), key=lambda item: -float(column(item[1], "pass@1").mean())))


def columns(settings: dict[str, Any]) -> list[str]:
    """Return the columns that there are with this many samples."""
    return [
        name for name in COLUMNS if int(name.partition("@")[2] or 1) <= settings["eval_samples"]
    ]


def column(runs: Sequence[dict[str, Any]], name: str) -> Tensor:
    """Return a column for each run; JSON has no infinity, which is None there."""
    values = [
        one["pass_at_k"][name.removeprefix("pass@")] if name.startswith("pass@") else one[name]
        for one in runs
    ]
    return torch.tensor(
        [math.inf if value is None else value for value in values], dtype=torch.float64
    )


def cell(name: str, objective: str, runs: Sequence[dict[str, Any]]) -> str:
    """Return the mean over seeds, and its standard error."""
    if objective == WARM_START and name in NOT_OF_WARM_START:
        return ""
    if not bool(column(runs, name).isfinite().all()):
        return "inf"
    values, digits = (
        column(runs, name),
        3 if name.startswith("pass@") else 2 if name == "entropy" else 1,
    )
    return f"{float(values.mean()):.{digits}f} ± {float(standard_error(values)):.{digits}f}"


def show(results: dict[str, Any], settings: dict[str, Any]) -> None:
    """Print the table of means over seeds with their standard errors."""
    found, names = by_objective(results), columns(settings)
    table = Table("", *(name.replace("_", " ") for name in names), "seeds", "tokens")
    for objective, runs in found.items():
        tokens = f"{sum(one['tokens'] for one in runs) / len(runs):,.0f}"
        table.add_row(
            objective, *(cell(name, objective, runs) for name in names), str(len(runs)), tokens
        )
    show_table(table)


def draw(record: dict[str, Any]) -> Figure:
    """Draw a row for each objective and a panel for each column: a dot for each seed, and a bar at
    the mean where all are finite."""
    found, names = by_objective(record["results"]), columns(record["settings"])
    start = found.pop(WARM_START, None)
    figure = Figure(figsize=(2.7 * len(names), 1.6 + 0.27 * len(found)), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        for row, runs in enumerate(found.values()):
            values = column(runs, name)
            values = values[values.isfinite()]
            axes.plot(values, [row] * len(values), "o", color="tab:blue", alpha=0.45, markersize=4)
            if len(values) == len(runs):
                axes.plot(
                    float(values.mean()), row, "|", color="black", markersize=11, markeredgewidth=2
                )
        if start and name not in NOT_OF_WARM_START:
            axes.axvline(
                float(column(start, name).mean()),
                color="tab:orange",
                linestyle="--",
                label=WARM_START,
            )
        axes.set(title=name.replace("_", " "), xlabel=COLUMNS[name])
        if name == "gradient_variance":
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_yticks(range(len(found)), list(found))
    panels[0].set_ylim(len(found) - 0.4, -0.6)  # the best on top
    if start:
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside upper center", frameon=False
        )
    return figure


main = partial(run, "objectives_league", LeagueSettings, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
