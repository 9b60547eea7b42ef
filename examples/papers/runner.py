"""Shared by the experiments: a command line made from the settings, NAME.json and NAME.png as
results, training runs side by side, each in a process with one thread, and runs on mazes.

On few cores this has a higher throughput than one run with many threads. Finished runs are not
repeated and started ones are resumed, so that a stopped experiment continues where it was.
"""

import contextlib
import copy
import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, TypeVar

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from maxrl_fast import evaluate as evaluation
from maxrl_fast import train
from maxrl_fast.algorithms.options import options_of
from maxrl_fast.config.read import help_row, hint, parse_options, print_help, read_flags, split_help
from maxrl_fast.errors import InputError, warn
from maxrl_fast.evaluation.evaluator import Evaluator
from maxrl_fast.job.build import RunContext, prepare
from maxrl_fast.records import Prompts
from maxrl_fast.runtime.device import versions
from maxrl_fast.runtime.files import atomic_file, write_json
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.training.trainer import Trainer

# not the committed results beside this file, which only --out replaces
RESULTS = Path("runs/papers")
ONE_CPU = ("--threads=1", "--device=cpu", "--dtype=float32")
COLORS = 128  # of a picture, which is a third as large as with all colors
# 0.1 million parameters
POLICY = {"hidden-size": 64, "intermediate-size": 128, "layers": 4, "heads": 4, "kv-heads": 2}
# with the seed of the warm start, reinforcement learning would begin with its mazes
SEED_SHIFT = 1000
KEPT = ("reward_mean", "frac_prompts_solved", "entropy", "moment_variance")
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """Settings that all experiments share. Each experiment adds its own in a subclass, all with
    defaults.
    """

    seed: int = 0
    """Seed of all random numbers; experiments with several seeds count up from it."""
    threads: int = 2
    """CPU threads."""
    out: Path = RESULTS
    """Folder for the result (NAME.json) and its picture (NAME.png), which are replaced."""


