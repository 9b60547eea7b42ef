"""Problems that are almost never solved: carried prompts (--carry) beside other rules for where
rollouts go, at an equal number of sampled tokens and in equal time.

    python examples/papers/never_give_up.py                # methods, on 9x9 mazes
    python examples/papers/never_give_up.py --part rounds  # R of --carry R
    python examples/papers/never_give_up.py --part changes --lr 1e-4  # R that changes
    python examples/papers/never_give_up.py --part draws --maze-size 11

Each part needs its own --out. A language model, on products of larger numbers:

    python examples/language/prepare.py --hard runs/hard
    python examples/papers/language_objectives.py --problems runs/hard
        --objectives grpo-dynamic maxrl maxrl-stop maxrl-carry

"Never Giving Up" (Noukhovitch et al. 2026) is read from its abstract: rollouts until one succeeds.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from rich.table import Table
from runner import TokenRun, check_methods, run, series, show_table, standard_error
from stopping import KS, StoppingSettings, compare, show
from torch import Tensor

from maxrl_fast import group_advantage
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.schedule import Carried, Stopping
from maxrl_fast.training.trainer import Trainer

FILE = Path(__file__)
BINS = (0, 0.02, 0.1, 1)  # upper ends of the pass rate before training
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "methods": {  # about 512 rollouts in a step
        "maxrl-16": {"objective": "maxrl"},
        "maxrl-64": {"objective": "maxrl", "rollouts": 64, "prompts": 8},
        "maxrl-stop": {"objective": "maxrl", "rollouts": 128, "stop_at": 4, "prompts": 8},
        "carry-8": {"objective": "maxrl", "carry": 8},
        "grpo-dynamic": {"objective": "grpo", "dynamic_sampling": 4, "prompts": 16},
        "ngu-sum": {"objective": f"{FILE}:ngu_sum", "rollouts": 128, "prompts": 8},
        "ngu-mean": {"objective": f"{FILE}:ngu_mean", "rollouts": 128, "prompts": 8},
    },
    "rounds": {f"carry-{r}": {"objective": "maxrl", "carry": r} for r in (2, 4, 8, 16)},
    "changes": {
        "maxrl-16": {"objective": "maxrl"},
        **{
            f"carry-{x}": {"objective": "maxrl", "carry": 8}
            for x in ("8", "falls", "half", "switch")
        },
    },
    "draws": {
        f"{name}-{rule}": {"objective": name, "draw_prompts": rule, "task": f"{FILE}:Mix"}
        for name in ("grpo", "maxrl")
        for rule in ("uniform", "learnability")
    },
}


@dataclass(frozen=True)
class HardSettings(StoppingSettings):
    """Rules for where rollouts go, from warm starts with pass@1 near .05: 15 minutes of one
    core. --threads is the number of simultaneous runs, each with one thread."""

    part: Literal["methods", "rounds", "changes", "draws"] = "methods"
    """What is compared: methods, --carry 2 to 16, --carry 8 that changes (R is halved three times,
    at most half of the places are carried, or none once fewer would be), or --draw-prompts."""
    methods: tuple[str, ...] = ()
    """Some of the part's; by default all."""
    sft_steps: int = 90
    """Warm-start steps of 64 solutions."""
    eval_mazes: int = 128
    eval_samples: int = 128
    evaluations: int = 3
    work: Path = Path("runs/never_give_up")


def ngu_sum(rewards: Tensor, valid: Tensor) -> Tensor:
    """GRPO's advantages, of however many rollouts a prompt has."""
    return group_advantage(rewards, "grpo", valid=valid)


def ngu_mean(rewards: Tensor, valid: Tensor) -> Tensor:
    """The same, divided by their number, so that prompts and not rollouts count alike."""
    return 16 * ngu_sum(rewards, valid) / valid.sum(1, keepdim=True)


class UntilSuccess(Stopping):
    """Rounds of `block` rollouts until one succeeds, up to `most` rollouts."""

    def more(self, step: int, rewards: Tensor, drawn: Tensor) -> Tensor:
        if not len(drawn):
            return super().more(step, rewards, drawn)
        return (self.most - drawn).clamp_max(self.block) * ~(rewards > 0.5).any(1)


