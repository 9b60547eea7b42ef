"""Self-distillation beside rewards: does a teacher that reads a correct response cost coverage, and
does the objective repair it? On 7x7 mazes with open walls, which have several shortest ways.

    python examples/papers/self_distillation.py

Warm starts learn to read a way before the maze (sibling) and after it (answer): it is the solution
in half of these examples, and another shortest way in the others. Then every method samples
--tokens tokens. A bandit, enumerated, shows where the teacher's term leads. Finished runs are kept
in --work, and the same command continues with those that are missing.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from runner import (
    POLICY,
    MazeSettings,
    TokenRun,
    build,
    cell,
    check_least,
    flags_of,
    maze_options,
    measure_all,
    run,
    standard_error,
    train_all,
)
from torch import Tensor

from maxrl_fast.evaluation.coverage import pass_at_k
from maxrl_fast.ops import group_advantage
from maxrl_fast.records import Prompts, Rollouts, pack, unpack
from maxrl_fast.rollout import RolloutRequest
from maxrl_fast.tasks import ReferenceAnswer
from maxrl_fast.tasks.maze import (
    DONE,
    EOS,
    MOVES,
    WALL,
    Cell,
    Grid,
    MazeTask,
    cells_of,
    encode_maze,
    generate_maze,
)
from maxrl_fast.tasks.text_codec import prompts_of

OBJECTIVES: dict[str, dict[str, Any]] = {"grpo": {}, "maxrl": {}, "maxpo": {"k": 4}}
TEACHERS = ("none", "answer", "sibling")
KS, SAMPLES, START, COUNTS = (1, 16, 64), 64, "warm start", ("correct", "distinct")
ACTIONS, CORRECT, ROLLOUTS = 5, 3, 4  # of the bandit


class OpenMazes(MazeTask):
    """Mazes of which each inner wall is open with probability `opened`."""

    def __init__(self, maze_size: int = 7, opened: float = 0.3, seed: int = 0):
        super().__init__(maze_size, seed)
        self.opened = opened

    def maze(self, split: str, index: int) -> Grid:
        rng = random.Random(f"open {self.size} {split} {self.seed} {index}")
        while True:
            grid, inner = generate_maze(self.size, rng), range(1, self.size - 1)
            for row, column in product(inner, inner):
                grid[row][column] |= rng.random() < self.opened
            if (crc32(bytes(encode_maze(grid))) % 5 == 0) == (split == "test"):
                return grid

    def demonstrations(self, start: int, count: int) -> tuple[Prompts, Rollouts]:
        prompts, answers = list[list[int]](), list[list[int]]()
        for i in range(start, start + count):
            rng, grid = random.Random(f"way {self.seed} {i}"), self.maze("train", i)
            tokens, hint = encode_maze(grid), [*shortest_way(grid, rng), DONE]
            # to read what follows the maze is harder to learn
            prompts.append([tokens, hint + tokens, tokens + hint, tokens + hint][i % 4])
            is_hint = i % 4 > 0 and rng.random() < 0.5
            answers.append([*(hint if is_hint else [*shortest_way(grid, rng), DONE]), EOS])
        ids = [*range(start, start + count)]
        return prompts_of(prompts, ids, [{}] * count), Rollouts.given(answers)

    def reference_answers(self, prompts: Prompts, rollouts: Rollouts) -> list[ReferenceAnswer]:
        grids, num = (cells_of(prompts, self.size) != WALL).tolist(), len(rollouts) // len(prompts)
        ways = [[*shortest_way(grid, random.Random(0)), DONE] for grid in grids]
        return [ReferenceAnswer(0, [], way) for way in ways for _ in range(num)]


def shortest_way(grid: Grid, rng: random.Random) -> list[int]:
    """Return a shortest way, at each cell by one of the moves towards the goal."""
    goal = len(grid) - 2, len(grid) - 2
    left, cells = {goal: 0}, [goal]

    def near(place: Cell) -> list[tuple[int, Cell]]:
        around = [(move, (place[0] + x, place[1] + y)) for move, (x, y) in MOVES.items()]
        return [(move, (row, column)) for move, (row, column) in around if grid[row][column]]

    for place in cells:
        for _, other in near(place):
            if other not in left:
                left[other] = left[place] + 1
                cells.append(other)
    way, place = list[int](), (1, 1)
    while place != goal:
        moves = [pair for pair in near(place) if left[pair[1]] < left[place]]
        move, place = moves[int(rng.random() * len(moves))]
        way.append(move)
    return way


@dataclass(frozen=True)
class SelfDistillationSettings(MazeSettings):
    """No teacher, the answer or a sibling beside grpo, maxrl and maxpo: 15 minutes of one core.
    --threads is the number of simultaneous runs, each with one thread."""

    maze_size: int = 7
    """Cells along one side of a maze."""
    sft_steps: int = 600
    """Warm-start steps of 64 solutions, after which a teacher reads what it is given."""
    prompts: int = 16
    """Mazes of a step, of 16 rollouts each."""
    tokens: int = 100_000
    """Sampled tokens of a run, which ends with the step that reaches them."""
    coefficient: float = 0.1
    """--kl-coef of the teacher's term."""
    eval_mazes: int = 64
    """Held-out mazes, of 64 samples each."""
    work: Path = Path("runs/self_distillation")


