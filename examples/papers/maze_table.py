"""MaxRL's Table 3: objectives on 17x17 mazes from one warm start, by the recipe maze_paper.toml, on
a GPU.

    python examples/papers/maze_table.py --out runs/maze_table --minutes 25

Each call continues where the one before has stopped, and divides its time evenly among the
objectives that are not finished. Everything is in the folder --out: the runs with their newest
checkpoints (63 MB each), logs, and the results so far as maze_table.json, .png and .md. The folder
may be moved, also to another machine. Objectives are compared after the same number of steps, the
largest that all of them have been evaluated at.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from runner import Settings, check_least, records, run

import maxrl_fast
from maxrl_fast.errors import InputError
from maxrl_fast.runtime.device import versions
from maxrl_fast.runtime.files import RunFolder

RECIPE = Path(__file__).with_name("maze_paper.toml")
OBJECTIVES = {
    "maxrl": ["--objective=maxrl"],
    # appendix F: over the tokens of the whole batch, for all
    "grpo": ["--objective=grpo", "--aggregation=token_mean"],
    "grpo-entropy": ["--objective=grpo", "--aggregation=token_mean", "--entropy-coef=0.001"],
    "pkpo-k16": ["--objective=pkpo", "--k=16", "--aggregation=token_mean"],
    "self": ["--objective=self", "--aggregation=token_mean"],
    "smoothing": ["--objective=differential_smoothing", "--aggregation=token_mean"],
    "rloo": ["--objective=rloo"],
    "maxpo-k4": ["--objective=maxpo", "--k=4"],
    "maxpo-k16": ["--objective=maxpo", "--k=16"],
    "pacs": ["--objective=pacs"],
}
# Table 3: pass@1 / @128 / @256 in percent
PAPER = {
    "maxrl": "84.4 / 92.0 / 94.3",
    "grpo": "39.6 / 42.4 / 43.0",
    "grpo-entropy": "47.2 / 53.4 / 54.0",
    "pkpo-k16": "74.5 / 77.6 / 77.9",
    "self": "46.1 / 86.3 / 87.5",
    "smoothing": "50.0 / 57.8 / 58.7",
}
SHOWN = ("1", "16", "128", "256")  # k of the pass@k in the table, where there are as many samples
WARM_START = "warm-start"
SAVE_SECONDS = 120  # that a stopped run may take to finish its step and to save
DIFFERENCES = """\
- The policy has 3,944,704 parameters: the paper's sizes, of which it says "approximately 3M".
- PACS averages its loss over responses, as its own paper does; the other objectives average over
  all tokens of a batch, as in
  appendix F.
- The paper does not give the coefficient of the entropy bonus (here .001), nor the settings of SELF
  and of Differential Smoothing, which are those of their authors' code.
- Every maze is generated when it is needed. The paper draws from a set of one million.
- The paper does not give Adam's second beta, the weight decay, the schedule of the warm start, the
  clipping of gradients, or how test mazes are sampled. Here these are as in the recipe; test mazes
  are sampled at temperature 1.
- Weights are float32, and matrix multiplications bfloat16. The paper trains "using bfloat16
  precision".
