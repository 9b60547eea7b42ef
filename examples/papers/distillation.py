"""On-policy distillation beside reinforcement learning of the same policy, at equal tokens.

The default job's trained policy teaches a policy of half its width after a warm start: with the
objective `distill`, by the estimate k2 of the reverse KL or by the exact divergence. Beside it the
same policy learns from rewards with the objective of the default job. A second part gives MaxRL and
MaxPO a term of the teacher (--kl-coef) where nearly all groups fail: with 4 rollouts to a maze.

    python examples/papers/distillation.py

For each seed a teacher and a warm start are trained, and then each method samples --tokens tokens.
Finished runs are kept in --work, and the same command continues with those that are missing.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table
from runner import (
    Settings,
    TokenRun,
    build,
    check_least,
    flags_of,
    measure_all,
    records,
    run,
    show_table,
    standard_error,
    train_all,
)

from maxrl_fast.evaluation.evaluator import Evaluator

METHODS: dict[str, dict[str, Any]] = {
    "maxpo": {"objective": "maxpo", "k": 4},
    "distill, k2": {"objective": "distill", "kl": "k2"},
    "distill, full": {"objective": "distill", "kl": "full"},
}
FEW = 4  # rollouts of a maze in the second part
OBJECTIVES: dict[str, dict[str, Any]] = {
    "maxrl": {"objective": "maxrl"},
    "maxpo": {"objective": "maxpo", "k": FEW - 1},
}
STUDENT = {"hidden-size": 64, "intermediate-size": 128, "heads": 4, "kv-heads": 2}
# with the seed of the warm start, reinforcement learning would begin with its prompts
SEED_SHIFT = 1000
ROLLOUTS = 16


@dataclass(frozen=True)
class DistillationSettings(Settings):
    """A policy of half the width learns from the default job's policy, from rewards, or from both:
    12 minutes on two cores. --threads is the number of simultaneous runs, each with one thread."""

    seeds: int = 3
    """Seeds from --seed on; each has its own teacher and warm start."""
    maze_size: int = 9
    """Cells along one side of a maze, odd; the rewards are 0 or 1."""
    tokens: int = 600_000
    """Sampled tokens of a run, which ends with the step that reaches them."""
    teacher_steps: int = 90
    """Reinforcement learning steps of the teacher, after its own warm start."""
    sft_steps: int = 100
    """Steps of both warm starts."""
    prompts: int = 32
    """Mazes of a step; each has 16 rollouts."""
    lr: float = 1e-4
    """Peak learning rate of `maxrl` and `maxpo`; 25 steps of warm-up, then constant."""
    distill_lr: float = 1e-3
    """The same of `distill`."""
    coefficients: tuple[float, ...] = (0.0, 0.1, 1.0)
    """Values of --kl-coef in the second part, with --kl full."""
    evaluations: int = 6
    """Evaluations of a run, after equal numbers of tokens, besides that of the warm start."""
    eval_mazes: int = 256
    """Mazes of an evaluation, with 16 samples each."""
    work: Path = Path("runs/distillation")
    """Folder of the teachers, the warm starts and the finished runs."""


def experiment(settings: DistillationSettings) -> dict[str, Any]:
    check_least(
        settings, seeds=1, tokens=1, teacher_steps=1, prompts=1, evaluations=1, eval_mazes=1
    )
    shared = {"maze-size": settings.maze_size, "sft-steps": settings.sft_steps}
    shared |= {"eval-prompts": settings.eval_mazes, "prompts": settings.prompts}
    seeds = range(settings.seed, settings.seed + settings.seeds)
    flags = {}
    for seed in seeds:
        teacher = {"seed": seed, "steps": settings.teacher_steps, "eval-every": 0}
        flags[f"teacher-seed{seed}"] = flags_of(shared | teacher)
        flags[f"start-seed{seed}"] = flags_of(shared | STUDENT | {"seed": seed, "steps": 0})
    folders = train_all(flags, settings.work, settings.threads, "teachers and warm starts")
    runs = [
        distillation_run(settings, method, options, seed, folders)
        for seed in seeds
        for method, options in (METHODS | with_terms(settings)).items()
    ]
    outcomes = measure_all(measure, runs, settings.threads)
    teachers = [records(folders[f"teacher-seed{seed}"] / "eval.jsonl")[-1] for seed in seeds]
    results = {
        "teachers": [evaluation["pass_at_k"] for evaluation in teachers],
        "runs": [
            {"method": one.name, "seed": one.seed, **outcome}
            for one, outcome in zip(runs, outcomes, strict=True)
        ],
    }
    show(results)
    return results


def with_terms(settings: DistillationSettings) -> dict[str, dict[str, Any]]:
    """Return the methods of the second part, which sample as many responses in a step."""
    prompts = {"prompts": settings.prompts * ROLLOUTS // FEW, "rollouts": FEW}
    return {
        f"{name}, {coefficient:g}": options
        | prompts
        | ({"kl_coef": coefficient, "kl": "full"} if coefficient else {})
        for name, options in OBJECTIVES.items()
        for coefficient in settings.coefficients
    }


def distillation_run(
    settings: DistillationSettings,
    method: str,
    options: dict[str, Any],
    seed: int,
    folders: dict[str, Path],
) -> TokenRun:
    teacher, start = (
        folders[f"{name}-seed{seed}"] / "checkpoints" for name in ("teacher", "start")
    )
    options = {
        "task": "maze",
        "maze_size": settings.maze_size,
        "seed": seed + SEED_SHIFT,
        "model": str(start / "step-000000"),
        "prompts": settings.prompts,
        "rollouts": ROLLOUTS,
        "lr": settings.lr,
        "lr_schedule": "constant",
        "warmup_steps": 25,
        "eval_prompts": settings.eval_mazes,
        "eval_samples": 16,
        "keep_rollouts": 0,
        "threads": 1,
        "device": "cpu",
        "dtype": "float32",
    } | options
    if "kl" in options:
        options["reference"] = str(teacher / f"step-{settings.teacher_steps:06}")
    if options["objective"] == "distill":
        options["lr"] = settings.distill_lr
    file = settings.work / f"{method.replace(', ', '-')}-seed{seed}.json"
    return TokenRun(method, seed, options, settings.tokens, settings.evaluations, file)


def measure(one: TokenRun) -> dict[str, Any]:
    trainer, evaluator = build(one.options)
    done, num_steps, kl, evaluations = 0, 0, list[float](), [evaluated(evaluator, 0, 0)]
    while done < one.tokens:
        record = trainer.step(num_steps + 1, num_steps * trainer.collector.options.prompts)
        done += record.batch.num_tokens
        num_steps += 1
        kl.append(record.metrics.get("kl", 0.0))
        if done >= len(evaluations) * one.tokens / one.evaluations:
            evaluations.append(evaluated(evaluator, num_steps, done))
    return {"evaluations": evaluations, "kl": kl}


def evaluated(evaluator: Evaluator, step: int, tokens: int) -> dict[str, float]:
    rates = evaluator.evaluate().pass_at_k
    return {"step": step, "tokens": tokens} | {str(k): rate for k, rate in rates.items()}


def of_method(results: dict[str, Any], method: str, key: str) -> torch.Tensor:
    """Return an entry of the evaluations [seeds, evaluations]."""
    runs = [one for one in results["runs"] if one["method"] == method]
    return torch.tensor([[float(x[key]) for x in one["evaluations"]] for one in runs])


def show(results: dict[str, Any]) -> None:
    """Print the table of means over seeds with their standard errors."""
    table = Table("", *(f"pass@{k}" for k in (1, 4, 16)), "steps")
    first = next(iter(METHODS))

    def add(name: str, values: list[torch.Tensor], steps: str) -> None:
        numbers = (f"{x.mean():.3f} ± {standard_error(x):.3f}" for x in values)
        table.add_row(name, *numbers, steps)

    keys = ("1", "4", "16")
    add("warm start", [of_method(results, first, k)[:, 0] for k in keys], "")
    add("teacher", [torch.tensor([x[k] for x in results["teachers"]]) for k in keys], "")
    for name in dict.fromkeys(one["method"] for one in results["runs"]):
        steps = f"{of_method(results, name, 'step')[:, -1].mean():.0f}"
        add(name, [of_method(results, name, k)[:, -1] for k in keys], steps)
    show_table(table)


def draw(record: dict[str, Any]) -> Figure:
    """Draw pass@1 and pass@16 by steps, the divergence from the teacher, and pass@16 at the end of
    the second part by coefficient; means over seeds."""
    results = record["results"]
    figure = Figure(figsize=(18, 4.6), layout="constrained")
    *passes, divergence, terms = figure.subplots(1, 4)
    for axes, k in zip(passes, ("1", "16"), strict=True):
        for name in METHODS:
            values = of_method(results, name, k)
            steps = of_method(results, name, "step").mean(0)
            axes.errorbar(steps, values.mean(0), standard_error(values), marker=".", label=name)
        teacher = sum(x[k] for x in results["teachers"]) / len(results["teachers"])
        axes.axhline(teacher, color="k", linestyle="--", label="teacher")
        axes.set(title=f"pass@{k}", xlabel="step")
    for i, name in enumerate(METHODS):
        curves = [one["kl"] for one in results["runs"] if one["method"] == name]
        if name.startswith("distill"):
            length = min(map(len, curves))
            mean = torch.tensor([curve[:length] for curve in curves]).mean(0)
            divergence.plot(range(1, length + 1), mean, color=f"C{i}")
    divergence.set(title="divergence from the teacher, nats per token", xlabel="step", yscale="log")
    coefficients = [f"{x:g}" for x in record["settings"]["coefficients"]]
    for name in OBJECTIVES:
        for k, line in (("1", "-"), ("16", "--")):
            last = [of_method(results, f"{name}, {x}", k)[:, -1] for x in coefficients]
            means, errors = [x.mean() for x in last], [standard_error(x) for x in last]
            label = f"{name}, pass@{k}"
            terms.errorbar(coefficients, means, errors, marker=".", linestyle=line, label=label)
    terms.set(title=f"rewards and teacher, {FEW} rollouts", xlabel="coefficient of the teacher")
    terms.legend()
    for axes in (*passes, divergence, terms):
        axes.grid(alpha=0.3)
    passes[0].legend()
    return figure


main = partial(run, "distillation", DistillationSettings, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
