"""The mazes of continuous_maxrl.py: training with partial credit, each objective from one warm
start.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from runner import Settings, flags_of, records, standard_error, train_all
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.evaluation.coverage import max_at_k, powers_of_two
from maxrl_fast.ops import ESTIMATORS
from maxrl_fast.tasks.maze import MazeTask

REWARD = f"{Path(__file__).parent / 'maze_progress.py'}:fraction_of_the_way"
OBJECTIVES = (
    "rloo",
    "grpo",
    "maxrl_ratio",
    "maxpo-2",
    "maxpo-4",
    "maxpo-8",
    "maxrl-2",
    "maxrl-4",
    "maxrl-8",
    "maxrl-15",
)
POLICY = {"hidden-size": 64, "intermediate-size": 128, "layers": 2, "heads": 4, "kv-heads": 2}
CURVES = {"max_at_k": "max", "solved_at_k": "solved"}


@dataclass(frozen=True)
class MazeSettings(Settings):
    """Settings of the mazes."""

    rollouts: int = 16
    """N, the group size. On the bandits T is 1, 2, 4, ... up to N/2, and N-1."""
    maze: int = 9
    """Cells along one side of a maze."""
    warm_steps: int = 300
    """Steps of supervised learning before all runs."""
    maze_steps: int = 120
    """Steps of reinforcement learning; 0 leaves the mazes out."""
    maze_prompts: int = 16
    """Mazes per step, with N rollouts each."""
    maze_lr: float = 3e-4
    """Learning rate (Adam with gradients clipped at norm 0.1, so the scale of the advantages
    matters little).
    """
    objectives: tuple[str, ...] = OBJECTIVES
    """Objectives of the trainer, each with its order or k after a dash."""
    seeds: int = 2
    """Runs per objective."""
    eval_mazes: int = 128
    """Held-out mazes."""
    eval_samples: int = 64
    """Samples per held-out maze."""
    work: Path = Path("runs/continuous_maxrl")
    """Folder of the training runs, which are resumed after a stop."""


def objective_flags(objective: str, rollouts: int) -> dict[str, Any]:
    """Return the trainer's flags for an objective such as "maxrl-4".

    Raises InputError for an unknown objective or its size does not fit.
    """
    name, _, size = objective.partition("-")
    row = ESTIMATORS.get(name)
    if row is None or not (size.isdecimal() or not size):
        raise InputError(
            "--objectives must be names of estimators, with a dash and a number or without, got "
            f"{objective!r}"
        )
    given = {row.size.name if row.size else "k": int(size)} if size else {}
    try:
        row.resolve_size(rollouts, **given)
    except ValueError as error:
        raise InputError(f"--objectives {objective}: {error}") from None
    return {"objective": name, **given}


def mazes(settings: MazeSettings) -> dict[str, Any]:
    """Return, for each objective, max@k and the fraction solved in k samples on held-out mazes:
    mean and error over seeds.
    """
    common = {
        "task": "maze",
        "reward": REWARD,
        "reward-workers": 1,
        "maze-size": settings.maze,
        "save-every": 0,
    }
    common |= {"eval-prompts": 1, "eval-samples": 1}
    warm = (
        common
        | POLICY
        | {"objective": "rloo", "steps": 0, "sft-steps": settings.warm_steps, "seed": settings.seed}
    )
    # All evaluations use the same mazes and random numbers.
    measure = {
        "eval-prompts": settings.eval_mazes,
        "samples": settings.eval_samples,
        "bootstrap": 1,
    }
    measure |= {"task-seed": settings.seed, "seed": settings.seed}
    measured = flags_of(measure)
    start = train_all({"warm-start": flags_of(warm)}, settings.work, 1, "warm start", measured)[
        "warm-start"
    ]

    common |= {
        "model": start / "checkpoints" / "step-000000",
        "sft-steps": 0,
        "lr-schedule": "constant",
    }
    common |= {"steps": settings.maze_steps, "lr": settings.maze_lr}
    common |= {"prompts": settings.maze_prompts, "rollouts": settings.rollouts}
    runs, objectives = {}, {}
    # With the seed of the warm start a run would begin with the mazes that it was taught.
    for seed in range(settings.seed + 1, settings.seed + 1 + settings.seeds):
        for objective in settings.objectives:
            name = f"{objective}-seed{seed}"
            objectives[name] = objective
            runs[name] = flags_of(
                common | objective_flags(objective, settings.rollouts) | {"seed": seed}
            )
    grouped = {"warm start": [rewards_of(start, settings.eval_samples)]}
    for name, folder in train_all(runs, settings.work, settings.threads, "mazes", measured).items():
        grouped.setdefault(objectives[name], []).append(rewards_of(folder, settings.eval_samples))

    ks, summary = powers_of_two(settings.eval_samples), {}
    for objective, tables in grouped.items():
        curves = {
            "max_at_k": [[float(max_at_k(own, k).mean()) for k in ks] for own in tables],
            # A reward below 1 is only part of the way.
            "solved_at_k": [
                [float(max_at_k((own == 1).double(), k).mean()) for k in ks] for own in tables
            ],
        }
        summary[objective] = {
            key: torch.tensor(rows).mean(0).tolist() for key, rows in curves.items()
        }
        summary[objective] |= {
            f"{key}_error": standard_error(torch.tensor(rows)).tolist()
            for key, rows in curves.items()
        }
    return {"k": ks, "objectives": summary}


def rewards_of(folder: Path, samples: int) -> Tensor:
    """Return the rewards [P, n] of a run's evaluation."""
    return torch.tensor(
        [line["reward"] for line in records(folder / "evaluation" / "samples.jsonl")]
    ).view(-1, samples)


