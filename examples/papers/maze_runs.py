"""Shared by the experiments on mazes: for each seed one warm start, and runs that begin with it."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from experiment import Settings, standard_error
from matplotlib.axes import Axes
from maze_scaling import ScalingSettings, warm_start_flags
from objectives_league import SEED_SHIFT, build
from torch import Tensor
from training_runs import TokenRun, measure_all, thinned, train_all

from maxrl_fast.errors import InputError
from maxrl_fast.records import Prompts
from maxrl_fast.training.trainer import Trainer

KEPT = ("reward_mean", "frac_prompts_solved", "entropy", "moment_variance")


@dataclass(frozen=True)
class MazeSettings(Settings):
    """Settings of a comparison of methods on mazes."""

    seeds: int = 3
    """Seeds from --seed on; each has its own warm start and mazes."""
    maze_size: int = 9
    """Cells along one side of a maze."""
    sft_steps: int = 150
    """Warm-start steps of 64 solutions."""
    prompts: int = 32
    """Prompts of a step."""
    lr: float = 3e-4
    """Learning rate, constant."""
    eval_mazes: int = 256
    """Held-out mazes."""
    eval_samples: int = 64
    """Samples of each in an evaluation."""


def check_methods(methods: Sequence[str], known: Iterable[str], settings: MazeSettings) -> None:
    """Raise InputError for a method that does not exist, or for no seeds."""
    if unknown := set(methods) - set(known):
        raise InputError(f"--methods must be of {', '.join(known)}, got {min(unknown)}")
    if settings.seeds < 1:
        raise InputError(f"--seeds must be at least 1, got {settings.seeds}")


def warm_starts(settings: MazeSettings, work: Path) -> dict[int, str]:
    """Train the warm start of each seed, and return their policies."""
    of = partial(ScalingSettings, maze_size=settings.maze_size, sft_steps=settings.sft_steps)
    seeds = range(settings.seed, settings.seed + settings.seeds)
    flags = {f"start-{seed}": warm_start_flags(of(seed=seed)) for seed in seeds}
    starts = train_all(flags, work, settings.threads, "warm starts")
    return {seed: str(starts[f"start-{seed}"] / "checkpoints" / "step-000000") for seed in seeds}


def maze_options(settings: MazeSettings, seed: int, policy: str) -> dict[str, Any]:
    """Return the options that all runs of a seed have in common."""
    return {
        "task": "maze",
        "seed": seed + SEED_SHIFT,
        "model": policy,
        "maze_size": settings.maze_size,
        "prompts": settings.prompts,
        "lr": settings.lr,
        "lr_schedule": "constant",
        "warmup_steps": 10,
        "eval_prompts": settings.eval_mazes,
        "eval_samples": settings.eval_samples,
        "keep_rollouts": 0,
        "threads": 1,
        "device": "cpu",
        "dtype": "float32",
    }


def repeat_prompts(trainer: Trainer, count: int) -> None:
    """Make the first `count` training prompts all that there are, so that training has epochs."""
    of_task = trainer.collector.task
    repeating = copy.copy(of_task)

    def prompts(split: str, first: int, num: int) -> Prompts:
        numbers = (torch.arange(first, first + num) % count).tolist()
        return Prompts.concatenate([of_task.prompts(split, i, 1) for i in numbers])

    vars(repeating)["prompts"] = prompts
    trainer.collector = replace(trainer.collector, task=repeating)


def run_steps(
    settings: MazeSettings,
    work: Path,
    methods: dict[str, dict[str, Any]],
    steps: int,
    evaluations: int,
    training_mazes: int = 0,
) -> list[dict[str, Any]]:
    """Train with the options of each method for `steps` steps from the warm start of each seed, and
    return what `measure_steps` does, with the method's name."""
    runs = [
        TokenRun(
            name,
            seed,
            {**maze_options(settings, seed, policy), **options, "steps": steps},
            0,  # the steps are the limit
            evaluations,
            work / f"{name}-{training_mazes}-{seed}.json",
        )
        for seed, policy in warm_starts(settings, work).items()
        for name, options in methods.items()
    ]
    found = measure_all(partial(measure_steps, training_mazes), runs, settings.threads)
    return [{"method": x.name, **outcome} for x, outcome in zip(runs, found, strict=True)]


def measure_steps(training_mazes: int, one: TokenRun) -> dict[str, Any]:
    """Train, and return pass@k of held-out mazes at the start and after equal numbers of steps, and
    the means over the steps between of what KEPT names."""
    trainer, evaluator = build(one.options)
    if training_mazes:
        repeat_prompts(trainer, training_mazes)
    steps, metrics, passes = (
        one.options["steps"],
        list[dict[str, float]](),
        list[dict[int, float]](),
    )
    for step in range(steps + 1):
        if step:
            next_prompt = (step - 1) * trainer.collector.num_prompts
            metrics.append(trainer.step(step, next_prompt).metrics)
        if step % (steps // one.evaluations) == 0:
            passes.append(evaluator.evaluate().pass_at_k)
    means = {x: thinned([step[x] for step in metrics], one.evaluations) for x in KEPT}
    return {
        **{f"pass@{k}": [at_k[k] for at_k in passes] for k in passes[0]},
        **{name: [mean for _, mean in pairs] for name, pairs in means.items()},
    }


def series(runs: list[dict[str, Any]], method: str, key: str) -> Tensor:
    """Return what the runs of a method have measured: [seeds, points]."""
    return torch.tensor([one[key] for one in runs if one["method"] == method])


def late(runs: list[dict[str, Any]], method: str, key: str, share: float) -> Tensor:
    """Return the mean of the last points of `series`, this share of all: [seeds]. Single
    evaluations of such small policies are noisy."""
    values = series(runs, method, key)
    return values[:, -max(int(values.shape[1] * share), 1) :].mean(1)


def draw_series(axes: Axes, runs: list[dict[str, Any]], key: str, end: float) -> None:
    """Draw a line for each method, with standard errors over seeds; evaluations begin at 0, means
    of training at the end of the first stretch."""
    for name in dict.fromkeys(one["method"] for one in runs):
        values = series(runs, name, key)
        points = values.shape[1]
        stretch = end / (points - 1 if key.startswith("pass@") else points)
        x = [end - stretch * i for i in reversed(range(points))]
        mean, error = values.mean(0), standard_error(values)
        axes.plot(x, mean, label=name)
        axes.fill_between(x, mean - error, mean + error, alpha=0.15)
    axes.grid(alpha=0.3)