@dataclass
class Falls(Carried):
    """R is 8, 4, 2 and 1, each for 36 steps, about a quarter of a run."""

    steps: int = 0

    def observe(self, rewards: Tensor) -> dict[str, float]:
        self.rounds = max(8 >> self.steps // 36, 1)
        self.steps += 1
        return super().observe(rewards)


class Half(Carried):
    """At most half of the places are carried: the oldest prompts are given up."""

    def observe(self, rewards: Tensor) -> dict[str, float]:
        metrics, rounds = super().observe(rewards), self.table[:, 1]
        too_many = int((rounds > 0).sum()) - len(rounds) // 2
        rounds[rounds.argsort(descending=True, stable=True)[: max(too_many, 0)]] = 0
        return metrics


class Switch(Carried):
    """Once fewer than half of the places are carried, all prompts are new."""

    def observe(self, rewards: Tensor) -> dict[str, float]:
        metrics = super().observe(rewards)
        if metrics["carried"] < len(self.table) / 2:
            self.rounds = 1
        return metrics


CHANGES = {"carry-falls": Falls, "carry-half": Half, "carry-switch": Switch}


def set_rule(one: TokenRun, trainer: Trainer) -> None:
    own = trainer.collector
    if one.name.startswith("ngu"):
        sizes = own.options
        rule = UntilSuccess(sizes.prompts, 16, sizes.rollouts, 1)
        trainer.collector = replace(own, schedule=rule)
    if one.name in CHANGES:
        assert isinstance(own.chosen, Carried)
        trainer.collector = replace(own, chosen=CHANGES[one.name](own.chosen.table, 8))


class Mix(MazeTask):
    """Mazes of odd sizes from 7 to `maze_size` in turn; the first 256 are trained on."""

    num_train_prompts = 256

    def __init__(self, maze_size: int = 9, seed: int = 0):
        super().__init__(maze_size, seed)
        self.parts = [MazeTask(size, seed) for size in range(7, maze_size + 1, 2)]

    def maze(self, split: str, index: int) -> list[list[bool]]:
        return self.parts[index % len(self.parts)].maze(split, index)

    def prompts(self, split: str, start: int, count: int) -> Prompts:
        size = self.num_train_prompts if split == "train" else sys.maxsize
        return self._encode(start, [self.maze(split, (start + i) % size) for i in range(count)])

    def score(self, prompts: Prompts, rollouts: Rollouts) -> Tensor:
        rewards = torch.zeros(len(prompts), len(rollouts) // len(prompts))
        sequences = torch.arange(len(rollouts)).view_as(rewards)
        for part in self.parts:
            own = (prompts.cu_seqlens.diff() == part.prompt_length).nonzero()[:, 0]
            if len(own):
                of_part = prompts.select(own), rollouts.select(sequences[own].flatten())
                rewards[own] = part.score(*of_part).view(len(own), -1)
        return rewards.flatten()


def experiment(settings: HardSettings) -> dict[str, Any]:
    known, start = PARTS[settings.part], list[str]()
    check_methods(settings.methods, known, settings)
    if settings.part == "draws":
        settings, start = replace(settings, work=settings.work / "mix"), [f"--task={FILE}:Mix"]
    methods = {name: known[name] for name in settings.methods or known}
    runs = compare(settings, methods, set_rule, start)
    show(runs)
    table = Table("mazes with a success in the end, by pass rate before", *map(str, BINS))
    for one in runs:
        before, after = torch.tensor(one.pop("correct")) / settings.eval_samples
        bins = torch.bucketize(before, torch.tensor(BINS))
        one["solved_by_bin"] = [
            [int((after[bins == i] > 0).sum()), int((bins == i).sum())] for i in range(len(BINS))
        ]
        one["steps"] = len(one["draws"])
        for name in ("draws", "solved", "logprob_diff"):
            one[name] = sum(one[name]) / one["steps"]
    for name in methods:
        counts = torch.tensor([x["solved_by_bin"] for x in runs if x["method"] == name]).sum(0)
        table.add_row(name, *(f"{solved} of {of}" for solved, of in counts.tolist()))
    show_table(table)
    return {"runs": runs}


def draw(record: dict[str, Any]) -> Figure:
    """Draw pass@1 and the last pass@k by sampled tokens; errors are over seeds."""
    runs, figure = record["results"]["runs"], Figure(figsize=(8, 3.4), layout="constrained")
    ks = KS[: len(runs[0]["passes"][0])]
    for which, axes in zip((0, -1), figure.subplots(1, 2), strict=True):
        for name in dict.fromkeys(one["method"] for one in runs):
            values = series(runs, name, "passes")[..., which]
            tokens = series(runs, name, "tokens").double().mean(0)
            axes.errorbar(tokens, values.mean(0), standard_error(values), label=name)
        axes.set(title=f"pass@{ks[which]}", xlabel="sampled tokens")
    axes.legend(fontsize=7)
    return figure


main = partial(run, "never_give_up", HardSettings, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
