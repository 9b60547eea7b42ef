"""`python -m bench.against COMMIT`: this tree against another commit on a CPU, built here with the
same interpreter.

The commit is checked out into a folder under build/, which is removed at the end; --checkout takes
a built one instead. Both sides answer in turn, in the order A B B A, after their results on the
same weights, prompts and responses were compared. A ratio is the median over rounds of the commit's
time to ours. Cases:

    job      90 steps of the default job by the command line, `--objective maxpo --k 4`, float32
    update   an update of the default job, 9x9 mazes, 32 x 16, in which every rollout has a gradient
    rollout  the native engine's rollouts of bench.rollout: the default job's, and the MaxRL paper's
             policy on 17x17 mazes

The floor of an update and of a rollout is the FLOPs of its matrix multiplications at the GEMM
throughput measured between rounds, and MFU is floor over time. With one thread, times are CPU time,
except the job's. The last line is one JSON document. All cases take about 8 minutes on two cores.
"""

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

import torch

from bench import rollout
from bench.against_side import Update, clock
from bench.layouts import update_flops
from bench.measure import argument_parser, describe, keep, machine, prepare, run_command
from maxrl_fast.errors import InputError
from maxrl_fast.model.decoder import DecoderConfig
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.packing import Packer

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 3600.0  # of a build, a job and one answer
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
DEFAULT = DecoderConfig(32, 128, 256, 4, 8, 4, 16, max_position_embeddings=128)
UPDATE: dict[str, Any] = {
    "config": asdict(DEFAULT),
    **{"count": 32, "prompt_length": 94, "num_rollouts": 16, "shortest": 9, "longest": 17},
}
ROLLOUTS = ("default", "maze17")  # of bench.rollout
JOB = ["--objective", "maxpo", "--k", "4", "--dtype", "float32", "--seed", "0", "--device", "cpu"]
LONG = ["--steps", "90"]  # the same in commits with another default
COMPARED = ["--sft-steps", "3", "--steps", "1", "--eval-every", "0"]  # before rounding has grown