def run(
    name: str,
    settings_type: type[Settings],
    experiment: Callable[[Any], dict[str, Any]],
    draw: Callable[[dict[str, Any]], Figure],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run the command of one experiment: read settings, compute results (JSON values), draw them.

    Return the exit code: 0, 2 for bad input, 130 after Ctrl-C. `experiment` raises InputError for
    settings that make no sense, before any work.
    """
    start = time.perf_counter()
    try:
        settings = read_settings(name, settings_type, arguments)
        check_least(settings, threads=1)
        try:
            settings.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out must be a folder that can be written: {error}") from None
        torch.set_num_threads(settings.threads)
        of_code = commit()  # before the code can change
        results = experiment(settings)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    record = {
        "experiment": name,
        "settings": {key: value for key, value in asdict(settings).items() if key != "out"},
        "seconds": round(time.perf_counter() - start, 1),
        **versions(),
        "commit": of_code,
        "results": rounded(results),
    }
    write_results(settings.out, record, draw(record))
    print(f"{record['seconds']:.0f} s; written {settings.out / name}.json and .png")
    return 0


def commit() -> str | None:
    """Return the commit of this code, with -dirty where files differ from it; None outside of git.
    Runs that were finished before may be of an earlier one."""
    if shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, timeout=60)
    return found.stdout.decode().strip() or None


def read_settings(
    name: str, settings_type: type[Settings], arguments: Sequence[str] | None
) -> Settings:
    """Return the settings that flags give; --help prints them, and exits."""
    kind: Any = settings_type
    options = options_of(kind)
    words, asks_for_help = split_help(sys.argv[1:] if arguments is None else arguments)
    if asks_for_help:
        rows = [help_row(option) for option in options.values()]
        print_help(f"{name}.py", inspect.getdoc(settings_type) or "", [("options", "", rows)])
    flags = read_flags(words)
    for name, x in flags.items():
        if name not in options:
            raise InputError(f"unknown option {x.name:.80}{hint(name, options)}")
    return settings_type(**{key: x.read(options[key]) for key, x in flags.items()})


def check_least(settings: Settings, **least: int) -> None:
    """Raise InputError for a setting that is too small."""
    for name, smallest in least.items():
        if (value := getattr(settings, name)) < smallest:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} must be at least {smallest}, got {value}")


def rounded(value: Any) -> Any:
    """Return JSON values: numbers to six significant digits, None for numbers that are not finite,
    lists for tensors.
    """
    if isinstance(value, Tensor):
        return rounded(value.tolist())
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def standard_error(values: Tensor) -> Tensor:
    """Return the standard error of the mean over the first dimension, [R, ...] -> [...]; 0 for a
    single value.
    """
    return values.std(0, correction=min(len(values) - 1, 1)) / len(values) ** 0.5


def cell(values: Tensor, digits: int = 3) -> str:
    """Return the mean with its standard error, as a table shows it."""
    return f"{float(values.mean()):.{digits}f} ± {float(standard_error(values)):.{digits}f}"


def write_results(folder: Path, record: Mapping[str, Any], figure: Figure) -> None:
    """Write NAME.json, a line for each list of numbers, and NAME.png in few colors."""
    name = folder / str(record["experiment"])
    text = json.dumps(record, indent=0, default=str)  # str for a Path
    text = re.sub(r"\[[^\[\]{}\"]*\]", lambda numbers: "".join(numbers[0].split()), text)
    with atomic_file(name.with_suffix(".json")) as temporary:
        temporary.write_text(text + "\n")
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(110)
    canvas.draw()
    pixels = bytes(canvas.buffer_rgba())
    picture = Image.frombytes("RGBA", canvas.get_width_height(), pixels).convert("RGB")
    picture = in_few_colors(picture)
    with atomic_file(name.with_suffix(".png")) as temporary:
        picture.save(temporary, format="PNG", optimize=True)


def in_few_colors(picture: Image.Image) -> Image.Image:
    """Return an RGB picture in its most frequent colors: those of lines and areas; the shades at
    their borders become the nearest of these."""
    counts: list[Any] = sorted(picture.getcolors(2**24) or (), reverse=True)
    palette = Image.new("P", (1, 1))
    palette.putpalette([x for _, color in counts[:COLORS] for x in color])
    return picture.quantize(palette=palette, dither=Image.Dither.NONE)


def show_table(table: Table) -> None:
    (Console() if sys.stdout.isatty() else Console(width=180)).print(table)


def tracked(items: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
    """Yield the items with a progress bar."""
    return track(items, what, total, console=Console(stderr=True))


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Return --name=value for each option."""
    return [f"--{name}={value}" for name, value in options.items()]


def train_all(
    runs: Mapping[str, Sequence[str]],
    folder: Path,
    jobs: int,
    what: str = "runs",
    measure: Sequence[str] = (),
) -> dict[str, Path]:
    """Run the trainer with the flags of each run in folder/NAME, `jobs` at a time; the log is
    folder/NAME.log.

    Args:
        measure: flags of maxrl_fast.evaluate, which evaluates the last checkpoint in
        folder/NAME/evaluation. Without flags
            nothing is evaluated.

    Returns:
        The runs' folders.

    Raises:
        InputError: a run failed; the message names its log. Runs that have started finish first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with workers(jobs) as pool:
        pending = [
            pool.submit(_train, folder / name, list(flags), list(measure))
            for name, flags in runs.items()
        ]
        try:
            for done in tracked(as_completed(pending), what, total=len(pending)):
                done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {name: folder / name for name in runs}


def workers(jobs: int) -> ProcessPoolExecutor:
    """Return a pool of `jobs` processes, which end with this one, even if it is killed."""
    return ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_end_with_parent)


@dataclass(frozen=True)
class TokenRun:
    """A run that ends with the step that reaches `tokens` sampled tokens."""

    name: str
    seed: int
    options: dict[str, Any]  # of maxrl_fast.train
    tokens: int
    evaluations: int  # after equal numbers of tokens, besides that at the start
    file: Path  # of what it has measured


def measure_all(
    measure: Callable[[TokenRun], dict[str, Any]], runs: Sequence[TokenRun], jobs: int
) -> list[dict[str, Any]]:
    """Return what `measure` returns of each run, `jobs` at a time."""
    with workers(jobs) as pool:
        return [*tracked(pool.map(partial(measure_once, measure), runs), "runs", total=len(runs))]


def measure_once(measure: Callable[[TokenRun], dict[str, Any]], one: TokenRun) -> dict[str, Any]:
    """Measure in a process with one thread. A run that has finished with these settings is read
    from its file."""
    asked = {**vars(one), "file": one.file.name}
    if one.file.is_file() and (record := json.loads(one.file.read_text()))["run"] == asked:
        return dict(record["outcome"])
    torch.set_num_threads(1)
    outcome = rounded(measure(one))
    write_json(one.file, {"run": asked, "outcome": outcome})
    return outcome


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _train(out: Path, flags: list[str], measure: list[str]) -> None:
    log, finished = out.with_name(f"{out.name}.log"), out.with_name(f"{out.name}.finished")
    if finished.is_file() and json.loads(finished.read_text()) == [flags, measure]:
        return
    place = f"--resume={out}" if (out / "config.json").is_file() else f"--out={out}"
    with open(log, "a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        code = train.main([*flags, place, *ONE_CPU])
        if measure and not code:
            shutil.rmtree(out / "evaluation", ignore_errors=True)
            code = evaluation.main(
                [str(out / "latest"), *measure, f"--out={out / 'evaluation'}", *ONE_CPU]
            )
    if code:
        raise InputError(
            f"the run in {out} ended with exit code {code}: see {log}; start again to continue"
        )
    finished.write_text(json.dumps([flags, measure]))


def records(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file, such as metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def thinned(values: Sequence[float], points: int) -> list[list[float]]:
    """Average consecutive values: return at most `points` pairs of a stretch's last step (from 1)
    and its mean.
    """
    width = -(-len(values) // points)
    stretches = [
        (min(i + width, len(values)), values[i : i + width]) for i in range(0, len(values), width)
    ]
    return [[end, sum(part) / len(part)] for end, part in stretches]


def build(options: dict[str, Any]) -> tuple[Trainer, Evaluator]:
    """Return the trainer and the evaluator of a run that leaves no folder.

    Raises:
        InputError: where an option does not fit the objective.
    """
    alone = Ranks()
    run = RunContext.begin(*prepare(parse_options(options), alone, warn), alone)
    run.learner.set_reference()
    run.engine.load_weights(run.policy)
    return run.trainer, run.evaluators["test"]


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
    """Samples of each held-out maze in an evaluation."""
    work: Path = Path("runs/mazes")
    """Folder of the warm starts and the finished runs."""


def check_methods(methods: Sequence[str], known: Iterable[str], settings: MazeSettings) -> None:
    """Raise InputError for a method that does not exist, or for no seeds."""
    if unknown := set(methods) - set(known):
        raise InputError(f"--methods must be of {', '.join(known)}, got {min(unknown)}")
    check_least(settings, seeds=1)


def warm_start_flags(maze_size: int, sft_steps: int, seed: int) -> list[str]:
    """Return the flags of the supervised run that all runs of a seed start from."""
    options = {"steps": 0, "sft-steps": sft_steps, "sft-batch": 64, "sft-lr": 3e-3}
    options |= {"maze-size": maze_size, "seed": seed, "eval-prompts": 16}
    return flags_of({**POLICY, **options})


def warm_starts(settings: Any, work: Path, more: Sequence[str] = ()) -> dict[int, str]:
    """Train the warm start of each seed, with more flags, and return their policies."""
    seeds = range(settings.seed, settings.seed + settings.seeds)
    flags = {
        f"start-{seed}": [*warm_start_flags(settings.maze_size, settings.sft_steps, seed), *more]
        for seed in seeds
    }
    starts = train_all(flags, work, settings.threads, "warm starts")
    return {seed: str(starts[f"start-{seed}"] / "checkpoints" / "step-000000") for seed in seeds}


def maze_options(settings: Any, seed: int, policy: str) -> dict[str, Any]:
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
    methods: dict[str, dict[str, Any]],
    steps: int,
    evaluations: int,
    training_mazes: int = 0,
) -> list[dict[str, Any]]:
    """Train with the options of each method for `steps` steps from the warm start of each seed, and
    return what `measure_steps` does, with the method's name."""
    if steps < evaluations or steps % evaluations:
        raise InputError(f"--steps must be a multiple of {evaluations}, got {steps}")
    runs = [
        TokenRun(
            name,
            seed,
            {**maze_options(settings, seed, policy), **options, "steps": steps},
            0,  # the steps are the limit
            evaluations,
            settings.work / f"{name}-{training_mazes}-{seed}.json",
        )
        for seed, policy in warm_starts(settings, settings.work).items()
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
            next_prompt = (step - 1) * trainer.collector.options.prompts
            of_step = trainer.step(step, next_prompt).metrics
            variance = moment_variance(trainer.learner.optimizer)
            metrics.append({**of_step, "moment_variance": variance})
        if step % (steps // one.evaluations) == 0:
            passes.append(evaluator.evaluate().pass_at_k)
    means = {x: thinned([step[x] for step in metrics], one.evaluations) for x in KEPT}
    return {
        **{f"pass@{k}": [at_k[k] for at_k in passes] for k in passes[0]},
        **{name: [mean for _, mean in pairs] for name, pairs in means.items()},
    }


def moment_variance(optimizer: torch.optim.Optimizer) -> float:
    """Estimate the variance of the gradient from Adam's moments (MaxPO): the sum over the weights
    of v_hat - m_hat^2; 0 where it was reset after the step."""
    total = 0.0
    for group in optimizer.param_groups:
        for state in filter(None, map(optimizer.state.__getitem__, group["params"])):
            first, second = (1 - beta ** float(state["step"]) for beta in group["betas"])
            variance = state["exp_avg_sq"] / second - (state["exp_avg"] / first).square()
            total += float(variance.sum(dtype=torch.float64))
    return max(total, 0.0)


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