def check_mazes(settings: MazeSettings) -> None:
    """Raise InputError for settings that the runs would refuse."""
    MazeTask(settings.maze)
    if not settings.objectives or len(set(settings.objectives)) < len(settings.objectives):
        raise InputError(
            f"--objectives must be different ones, got {' '.join(settings.objectives) or 'none'}"
        )
    for objective in settings.objectives:
        objective_flags(objective, settings.rollouts)


def show_mazes(results: dict[str, Any]) -> None:
    """Print the table."""
    shown = [
        (key, i, f"{word}@{results['k'][i]}")
        for key, word in CURVES.items()
        for i in columns_of(results)
    ]
    print("mazes       ", *(f"{heading:<15}" for _, _, heading in shown))
    for name, found in results["objectives"].items():
        print(
            f"{name:<12}",
            *(f"{found[key][i]:.3f} ± {found[f'{key}_error'][i]:.3f}  " for key, i, _ in shown),
        )


def columns_of(mazes: dict[str, Any]) -> list[int]:
    """Return the indices of k = 1, k = 16 (or the largest below) and the largest k."""
    last = len(mazes["k"]) - 1
    return sorted({0, min(4, last), last})


def style(name: str, names: Iterable[str]) -> dict[str, Any]:
    """Return a colour per family, darker for larger sizes, and grey for the others."""
    family = name.partition("-")[0]
    maps = {"maxrl": "Blues", "maxpo": "Oranges", "grpo": "Greens", "rloo": "Reds"}
    if family not in maps:
        return {
            "color": "0.4",
            "linestyle": ":" if "positive" in name or name == "warm start" else "--",
        }
    members = [other for other in names if other.partition("-")[0] == family]
    return {
        "color": colormaps[maps[family]](0.4 + 0.6 * (members.index(name) + 1) / (len(members) + 1))
    }


def draw_mazes(row: Sequence[Axes], mazes: dict[str, Any]) -> None:
    found, ks = mazes["objectives"], mazes["k"]
    for axes, key, label in zip(
        row,
        CURVES,
        ("max@k of the fraction of the way", "pass@k: solved in k samples"),
        strict=False,
    ):
        for name, values in found.items():
            axes.plot(ks, values[key], label=name, marker=".", **style(name, found))
        axes.set_xscale("log", base=2)
        axes.set_xticks(ks, [str(k) for k in ks])
        axes.set(
            title=f"Held-out mazes: {label.partition(':')[0]}",
            xlabel="k",
            ylabel=label,
            ylim=(0, 1),
        )
    places = list(range(len(found)))
    for key, word in CURVES.items():
        for i in columns_of(mazes)[:2]:
            means, errors = (
                [values[name][i] for values in found.values()] for name in (key, f"{key}_error")
            )
            color, mark = "tab:blue" if key == "max_at_k" else "tab:orange", "o" if i == 0 else "s"
            row[2].errorbar(
                means,
                places,
                xerr=errors,
                label=f"{word}@{ks[i]}",
                color=color,
                fmt=mark,
                capsize=3,
            )
    row[2].set_yticks(places, list(found))
    row[2].invert_yaxis()
    row[2].set(title="Held-out mazes: mean and s.e. over seeds", xlabel="fraction", xlim=(0, 1))