"""


@dataclass(frozen=True)
class TableSettings(Settings):
    """MaxRL's Table 3: pass@k on held-out mazes after training with each objective from one warm
    start, in resumable pieces. It needs a GPU, and as many hours as it is given."""

    out: Path = Path("runs/maze_table")
    """Folder of the runs and the results."""
    objectives: tuple[str, ...] = ("maxrl", "grpo")
    """Objectives: the rows of Table 3, maxrl, grpo, grpo-entropy, pkpo-k16, self and smoothing
    (Differential Smoothing); also rloo, maxpo-k4, maxpo-k16, pacs. A later call may name more."""
    minutes: float | None = None
    """Time after which the run in progress saves and stops, in a few seconds more; without it, all
    runs are finished.
    """
    steps: int = 20_000
    """Steps of reinforcement learning. A later call may raise them, because the learning rate is
    constant.
    """
    recipe: Path = RECIPE
    """Options of all runs."""


def experiment(settings: TableSettings) -> dict[str, Any]:
    if unknown := set(settings.objectives) - set(OBJECTIVES):
        raise InputError(
            f"--objectives must be of {', '.join(OBJECTIVES)}, got {', '.join(sorted(unknown))}"
        )
    check_least(settings, steps=1)
    if settings.minutes is not None and not settings.minutes > 0:
        raise InputError(f"--minutes must be above 0, got {settings.minutes:g}")
    # an exception: it stops the run below
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        train_all(settings, time.monotonic() + 60 * (settings.minutes or 1e6))
    finally:
        signal.signal(signal.SIGTERM, before)
    evaluated = [name for name in settings.objectives if is_finished(settings.out / name, 0)]
    results = {
        "runs": {name: outcome(settings.out / name) for name in evaluated},
        "pieces": records(settings.out / "pieces.jsonl"),
    }
    text = markdown(results, settings)
    (settings.out / "maze_table.md").write_text(text)
    print(text)
    return results


def train_all(settings: TableSettings, end: float) -> None:
    """Continue the warm start, then every objective, until all are finished or the clock is at
    `end`.
    """
    common = ["--config", str(settings.recipe.resolve())]
    warm_flags = [
        *common,
        "--steps=0",
        f"--seed={settings.seed}",
        "--eval-prompts=1",
        "--eval-samples=1",
    ]
    if not is_finished(settings.out / WARM_START, 0):
        train(settings.out, WARM_START, warm_flags, 0, end - time.monotonic())
    if not is_finished(settings.out / WARM_START, 0):
        return
    # With the seed of the warm start, reinforcement learning would begin with the mazes of the warm
    # start.
    common += [
        f"--model={WARM_START}/checkpoints/step-000000",
        "--sft-steps=0",
        f"--seed={settings.seed + 1}",
    ]
    names = [
        name for name in settings.objectives if not is_finished(settings.out / name, settings.steps)
    ]
    for i, name in enumerate(names):
        share = (end - time.monotonic()) / (len(names) - i)
        if share > 0:
            train(
                settings.out,
                name,
                [*common, *OBJECTIVES[name], f"--steps={settings.steps}"],
                settings.steps,
                share,
            )


def is_finished(folder: Path, steps: int) -> bool:
    """Return whether a run has been evaluated after this many steps, or more."""
    evaluations = folder / "eval.jsonl"
    return evaluations.exists() and any(record["step"] >= steps for record in records(evaluations))


def train(out: Path, name: str, flags: Sequence[str], steps: int, seconds: float) -> None:
    """Start or resume the run out/NAME, and stop it after `seconds`; its output goes to
    out/NAME.log.

    The run works in the folder `out`, so that its paths hold wherever that folder is moved.

    Raises:
        InputError: the run failed; the message names its log.
    """
    has_begun = bool(RunFolder(out / name).checkpoints)
    if not has_begun:
        shutil.rmtree(out / name, ignore_errors=True)  # it was stopped before its first checkpoint
    place = [f"--resume={name}", f"--steps={steps}"] if has_begun else [*flags, f"--out={name}"]
    package = str(Path(maxrl_fast.__file__).parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    }
    command, log, start = (
        [sys.executable, "-m", "maxrl_fast.train", *place],
        out / f"{name}.log",
        time.monotonic(),
    )
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, cwd=out, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        pass  # the usual end of a piece
    finally:
        stop(process)
        keep_newest(out / name)
        piece = {
            "run": name,
            "seconds": time.monotonic() - start,
            "device": device_name(),
            **versions(),
        }
        with (out / "pieces.jsonl").open("a") as pieces:
            pieces.write(json.dumps(piece) + "\n")
    # 143: it has saved; -15: it was stopped while it was still starting, and nothing is lost.
    if process.returncode not in (0, 128 + signal.SIGTERM, -signal.SIGTERM):
        raise InputError(
            f"the run in {out / name} ended with exit code {process.returncode}: see {log}"
        )


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Make a run save and end, if it has not ended. After Ctrl-C this is its second signal, which
    it takes for the first.
    """
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(SAVE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def keep_newest(folder: Path) -> None:
    """Remove the checkpoints of a run but its newest one, so that the folder stays small."""
    for directory in RunFolder(folder).checkpoints[:-1]:
        shutil.rmtree(directory)
    if not (folder / "best").exists():
        (folder / "best").unlink(missing_ok=True)  # it may point to a removed one


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def outcome(folder: Path) -> dict[str, Any]:
    """Return pass@k by step, and the training time until each, without evaluations, start-up and
    saving.
    """
    metrics, evaluations = records(folder / "metrics.jsonl"), records(folder / "eval.jsonl")
    seconds = [
        0.0,
        *accumulate(record["rollout_seconds"] + record["train_seconds"] for record in metrics),
    ]
    return {
        "steps": len(metrics),
        "pass_at_k": {str(record["step"]): record["pass_at_k"] for record in evaluations},
        "seconds": {str(record["step"]): seconds[record["step"]] for record in evaluations},
    }


def common_step(runs: dict[str, Any]) -> str:
    """Return the largest step after which all runs have been evaluated."""
    return str(
        max(set.intersection(*(set(map(int, of_run["pass_at_k"])) for of_run in runs.values())))
    )


def markdown(results: dict[str, Any], settings: TableSettings) -> str:
    """Return the results as a page: how they were made, the table, and what differs from the
    paper.
    """
    runs, pieces = results["runs"], results["pieces"]
    minutes = sum(piece["seconds"] for piece in pieces) / 60
    machines = sorted({f"{piece['device']}, torch {piece['torch']}" for piece in pieces})
    lines = [
        "# The MaxRL paper's maze experiment\n",
        f"    python examples/papers/maze_table.py --steps {settings.steps} --objectives "
        f"{' '.join(settings.objectives)}\n",
        f"{len(pieces)} pieces of {minutes:.1f} minutes in total, on {' and '.join(machines)}. The "
        "warm start has seed "
        f"{settings.seed}. Every objective starts from it with seed {settings.seed + 1}, so that "
        "all see the same mazes.\n",
    ]
    if not runs:
        return "\n".join([*lines, "No objective has been evaluated yet.\n"])
    step, first = common_step(runs), next(iter(runs.values()))["pass_at_k"]["0"]
    ks = [k for k in SHOWN if k in first]
    cells = [
        (
            "",
            *(f"pass@{k}" for k in ks),
            "training, minutes",
            "steps so far",
            "Table 3: pass@1 / @128 / @256, %",
        )
    ]
    cells += [
        ("---",) * len(cells[0]),
        ("warm start", *(f"{first[k]:.3f}" for k in ks), "", "", ""),
    ]
    for name, of_run in runs.items():
        rates = (f"{of_run['pass_at_k'][step][k]:.3f}" for k in ks)
        cells.append(
            (
                name,
                *rates,
                f"{of_run['seconds'][step] / 60:.1f}",
                f"{of_run['steps']:,}",
                PAPER.get(name, ""),
            )
        )
    lines += [
        f"Pass@k on held-out mazes after {int(step):,} steps, the last at which all objectives "
        "were evaluated:\n"
    ]
    lines += [f"| {' | '.join(row)} |" for row in cells]
    lines += [
        "\nTraining time has rollouts and updates, without evaluations, start-up and saving.\n",
        "![Pass@k over steps and over training time](maze_table.png)\n",
        f"What differs from the paper:\n\n{DIFFERENCES}",
    ]
    return "\n".join(lines)


def draw(record: dict[str, Any]) -> Figure:
    runs = record["results"]["runs"]
    figure = Figure(figsize=(12, 8), layout="constrained")
    ks = [k for of_run in runs.values() for k in of_run["pass_at_k"]["0"] if int(k) <= 128] or ["1"]
    for axes_of_k, k in zip(figure.subplots(2, 2), ("1", max(ks, key=int)), strict=True):
        for axes, is_time in zip(axes_of_k, (False, True), strict=True):
            for name, of_run in runs.items():
                steps = sorted(of_run["pass_at_k"], key=int)
                places = [of_run["seconds"][step] / 60 if is_time else int(step) for step in steps]
                axes.plot(places, [of_run["pass_at_k"][step][k] for step in steps], label=name)
            axes.set(
                xlabel="minutes of training" if is_time else "step", ylabel=f"pass@{k}", ylim=(0, 1)
            )
            axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return figure


main = partial(run, "maze_table", TableSettings, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
