"""Guessing a number in four turns: objectives over turns against their known optima.

The task is examples/guess.py: a number from 1 to 31 is hidden, a turn is one number, and the reply
is HIGHER or LOWER. A tree of four guesses covers 15 numbers. So the mean of the pass rates p(x) is
at most 15/31, which a policy with one tree reaches, and the mean of log p(x) is at most log(15/31),
which only a policy reaches that solves every number with p = 15/31; its pass@k, 1 - (16/31)^k, is
the highest possible for every k.

    python examples/papers/guessing.py

For each seed one warm start on won games is followed by reinforcement learning with each objective,
until it has sampled --tokens tokens. Evaluations sample every number. Finished runs are kept in
--work, and the same command continues with those that are missing.
"""

import math
import sys
from collections.abc import Sequence
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
    run,
    show_table,
    standard_error,
    train_all,
)
from torch import Tensor

from maxrl_fast.config.read import parse_options
from maxrl_fast.evaluation.coverage import pass_at_k
from maxrl_fast.evaluation.evaluator import Evaluator

TASK = f"{Path(__file__).parents[1] / 'guess.py'}:GuessTask"
NUMBERS, COVERED = 31, 15
POLICY = {"hidden-size": 64, "intermediate-size": 128, "layers": 2, "heads": 4, "kv-heads": 2}
# with the seed of the warm start, reinforcement learning would begin with its prompts
SEED_SHIFT = 1000


@dataclass(frozen=True)
class GuessingSettings(Settings):
    """Objectives on guessing a number in four turns, against their known optima: 12 minutes on two
    cores. --threads is the number of simultaneous runs, each with one thread."""

    objectives: tuple[str, ...] = (
        *("maxrl", "maxpo-k4", "maxpo-k16", "pacs"),
        *("grpo", "rloo", "reinforce"),
    )
    """Objectives; maxpo-k4 is maxpo with k = 4."""
    seeds: int = 3
    """Seeds from --seed on; each has its own warm start."""
    tokens: int = 3_000_000
    """Sampled tokens of a run, which ends with the step that reaches them."""
    sft_steps: int = 500
    """Warm-start steps of 128 won games."""
    rollouts: int = 32
    """Rollouts of each of the 31 numbers in a step."""
    lr: float = 2e-3
    """Peak learning rate, the same for all objectives; 25 steps of warm-up, then a cosine."""
    evaluations: int = 6
    """Evaluations of a run, after equal numbers of tokens, besides that of the warm start."""
    eval_samples: int = 1024
    """Samples of each number in an evaluation."""
    work: Path = Path("runs/guessing")
    """Folder of the warm starts and the finished runs."""


def experiment(settings: GuessingSettings) -> dict[str, Any]:
    check_least(settings, seeds=1, tokens=1, evaluations=1, eval_samples=1)
    for objective in settings.objectives:
        parse_options(options_of(settings, objective))
    seeds = range(settings.seed, settings.seed + settings.seeds)
    flags = {f"start-seed{seed}": warm_start_flags(settings, seed) for seed in seeds}
    folders = train_all(flags, settings.work, settings.threads, "warm starts")
    runs = [
        guessing_run(settings, objective, seed, folders[f"start-seed{seed}"])
        for seed in seeds
        for objective in settings.objectives
    ]
    outcomes = measure_all(measure, runs, settings.threads)
    results = {
        "runs": [
            {"objective": one.name, "seed": one.seed, **outcome}
            for one, outcome in zip(runs, outcomes, strict=True)
        ]
    }
    show(results, settings.eval_samples)
    return results


def warm_start_flags(settings: GuessingSettings, seed: int) -> list[str]:
    options = {"task": TASK, "seed": seed, "steps": 0, "sft-steps": settings.sft_steps}
    options |= {"sft-batch": 128, "sft-lr": 3e-3, "eval-prompts": NUMBERS}
    return flags_of(options | POLICY)


def options_of(settings: GuessingSettings, objective: str) -> dict[str, Any]:
    name, _, k = objective.partition("-k")
    options: dict[str, Any] = {
        "objective": name,
        "task": TASK,
        "prompts": NUMBERS,
        "rollouts": settings.rollouts,
        "lr": settings.lr,
        # of the schedule; a game of a good policy has 7.3 tokens
        "steps": max(int(settings.tokens / (7.3 * NUMBERS * settings.rollouts)), 1),
        "eval_prompts": NUMBERS,
        "eval_samples": settings.eval_samples,
        "keep_rollouts": 0,
        "threads": 1,
        "device": "cpu",
        "dtype": "float32",
    }
    return options | ({"k": int(k) if k.isdigit() else k} if k else {})


def guessing_run(
    settings: GuessingSettings, objective: str, seed: int, warm_start: Path
) -> TokenRun:
    options = options_of(settings, objective) | {
        "seed": seed + SEED_SHIFT,
        "model": str(warm_start / "checkpoints" / "step-000000"),
    }
    file = settings.work / f"{objective}-seed{seed}.json"
    return TokenRun(objective, seed, options, settings.tokens, settings.evaluations, file)


