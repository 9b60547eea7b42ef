"""MaxRL that stops, fixed numbers of rollouts, and GRPO with dynamic sampling on mazes, at an equal
number of sampled tokens and in equal time.

    python examples/papers/stopping.py
    python examples/papers/stopping.py --training-mazes 256 --out runs/papers/scarce

All runs of a seed start from the same warm start. Finished runs are kept in --work, and the same
command continues with those that are missing.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table
from runner import (
    MazeSettings,
    TokenRun,
    build,
    check_least,
    check_methods,
    maze_options,
    measure_all,
    repeat_prompts,
    run,
    show_table,
    standard_error,
    warm_starts,
)

from maxrl_fast.training.trainer import Trainer

METHODS: dict[str, dict[str, Any]] = {
    "maxrl-16": {"objective": "maxrl", "rollouts": 16},
    "maxrl-64": {"objective": "maxrl", "rollouts": 64},
    "maxrl-stop": {"objective": "maxrl", "rollouts": 128, "stop_at": 4},
    "grpo-dynamic": {"objective": "grpo", "rollouts": 16, "dynamic_sampling": 4},
}
KS = (1, 16, 64, 128)
Change = Callable[[TokenRun, Trainer], None]


@dataclass(frozen=True)
class StoppingSettings(MazeSettings):
    """MaxRL that stops (4 successes of at most 128 rollouts), MaxRL with 16 and 64 rollouts, GRPO
    with dynamic sampling: about 7 minutes on two cores. --threads is the number of simultaneous
    runs, each with one thread."""

    methods: tuple[str, ...] = tuple(METHODS)
    """Of maxrl-16, maxrl-64, maxrl-stop and grpo-dynamic."""
    tokens: int = 600_000
    """Sampled tokens of a run, which ends with the step that reaches them."""
    training_mazes: int = 0
    """Mazes that are trained on, in epochs; 0: new ones in every step."""
    evaluations: int = 6
    """Evaluations of a run, after equal numbers of tokens, besides that of the warm start."""
    work: Path = Path("runs/stopping")


def experiment(settings: StoppingSettings) -> dict[str, Any]:
    check_methods(settings.methods, METHODS, settings)
    results = compare(settings, {name: METHODS[name] for name in settings.methods})
    show(results)
    return {"runs": results}


def compare(
    settings: StoppingSettings,
    methods: Mapping[str, Mapping[str, Any]],
    change: Change | None = None,
    start: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Train with the options of each method, for each seed from its warm start, and measure.
    `change` is of each run's trainer, `start` are flags of the warm starts."""
    check_least(settings, tokens=1, evaluations=1)
    runs = [
        maze_run(settings, name, {**maze_options(settings, seed, policy), **method}, seed)
        for seed, policy in warm_starts(settings, settings.work, start).items()
        for name, method in methods.items()
    ]
    measured = partial(measure, settings.training_mazes, change)
    found = measure_all(measured, runs, settings.threads)
    return [{"method": x.name, **outcome} for x, outcome in zip(runs, found, strict=True)]


def maze_run(settings: StoppingSettings, name: str, options: dict[str, Any], seed: int) -> TokenRun:
    file = settings.work / f"{name}-{settings.training_mazes}-{seed}.json"
    return TokenRun(name, seed, options, settings.tokens, settings.evaluations, file)


def measure(training_mazes: int, change: Change | None, one: TokenRun) -> dict[str, Any]:
    trainer, evaluator = build(one.options)
    if change:
        change(one, trainer)
    if training_mazes:
        repeat_prompts(trainer, training_mazes)
    outcome: dict[str, list[Any]] = {"tokens": [], "seconds": [], "passes": [], "correct": []}
    draws, solved, moved = list[float](), list[float](), list[float]()
    tokens, seconds, next_prompt = 0, 0.0, 0
    while True:
        if tokens >= len(outcome["tokens"]) * one.tokens / one.evaluations:
            trainer.load_engine()  # with --ahead it has older weights
            evaluation = evaluator.evaluate()
            outcome["tokens"].append(tokens)
            outcome["seconds"].append(seconds)
            passes = evaluation.pass_at_k
            outcome["passes"].append([passes[k] for k in KS if k in passes])
            outcome["correct"][1:] = [evaluation.num_correct.tolist()]  # the first and the last
        if tokens >= one.tokens:
            return {**outcome, "draws": draws, "solved": solved, "logprob_diff": moved}
        start = time.process_time()  # of one thread, whatever else the machine does
        record = trainer.step(len(draws) + 1, next_prompt)
        seconds += time.process_time() - start
        next_prompt += record.batch.num_sampled
        tokens += record.batch.num_tokens
        rewards = record.batch.all_rewards
        draws.append(float(rewards.isfinite().sum()) / len(rewards))
        solved.append(record.metrics["frac_prompts_solved"])
        moved.append(record.metrics["logprob_diff"])


def at_time(one: dict[str, Any], seconds: float) -> list[float]:
    """Return pass@k after so many seconds, between the two evaluations around them."""
    times, passes = torch.tensor(one["seconds"]), torch.tensor(one["passes"])
    after = int(torch.searchsorted(times, seconds).clamp(1, len(times) - 1))
    share = (seconds - times[after - 1]) / (times[after] - times[after - 1])
    mixed: list[float] = torch.lerp(passes[after - 1], passes[after], share).tolist()
    return mixed


def show(runs: list[dict[str, Any]]) -> None:
    """Print means over seeds with their standard errors; equal time is that of the fastest run."""
    shortest = min(one["seconds"][-1] for one in runs)
    ks = KS[: len(runs[0]["passes"][0])]
    table = Table("", *(f"pass@{k}" for k in ks), *(f"in {shortest:.3g} s: pass@{k}" for k in ks))
    for column in ("steps", "rollouts of a prompt", "prompts without success", "seconds"):
        table.add_column(column)
    for name in dict.fromkeys(one["method"] for one in runs):
        own = [one for one in runs if one["method"] == name]
        ends = torch.tensor([one["passes"][-1] + at_time(one, shortest) for one in own])
        pairs = zip(ends.mean(0), standard_error(ends), strict=True)
        draws, solved = ([x for one in own for x in one[key]] for key in ("draws", "solved"))
        table.add_row(
            name,
            *(f"{mean:.3f} ± {error:.3f}" for mean, error in pairs),
            f"{len(draws) / len(own):.0f}",
            f"{sum(draws) / len(draws):.1f}",
            f"{1 - sum(solved) / len(solved):.3f}",
            f"{sum(one['seconds'][-1] for one in own) / len(own):.0f}",
        )
    show_table(table)


def draw(record: dict[str, Any]) -> Figure:
    """Draw pass@k of held-out mazes by sampled tokens and by seconds, a line for each run."""
    runs = record["results"]["runs"]
    figure = Figure(figsize=(11, 7), layout="constrained")
    num_rows = min(2, len(runs[0]["passes"][0]))
    rows = figure.subplots(num_rows, 2, sharey="row", squeeze=False)
    for which, axes in enumerate(rows):
        for place, key in zip(axes, ("tokens", "seconds"), strict=True):
            for i, name in enumerate(dict.fromkeys(one["method"] for one in runs)):
                own = [one for one in runs if one["method"] == name]
                for n, one in enumerate(own):
                    passes = torch.tensor(one["passes"])[:, which]
                    place.plot(one[key], passes, color=f"C{i}", label=None if n else name)
            place.set(xlabel=key, ylabel=f"pass@{KS[which]} of held-out mazes")
            place.grid(alpha=0.3)
    rows[0, 0].legend()
    return figure


main = partial(run, "stopping", StoppingSettings, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