def experiment(settings: SelfDistillationSettings) -> dict[str, Any]:
    check_least(settings, seeds=1, tokens=1, eval_mazes=1)
    task = {"task": f"{Path(__file__).resolve()}:OpenMazes", "maze_size": settings.maze_size}
    seeds = range(settings.seed, settings.seed + settings.seeds)
    common: dict[str, Any] = {**POLICY, "steps": 0, "sft-steps": settings.sft_steps}
    common |= {"sft-batch": 64, "sft-lr": 3e-3, "eval-prompts": 16, "task": task["task"]}
    flags = {f"start-{x}": flags_of({**common, "seed": x}) for x in seeds}
    folders = train_all(flags, settings.work, settings.threads, "warm starts")
    starts = {x: folders[f"start-{x}"] / "checkpoints" / "step-000000" for x in seeds}
    methods: dict[str, dict[str, Any]] = {START: {}}
    term = {"kl": "full", "kl_coef": settings.coefficient}
    for teacher, (name, own) in product(TEACHERS, OBJECTIVES.items()):
        more = term | {"teacher_prompt": teacher} if teacher != "none" else {}
        methods[f"{name}, {teacher}"] = {"objective": name} | own | more
    # a teacher that follows the policy, or stays what it was
    methods["grpo, sibling, slow"] = methods["grpo, sibling"] | {"teacher_ema": 0.05}
    for name in OBJECTIVES:
        methods[f"{name}, sibling, fixed"] = methods[f"{name}, sibling"] | {"reference": START}
    runs = [
        TokenRun(
            name,
            x,
            maze_options(settings, x, str(starts[x]))
            | {**task, "rollouts": 16, "steps": 10**6}
            | own
            | ({"reference": str(starts[x])} if "reference" in own else {}),
            settings.tokens * (name != START),
            settings.eval_mazes,
            settings.work / f"{name.replace(', ', '-')}-{x}.json",
        )
        for x in seeds
        for name, own in methods.items()
    ]
    found = measure_all(measure, runs, settings.threads)
    results = {"runs": [{"method": x.name, **y} for x, y in zip(runs, found, strict=True)]}
    show(results["runs"])
    return results | {"bandit": bandits(settings)}


def measure(one: TokenRun) -> dict[str, Any]:
    trainer, _ = build(one.options)
    collector, done, taught = trainer.collector, 0, list[float]()
    while done < one.tokens:
        record = trainer.step(len(taught) + 1, len(taught) * collector.options.prompts)
        done += record.batch.num_tokens
        taught.append(record.metrics.get("frac_with_teacher", 0.0))
    task: Any = collector.task
    mazes = task.prompts("test", 0, one.evaluations)

    def answers(prompts: Prompts) -> tuple[Rollouts, Tensor]:
        request = RolloutRequest(prompts, SAMPLES, collector.sampling, one.seed)
        rollouts = trainer.engine.generate(request)
        return rollouts, task.score(mazes, rollouts).view(-1, SAMPLES) > 0

    rollouts, is_correct = answers(mazes)
    found = [x.answer for x in task.reference_answers(mazes, Rollouts.given([[]] * len(mazes)))]
    own = unpack(mazes.tokens, mazes.lengths)
    read = {
        "answer": [maze + way for maze, way in zip(own, found, strict=True)],
        "sibling": [way + maze for maze, way in zip(own, found, strict=True)],
    }
    ways = iter(map(tuple, unpack(rollouts.tokens, rollouts.lengths)))
    different = [
        {way for x, way in zip(row, ways, strict=False) if x} for row in is_correct.tolist()
    ]
    return {
        "steps": len(taught),
        "taught": sum(taught) / max(len(taught), 1),
        "correct": is_correct.sum(1).tolist(),
        "distinct": [*map(len, different)],
        "entropy": -float(rollouts.logprobs.mean()),
        # how often what a teacher reads gives a correct answer
        "reads": {
            name: float(answers(Prompts(*pack(x), mazes.ids))[1].double().mean())
            for name, x in read.items()
        },
    }


