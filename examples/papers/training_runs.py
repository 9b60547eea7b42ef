"""Training runs for an experiment: several at a time, each in a process with one thread.

On few cores this has a higher throughput than one run with many threads. Finished runs are not
repeated and started ones are resumed, so that a stopped experiment continues where it was.
"""

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import torch
from experiment import tracked

from maxrl_fast import evaluate as evaluation
from maxrl_fast import train
from maxrl_fast.errors import InputError
from maxrl_fast.runtime.files import write_json

ONE_CPU = ("--threads=1", "--device=cpu", "--dtype=float32")


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
    outcome = measure(one)
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
