"""Objectives on mazes by the number of rollouts per prompt: MaxRL's Figure 3 and Table 3 at small
scale, on two CPU cores.

One warm start is followed by reinforcement learning with each objective, group size and seed.
Steps, prompts and learning rate are the same for all, so larger groups sample more. The paper has
17x17 mazes, 3.9 million parameters and 9000 steps (maze_paper.toml); here there are 9x9 mazes, a
small decoder and few steps.

    python examples/papers/maze_scaling.py

The runs are in --work. A script that was stopped resumes them.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table
from runner import (
    Settings,
    check_least,
    flags_of,
    records,
    run,
    show_table,
    thinned,
    train_all,
    warm_start_flags,
)

from maxrl_fast.errors import InputError


@dataclass(frozen=True)
class ScalingSettings(Settings):
    """MaxRL's Figure 3 and Table 3 at small scale: pass@1 and pass@128 after training with each
    objective, by rollouts per prompt. --threads is the number of simultaneous runs, each with one
    thread. It takes 20 minutes on two cores."""

    objectives: tuple[str, ...] = ("maxrl", "maxpo", "pacs", "grpo", "rloo", "pkpo")
    """Objectives; maxpo and pkpo use k = N/4, at least 2."""
    rollouts: tuple[int, ...] = (4, 16, 64)
    """Rollouts per prompt N."""
    seeds: int = 2
    """Runs of each, with seeds from --seed + 1 on; with the seed of the warm start they would begin
    with its mazes.
    """
    maze_size: int = 9
    """Cells along one side of a maze."""
    sft_steps: int = 150
    """Warm-start steps of 64 solutions."""
    steps: int = 90
    """Steps of reinforcement learning."""
    prompts: int = 16
    """Prompts per step."""
    lr: float = 3e-4
    """Peak learning rate, the same for all objectives. At 5e-4, from a warm start of 90 steps that
    solves one maze in 20, some runs with few rollouts lost all their skill within ten steps."""
    eval_mazes: int = 256
    """Held-out mazes."""
    eval_samples: int = 128
    """Samples per held-out maze; pass@k is reported up to this k."""
    work: Path = Path("runs/maze_scaling")
    """Folder of the training runs."""


def run_flags(
    settings: ScalingSettings, objective: str, n: int, seed: int, policy: Path
) -> list[str]:
    """Return the flags of a reinforcement learning run, which is evaluated before, halfway and
    after.
    """
    options: dict[str, Any] = {
        "objective": objective,
        "rollouts": n,
        "seed": seed,
        "task": "maze",
        "model": policy,
        "sft-steps": 0,
    }
    options |= {
        "maze-size": settings.maze_size,
        "prompts": settings.prompts,
        "steps": settings.steps,
        "lr": settings.lr,
    }
    options |= {"warmup-steps": max(settings.steps // 4, 1), "save-every": 0}
    options |= {"eval-prompts": settings.eval_mazes, "eval-samples": settings.eval_samples}
    options["eval-every"] = max(settings.steps // 2, 1)
    if objective in ("maxpo", "pkpo"):
        options["k"] = max(n // 4, 2)
    return flags_of(options)


def experiment(settings: ScalingSettings) -> dict[str, Any]:
    check_least(settings, seeds=1, steps=1, eval_samples=1)
    if min(settings.rollouts) < 4:
        raise InputError(f"--rollouts must be at least 4 each, got {min(settings.rollouts)}")
    warm = train_all(
        {"warm-start": warm_start_flags(settings.maze_size, settings.sft_steps, settings.seed)},
        settings.work,
        1,
        "warm start",
    )["warm-start"]
    policy = warm / "checkpoints" / "step-000000"
    keys = [  # the longest first, so that no long run is left alone at the end
        (objective, n, settings.seed + 1 + i)
        for n in sorted(settings.rollouts, reverse=True)
        for i in range(settings.seeds)
        for objective in settings.objectives
    ]
    names = {key: "{}-{}-seed{}".format(*key) for key in keys}
    flags = {names[key]: run_flags(settings, *key, policy) for key in keys}
    folders = train_all(flags, settings.work, settings.threads, "runs")
    results = {"runs": [outcome(*key, folders[names[key]]) for key in keys]}
    show(results, settings)
    return results


def outcome(objective: str, n: int, seed: int, folder: Path) -> dict[str, Any]:
    """Summarize a run from its files."""
    metrics, evaluations = records(folder / "metrics.jsonl"), records(folder / "eval.jsonl")
    return {
        "objective": objective,
        "rollouts": n,
        "seed": seed,
        "pass_at_k": {record["step"]: record["pass_at_k"] for record in evaluations},
        "reward": thinned([record["reward_mean"] for record in metrics], 20),
        "prompts_solved": thinned([record["frac_prompts_solved"] for record in metrics], 20),
        "entropy": thinned([record["entropy"] for record in metrics], 20),
        "tokens": sum(record["num_tokens"] for record in metrics),
        "seconds": sum(json.loads((folder / "timings.json").read_text()).values()),
    }


def averages(runs: Sequence[dict[str, Any]], k: int, first: bool = False) -> tuple[float, float]:
    """Return the mean over runs of pass@k in the last (or first) evaluation, and half of the
    range.
    """
    values = [list(run["pass_at_k"].values())[0 if first else -1][f"{k}"] for run in runs]
    return sum(values) / len(values), (max(values) - min(values)) / 2


def chosen(results: dict[str, Any], objective: str, n: int) -> list[dict[str, Any]]:
    return [
        run for run in results["runs"] if run["objective"] == objective and run["rollouts"] == n
    ]


def show(results: dict[str, Any], settings: ScalingSettings) -> None:
    """Print the table: mean over seeds, and half of the range."""
    ks = sorted({1, settings.eval_samples})
    table = Table("", *(f"pass@{k}, N = {n}" for n in settings.rollouts for k in ks))
    table.add_row(
        "warm start",
        *(
            "{:.3f}".format(*averages(results["runs"], k, first=True))
            for _ in settings.rollouts
            for k in ks
        ),
    )
    for objective in settings.objectives:
        cells = (averages(chosen(results, objective, n), k) for n in settings.rollouts for k in ks)
        table.add_row(objective, *("{:.3f} ± {:.3f}".format(*cell) for cell in cells))
    show_table(table)


def draw(record: dict[str, Any]) -> Figure:
    results, settings = record["results"], record["settings"]
    largest, k = max(settings["rollouts"]), settings["eval_samples"]
    figure = Figure(figsize=(12, 9), layout="constrained")
    one, many, coverage, training = figure.subplots(2, 2).flat
    for axes, size in ((one, 1), (many, k)):
        for objective in settings["objectives"]:
            points = [averages(chosen(results, objective, n), size) for n in settings["rollouts"]]
            middle, spread = zip(*points, strict=True)
            axes.errorbar(
                settings["rollouts"], middle, yerr=spread, marker="o", capsize=3, label=objective
            )
        axes.axhline(
            averages(results["runs"], size, first=True)[0],
            color="0.5",
            linestyle="--",
            label="warm start",
        )
        axes.set(
            title=f"pass@{size} after {settings['steps']} steps",
            xscale="log",
            xlabel="rollouts per prompt N",
        )
        axes.set_xticks(settings["rollouts"], [str(n) for n in settings["rollouts"]], minor=False)
        axes.minorticks_off()
    for objective in settings["objectives"]:
        runs = chosen(results, objective, largest)
        ks = [int(size) for size in list(runs[0]["pass_at_k"].values())[-1]]
        coverage.plot(ks, [averages(runs, size)[0] for size in ks], marker="o", label=objective)
        steps = [step for step, _ in runs[0]["reward"]]
        rewards = [sum(run["reward"][i][1] for run in runs) / len(runs) for i in range(len(steps))]
        training.plot(steps, rewards, label=objective)
    coverage.plot(
        ks,
        [averages(results["runs"], size, first=True)[0] for size in ks],
        color="0.5",
        linestyle="--",
        label="warm start",
    )
    coverage.set(title=f"coverage after training, N = {largest}", xscale="log", xlabel="k")
    coverage.set_xticks(ks, [str(size) for size in ks])
    coverage.minorticks_off()
    training.set(title=f"rollouts solved in training, N = {largest}", xlabel="step")
    for axes in (one, many, coverage, training):
        axes.set_ylabel("fraction")
        axes.grid(alpha=0.3)
    handles, labels = one.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return figure


main = partial(run, "maze_scaling", ScalingSettings, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