def measure(one: TokenRun) -> dict[str, Any]:
    trainer, evaluator = build(one.options)
    tokens, num_correct = [0], [correct_by_number(evaluator)]
    done = num_steps = 0
    while done < one.tokens:
        done += trainer.step(num_steps + 1, num_steps * NUMBERS).batch.num_tokens
        num_steps += 1
        if done >= len(tokens) * one.tokens / one.evaluations:
            tokens.append(done)
            num_correct.append(correct_by_number(evaluator))
    return {"steps": num_steps, "tokens": tokens, "num_correct": num_correct}


def correct_by_number(evaluator: Evaluator) -> list[int]:
    """Return how many samples guess each number, in order."""
    counts = dict[int, int]()

    def keep(samples: Any, rewards: Tensor, components: Any) -> None:
        won = rewards.view(len(samples.prompts), -1).sum(1).int().tolist()
        counts.update(
            (line["answer"], number)
            for line, number in zip(samples.prompts.columns, won, strict=True)
        )

    evaluator.evaluate(keep=keep)
    return [counts[x] for x in range(1, NUMBERS + 1)]


def highest(k: int) -> float:
    """Return the highest pass@k that a policy can have."""
    return 1 - (1 - COVERED / NUMBERS) ** k


def passes(num_correct: Sequence[int], k: int, num_samples: int) -> float:
    return float(pass_at_k(num_samples, torch.tensor(num_correct), k).mean())


def mean_log(num_correct: Sequence[int], num_samples: int) -> float:
    """Return the mean of log p(x); half a sample more keeps it finite where none is correct."""
    rates = (torch.tensor(num_correct).double() + 0.5) / (num_samples + 1)
    return float(rates.log().mean())


COLUMNS = ("pass@1", "pass@4", "pass@16", "mean log p", "lowest p", "highest p")
BOUNDS = [*(highest(k) for k in (1, 4, 16)), math.log(COVERED / NUMBERS), *2 * [COVERED / NUMBERS]]


def values_of(num_correct: Sequence[int], num_samples: int) -> list[float]:
    """Return the values of COLUMNS; for a policy with p(x) = 15/31 they are BOUNDS."""
    rates = [count / num_samples for count in num_correct]
    return [
        *(passes(num_correct, k, num_samples) for k in (1, 4, 16)),
        mean_log(num_correct, num_samples),
        min(rates),
        max(rates),
    ]


def by_objective(results: dict[str, Any], evaluation: int = -1) -> dict[str, list[list[int]]]:
    """Return the counts of each objective's runs, by seed, at one of the evaluations."""
    found: dict[str, list[list[int]]] = {}
    for one in results["runs"]:
        found.setdefault(one["objective"], []).append(one["num_correct"][evaluation])
    return found


def show(results: dict[str, Any], num_samples: int) -> None:
    """Print the table of means over seeds with their standard errors."""
    table = Table("", *COLUMNS)
    starts, *_ = by_objective(results, 0).values()
    for name, runs in {"warm start": starts, **by_objective(results)}.items():
        values = torch.tensor([values_of(counts, num_samples) for counts in runs])
        numbers = zip(values.mean(0).tolist(), standard_error(values).tolist(), strict=True)
        table.add_row(name, *(f"{mean:.3f} ± {error:.3f}" for mean, error in numbers))
    table.add_row("p(x) = 15/31", *(f"{bound:.3f}" for bound in BOUNDS))
    show_table(table)


def draw(record: dict[str, Any]) -> Figure:
    """Draw pass@k by k, the mean of log p by sampled tokens, and the p(x) of each run in order,
    means over seeds, with the bounds."""
    results, num_samples = record["results"], record["settings"]["eval_samples"]
    figure = Figure(figsize=(14, 4.6), layout="constrained")
    coverage, curves, rates = figure.subplots(1, 3)
    ks = [2**i for i in range(min(7, num_samples.bit_length()))]
    for name, runs in by_objective(results).items():
        coverage.plot(
            ks,
            [sum(passes(counts, k, num_samples) for counts in runs) / len(runs) for k in ks],
            marker=".",
            label=name,
        )
        of_name = [one for one in results["runs"] if one["objective"] == name]
        points = [
            (
                sum(one["tokens"][i] for one in of_name) / len(of_name),
                sum(mean_log(one["num_correct"][i], num_samples) for one in of_name) / len(of_name),
            )
            for i in range(len(of_name[0]["tokens"]))
        ]
        curves.plot(*zip(*points, strict=True), marker=".")
        in_order = torch.tensor(runs).sort(1, descending=True).values / num_samples
        rates.plot(range(1, NUMBERS + 1), in_order.mean(0), marker=".")
    coverage.plot(ks, [highest(k) for k in ks], "k--", label="the highest possible")
    coverage.axhline(highest(1), color="k", linestyle=":", label="one tree of four guesses")
    curves.axhline(math.log(highest(1)), color="k", linestyle="--")
    rates.axhline(highest(1), color="k", linestyle="--")
    rates.step(
        range(1, NUMBERS + 1), [1.0] * COVERED + [0.0] * (NUMBERS - COVERED), "k:", where="mid"
    )
    coverage.set(title="pass@k after training", xlabel="k", xscale="log")
    coverage.set_xticks(ks, [str(k) for k in ks])
    coverage.minorticks_off()
    curves.set(title="mean of log p(x)", xlabel="sampled tokens")
    rates.set(title="p(x), the numbers of each run in order", xlabel="rank of the number")
    for axes in (coverage, curves, rates):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=5, frameon=False)
    return figure


main = partial(run, "guessing", GuessingSettings, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