@dataclass
class Side:
    name: str
    folder: Path
    threads: int
    process: "subprocess.Popen[str]" = field(init=False)

    def __enter__(self) -> "Side":
        # The folder of against_side.py comes last in the path: its other files must not hide
        # packages.
        program = (
            "import sys; sys.path.append(sys.argv[1]); import against_side; "
            "against_side.main(int(sys.argv[2]))"
        )
        command = [sys.executable, "-c", program, str(Path(__file__).parent), str(self.threads)]
        # A separate session: Ctrl-C ends this process, which ends the side.
        self.process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        package = Path(self._answer()["package"])
        if not package.is_relative_to(self.folder.resolve()):
            self.__exit__()
            raise RuntimeError(
                f"{self.name} must import maxrl_fast from {self.folder}, got {package}"
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": str(self.threads)}

    def ask(self, **request: Any) -> Any:
        """Send a request and return the answer.

        Raises:
            RuntimeError: if the process ended, or gave no answer in time.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        timer = Timer(LIMIT_SECONDS, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise RuntimeError(
                f"{self.name} gave no answer, and ended with exit code {self.process.wait(10)}"
            )
        return json.loads(line)

    def run_job(self, flags: Sequence[str]) -> tuple[float, dict[str, Any], dict[str, float]]:
        """Train by the command line. Return the seconds, the first step's metrics, and the seconds
        of each stage.
        """
        with tempfile.TemporaryDirectory() as folder:
            words = ["-m", "maxrl_fast.train", *JOB, *flags, "--out", f"{folder}/run"]
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, *words],
                cwd=self.folder,
                env=self.environment(),
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
            )
            seconds = time.perf_counter() - start
            if done.returncode:
                raise RuntimeError(
                    f"{self.name} ended the job with exit code {done.returncode}: "
                    f"{done.stderr[-500:]}"
                )
            first = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()[0]
            timings = (Path(folder) / "run/timings.json").read_text()
            return seconds, json.loads(first), json.loads(timings)


Sides = tuple[Side, Side]  # this tree, the commit


def git(*arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=check, capture_output=True, text=True
    )


def build(folder: Path) -> None:
    """Build the extension of a tree in place, for the CPU.

    Raises:
        RuntimeError: if that fails, with the end of the compiler's output.
    """
    # for cmake and ninja
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=folder,
        env=os.environ | {"MAXRL_FAST_CUDA": "OFF", "PATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    if done.returncode:
        output = f"{done.stdout}{done.stderr}"[-2000:]
        raise RuntimeError(f"the commit's extension does not build: {output}")


@contextmanager
def built_worktree(commit: str) -> Iterator[Path]:
    """Yield a folder with the commit and its built extension; remove it at the end, also after an
    error or Ctrl-C.

    Raises:
        InputError: for an unknown commit.
    """
    found = git(
        "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}", check=False
    )
    if found.returncode:
        raise InputError(f"COMMIT must name a commit of this repository, got {commit!r:.80}")
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="against-", dir=ROOT / "build") as parent:
        folder = Path(parent) / "tree"
        try:
            git("worktree", "add", "--quiet", "--detach", str(folder), found.stdout.strip())
            build(folder)
            yield folder
        finally:
            git("worktree", "remove", "--force", str(folder), check=False)


@contextmanager
def existing(folder: Path) -> Iterator[Path]:
    """Yield a tree with a built extension.

    Raises:
        InputError: if the extension is not built.
    """
    if not list(folder.glob("maxrl_fast/_C.*")):
        raise InputError(
            f"--checkout must be a tree with a built extension, maxrl_fast/_C*, got {str(folder)!r}"
        )
    yield folder.resolve()


def in_turn(calls: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return what each call returned in each round; every second round runs in reverse order."""
    values: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in list(calls)[:: 1 if i % 2 == 0 else -1]:
            values[name].append(calls[name]())
    return values


def agree(what: str, results: Mapping[str, Mapping[str, float]], tolerance: float) -> None:
    """Compare the results of two sides.

    Raises:
        RuntimeError: naming the first result that differs by more than the tolerance.
    """
    (ours, mine), (theirs, other) = results.items()
    for name in mine:
        if not math.isclose(mine[name], other[name], rel_tol=tolerance, abs_tol=tolerance / 10):
            raise RuntimeError(
                f"{what}: the {name} of {ours} is {mine[name]}, that of {theirs} {other[name]}: "
                "nothing is timed"
            )


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    return statistics.median(x / y for x, y in zip(slow, fast, strict=True))


def time_work(
    sides: Sides, kind: str, name: str, case: dict[str, Any], flops: float, dtype: str, rounds: int
) -> Any:
    """Return and print the figures of an update or a rollout, timed in turn."""
    request = {"name": name, "kind": kind, "case": case | {"dtype": dtype}}
    results = {side.name: side.ask(do="prepare", **request) for side in sides}
    agree(name, results, TOLERANCE[dtype])
    calls: dict[str, Callable[[], float]] = {
        side.name: partial(side.ask, do="time", name=name) for side in sides
    }
    calls["gemm"] = partial(gemm_throughput, getattr(torch, dtype))
    for call in calls.values():  # a warm-up
        call()
    ours, theirs, gemm = in_turn(calls, rounds).values()
    throughput = statistics.median(gemm)  # FLOPs in a millisecond
    floor = flops / throughput
    times = {side.name: statistics.median(x) for side, x in zip(sides, (ours, theirs), strict=True)}
    shares = {side: floor / x for side, x in times.items()}
    sides_text = ", ".join(
        f"{side} {x:,.1f} ms ({shares[side]:.0%} MFU)" for side, x in times.items()
    )
    print(
        f"{name}, {dtype}: {sides_text}, {ratio(theirs, ours):.2f} x; floor {floor:,.1f} ms at "
        f"{throughput * 1e-6:,.0f} GFLOP/s",
        flush=True,
    )
    return {
        "gigaflop": flops * 1e-9,
        "dtype": dtype,
        "milliseconds": times,
        "ratio": ratio(theirs, ours),
        "gemm_gflops": throughput * 1e-6,
        "floor_milliseconds": floor,
        "share_of_floor": shares,
    }


def gemm_throughput(dtype: torch.dtype) -> float:
    """Return the FLOPs in a millisecond of a matrix multiplication, the best of five."""
    x, y = torch.randn(2, 1024, 1024).to(dtype)
    times = []
    for _ in range(5):
        start = clock()
        x @ y
        times.append(clock() - start)
    return 2e-3 * 1024**3 / min(times)


def update(name: str, sides: Sides, options: argparse.Namespace) -> Any:
    here = Update(**UPDATE, dtype="float32")
    batch = Packer(here.prompts, here.rollouts, here.advantages).pack(
        torch.arange(len(here.advantages))
    )
    return time_work(
        sides,
        "update",
        name,
        UPDATE,
        update_flops(here.model.config, batch),
        options.dtype,
        options.rounds,
    )


def rollouts(name: str, sides: Sides, options: argparse.Namespace) -> Any:
    figures = {}
    for shape in ROLLOUTS:
        (maze_size, count, num_rollouts), sizes = rollout.CASES[shape]
        task = MazeTask(maze_size, 0)
        model, prompts = rollout.policy(task, *sizes), task.prompts("train", 0, count)
        flops = rollout.operations(model, prompts, num_rollouts, task.max_new_tokens)
        case = {
            "config": asdict(model.config),
            "count": count,
            "prompt_length": int(prompts.lengths[0]),
            "num_rollouts": num_rollouts,
            "limit": task.max_new_tokens,
        }
        figures[shape] = time_work(
            sides, "rollout", f"{name} {shape}", case, flops, options.dtype, options.rounds
        )
    return figures


def job(name: str, sides: Sides, options: argparse.Namespace) -> Any:
    """Return and print the seconds of the default job, whole and by stage.

    Only the first step, after three warm-start steps, is compared, because rounding differences
    grow.
    """
    compared = {side.name: side.run_job(COMPARED)[1] for side in sides}
    names = ("entropy", "response_length_mean")
    agree(
        name,
        {side: {key: metrics[key] for key in names} for side, metrics in compared.items()},
        1e-3,
    )
    stages: dict[str, dict[str, float]] = {}

    def seconds(side: Side) -> float:
        seconds, _, stages[side.name] = side.run_job(LONG)
        return seconds

    times = in_turn({side.name: partial(seconds, side) for side in sides}, min(options.rounds, 2))
    ours, theirs = times.values()
    medians = {side: statistics.median(x) for side, x in times.items()}
    print(
        f"{name}: {', '.join(f'{side} {x:.1f} s' for side, x in medians.items())}, "
        f"{ratio(theirs, ours):.2f} x",
        flush=True,
    )
    return {
        "seconds": medians,
        "ratio": ratio(theirs, ours),
        "last_stages": stages,
    }


CASES = {"job": job, "update": update, "rollout": rollouts}


def arguments() -> argparse.Namespace:
    parser = argument_parser("against", __doc__, rounds=10)
    other = parser.add_mutually_exclusive_group(required=True)
    other.add_argument(
        "commit", nargs="?", metavar="COMMIT", help="any name of a commit that git takes"
    )
    other.add_argument(
        "--checkout", type=Path, metavar="DIR", help="instead: a tree with its extension built"
    )
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), default=list(CASES), help="default: all"
    )
    parser.add_argument(
        "--dtype", choices=list(TOLERANCE), default="float32", help="default: float32"
    )
    options = parser.parse_args()
    options.device = "cpu"
    return options


def main() -> int:
    options = arguments()
    about = machine(prepare(options))
    print(describe(about), flush=True)
    with (
        existing(options.checkout) if options.checkout else built_worktree(options.commit) as folder
    ):
        commit = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        result: dict[str, Any] = {
            "benchmark": "against",
            "machine": about,
            "commit": commit or str(folder),
            "cases": {},
        }
        with (
            Side("ours", ROOT, about["threads"]) as ours,
            Side("theirs", folder, about["threads"]) as theirs,
        ):
            for name in options.cases:
                result["cases"][name] = CASES[name](name, (ours, theirs), options)
                keep(result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the worktree is removed then too
    sys.exit(run_command(main))