def values(runs: list[dict[str, Any]], method: str) -> dict[str, Tensor]:
    """Return pass@k and the distinct correct answers of each held-out maze of each seed."""
    own = [one for one in runs if one["method"] == method]
    correct, distinct = (torch.tensor([x[key] for x in own]).flatten() for key in COUNTS)
    rates = {f"pass@{k}": pass_at_k(SAMPLES, correct, k) for k in KS}
    return rates | {"distinct": distinct.double()}


def show(runs: list[dict[str, Any]]) -> None:
    """Print means with standard errors over mazes and seeds, and the differences from the runs
    without a teacher, paired by maze."""
    keys = [*values(runs, START)]
    table = Table("", *keys, "entropy", "taught", "reads", *(f"{key} - none" for key in keys))
    for name in dict.fromkeys(one["method"] for one in runs):
        own, apart = values(runs, name), list[str]()
        of_name = [one for one in runs if one["method"] == name]
        means = [sum(x[key] for x in of_name) / len(of_name) for key in ("entropy", "taught")]
        if name != START:
            alone = values(runs, f"{name.partition(',')[0]}, none")
            apart = [cell(own[key] - alone[key]) for key in keys]
        means += [sum(x["reads"][key] for x in of_name) / len(of_name) for key in TEACHERS[1:]]
        numbers = [f"{x:.3f}" for x in means[:2]] + [", ".join(f"{x:.2f}" for x in means[2:])]
        table.add_row(name, *map(cell, own.values()), *numbers, *apart)
    (Console() if sys.stdout.isatty() else Console(width=200)).print(table)


def bandits(settings: SelfDistillationSettings) -> dict[str, Any]:
    """Follow the exact gradient on bandits, with all groups. A teacher copies its sibling, or knows
    which actions are correct: its logits are the policy's, and 1 more for these. Return how many
    actions the correct ones are worth, e to their entropy, at a pass@1 of .9 and at the end."""
    actions, one_hot = torch.arange(ACTIONS), torch.eye(ACTIONS, dtype=torch.float64)
    groups = torch.cartesian_prod(*[actions] * ROLLOUTS)
    rewards = (groups < CORRECT).float()
    # the chance of each action as the sibling of a group's first rollout
    siblings = (one_hot[groups[:, 1:]] * rewards[:, 1:, None]).sum(1)
    siblings = siblings / siblings.sum(1, keepdim=True).clamp_min(1)
    teachers = {"none": 0 * one_hot, "copies": one_hot, "knows": (actions < CORRECT).double()}
    found, draws = dict[str, list[list[float]]](), torch.Generator().manual_seed(settings.seed)
    start = torch.randn(5, ACTIONS, generator=draws, dtype=torch.float64)
    for (name, own), (teacher, more) in product(OBJECTIVES.items(), teachers.items()):
        options: dict[str, Any] = {"k": 2} if own else {}
        advantages = group_advantage(rewards, name, **options).double()
        logits, early = start.clone().requires_grad_(), torch.full((5,), torch.nan).double()
        for _ in range(1000):
            log_p = logits.log_softmax(-1)
            chance = log_p.detach()[:, groups].sum(-1).exp()  # [bandits, groups]
            loss = -(chance * (advantages * log_p[:, groups]).mean(-1)).sum()
            log_q = (log_p.detach()[:, None] + more).log_softmax(-1)  # by the sibling
            apart = (log_p.exp()[:, None] * (log_p[:, None] - log_q)).sum(-1)
            loss = loss + settings.coefficient * (chance @ siblings * apart).sum()
            logits.data -= torch.autograd.grad(loss, logits)[0]
            correct = logits.detach()[:, :CORRECT].log_softmax(-1)
            number = (-(correct.exp() * correct).sum(-1)).exp()
            is_new = early.isnan() & (logits.softmax(-1)[:, :CORRECT].sum(-1) > 0.9)
            early = torch.where(is_new, number, early)
        found[f"{name}, {teacher}"] = [early.tolist(), number.tolist()]
        print(f"{name}, {teacher:8}", *map(cell, (early, number)))
    return found


def draw(record: dict[str, Any]) -> Figure:
    """Draw pass@1, pass@64 and the number of distinct correct answers, with errors over mazes."""
    runs, figure = record["results"]["runs"], Figure(figsize=(12, 5), layout="constrained")
    keys = "pass@1", f"pass@{SAMPLES}", "distinct"
    for axes, key in zip(figure.subplots(1, 3), keys, strict=True):
        for name in dict.fromkeys(one["method"] for one in runs if one["method"] != START):
            teacher = TEACHERS.index(name.split(", ")[1])
            own = values(runs, name)[key]
            axes.bar(name, own.mean(), yerr=standard_error(own), color=f"C{teacher}")
        axes.axhline(float(values(runs, START)[key].mean()), color="k", linestyle="--")
        axes.tick_params("x", rotation=90)
        axes.set(title=f"{key} (line: {START})")
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    return run("self_distillation", SelfDistillationSettings, experiment, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
