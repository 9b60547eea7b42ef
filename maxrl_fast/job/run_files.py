"""The files of a run: config.json, logs, curves.png and timings.json; trackers get its numbers."""

import contextlib
import hashlib
import json
import math
import os
import shutil
import stat
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from maxrl_fast.config.changes import ended_before_first_step
from maxrl_fast.config.names import PASS_RATES
from maxrl_fast.errors import InputError
from maxrl_fast.job.log import flat
from maxrl_fast.job.plots import draw_curves
from maxrl_fast.job.progress import Progress
from maxrl_fast.job.resume import Saved
from maxrl_fast.job.trackers import Tracker
from maxrl_fast.runtime.device import versions
from maxrl_fast.runtime.files import (
    atomic_file,
    check_entry,
    check_in_place,
    open_regular,
    storing,
    write_error,
    write_json,
)
from maxrl_fast.training.objectives.weight import weight_of

if TYPE_CHECKING:
    from maxrl_fast.job.tensorboard import TensorBoard

LOGS = (
    *("metrics", "eval", "eval_prompts", "pass_rates"),
    *("warnings", "samples", "rollouts", "diagnostics"),
)
DRAWN = ("metrics", "eval")


class LogFile:
    """A JSON Lines file to which a run appends; every line is flushed. The first one makes it.

    Args:
        mark: from `mark`, to continue there: later lines are cut off. None: the whole file is kept.
    """

    def __init__(self, path: Path, mark: tuple[int, str | None] | None):
        self._path, content = path, b""
        self._file: BinaryIO | None = None
        if os.path.lexists(path):
            self._open().seek(0)
            content = self._open().read()
        size, sha256 = mark or (len(content), None)
        self.is_lost = bool(size) and self._file is None  # it had lines at the mark
        self.kept = content[:size]
        self._size, self._sha256 = len(self.kept), hashlib.sha256(self.kept)
        if self.kept and sha256 not in (None, self._sha256.hexdigest()):
            self.close()
            raise InputError(
                f"{path} must begin with the {size:,} bytes that it had at the checkpoint, got "
                f"{len(content):,} bytes that begin differently; move it away to start a new one"
            )
        if self._file:
            self._file.truncate(self._size)

    def _open(self) -> BinaryIO:
        if self._file is None:
            descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            self._file = open(descriptor, "a+b")  # noqa: SIM115
        return self._file

    def write(self, record: dict[str, Any]) -> None:
        line = json.dumps(_json_value(record), allow_nan=False).encode() + b"\n"
        self._open().write(line)
        self._open().flush()
        self._size += len(line)
        self._sha256.update(line)

    def mark(self) -> tuple[int, str]:
        """Wait until everything is on the disk; return the size in bytes and the SHA-256."""
        if self._file:
            check_in_place(self._path, os.fstat(self._file.fileno()))
            os.fsync(self._file.fileno())
        return self._size, self._sha256.hexdigest()  # not tell(), which is wrong after truncate()

    def close(self) -> None:
        if self._file:
            self._file.close()


class RunFiles:
    """Writes the files of one run into its folder; does nothing unless `is_writer`.

    The logs are cut to their lengths at the checkpoint `saved`. `log_to` is the tracker that gets
    the numbers too; `warn` is called if it fails later. StorageError if writing fails."""

    def __init__(
        self,
        out: Path,
        options: dict[str, Any],
        log_to: str | None = None,
        is_writer: bool = True,
        is_resumed: bool = False,
        saved: Saved | None = None,
        warn: Callable[[str], None] = warnings.warn,
    ):
        self.out, self.options, self._is_writer = out, options, is_writer
        self.history: dict[str, list[dict[str, Any]]] = {log: [] for log in DRAWN}
        self._tracker: Tracker | TensorBoard | None = None
        self.missing: list[Path] = []  # logs that had lines at the checkpoint and no longer exist
        if not is_writer:
            return
        try:
            if not is_resumed and (self.out / "config.json").exists():
                # another command, or one started at the same time
                if not ended_before_first_step(self.out, options):
                    raise InputError(
                        f"--out must be a new or empty folder, got {out}, which holds another run; "
                        f"--resume {out} resumes it"
                    )
                self._remove_beginning()
            for name in ("curves.png", "timings.json"):
                check_entry(out / name, stat.S_IFREG)
            for name in ("latest", "best"):  # links to checkpoints
                check_entry(out / name, stat.S_IFLNK)
            if saved is None:
                self.write_config()
            # left by a killed process
            for partial in (*self.out.glob(".*.partial"), *self.out.glob("checkpoints/.*.partial")):
                is_folder = partial.is_dir() and not partial.is_symlink()
                shutil.rmtree(partial) if is_folder else partial.unlink()
            self._opened = out.stat()  # `locked` keeps it open: no other folder gets its number
            marks = {log: saved.logs.get(log) if saved else (0, None) for log in LOGS}
            self._logs = {log: LogFile(out / f"{log}.jsonl", marks[log]) for log in LOGS}
            self.missing = [out / f"{log}.jsonl" for log in LOGS if self._logs[log].is_lost]
            self.history = {
                log: [*map(json.loads, self._logs[log].kept.splitlines())] for log in DRAWN
            }
            if log_to is not None:
                self._tracker = self._start_tracker(log_to, saved, warn)
        except OSError as error:
            raise write_error(self.out, error) from error

    def _start_tracker(
        self, name: str, saved: Saved | None, warn: Callable[[str], None]
    ) -> "Tracker | TensorBoard":
        if name != "tensorboard":
            return Tracker(name, self.out.absolute(), self.options, warn)
        from maxrl_fast.job.tensorboard import TensorBoard, hyperparameters  # an extra

        done = saved.progress if saved and saved.progress.phase == "training" else Progress()
        is_evaluated = done.step in done.evaluations
        start = done.step + is_evaluated
        folder, options = self.out / "tensorboard", hyperparameters(self.options)
        board = TensorBoard(folder, options, str(self.out), start)
        # the evaluation is repeated; purging its events also dropped the step's metrics
        if not is_evaluated:
            for record in self.history["metrics"][-1:]:
                board.log(_numbers("metrics", record), record["step"])
        return board

    def _remove_beginning(self) -> None:
        for name in ("checkpoints", "tensorboard"):
            if (self.out / name).exists():
                shutil.rmtree(self.out / name)
        for name in ("latest", "best", "timings.json", "curves.png"):
            (self.out / name).unlink(missing_ok=True)

    def write_config(self) -> None:
        if self._is_writer:
            used = {name: value for name, value in self.options.items() if value is not None}
            content = {**used, "versions": versions(), "command": sys.argv}
            write_json(self.out / "config.json", content)
            write_json(self.out / "weight.json", weight_of(self.options, PASS_RATES))

    def write(self, log: str, record: dict[str, Any]) -> None:
        """Append a record to a log, and send its numbers to the tracker."""
        if not self._is_writer:
            return
        with storing(f"{self.out / log}.jsonl or the tracker's files"):
            self._logs[log].write(record)
            if log in DRAWN:
                self.history[log].append(record)
                if self._tracker is not None:
                    self._tracker.log(_numbers(log, record), step=record["step"])

    def write_samples(self, records: list[dict[str, Any]], step: int) -> None:
        for record in records:
            self.write("samples", record)
        if self._tracker is not None:
            with storing(f"the tracker's files in {self.out}"):
                self._tracker.log_samples(records, step)

    def log_marks(self) -> dict[str, tuple[int, str]]:
        """Flush everything to the disk; return each log's size in bytes and SHA-256. RemovedError
        where a file that the run has open, or its folder, is no longer in its place."""
        check_in_place(self.out, self._opened)
        if self._tracker is not None:
            self._tracker.flush()
        return {log: file.mark() for log, file in self._logs.items()}

    def listing(self) -> dict[str, str]:
        found = {"checkpoint": "none was written"}
        for name, link in (("checkpoint", "latest"), ("best", "best")):
            if (self.out / link).is_symlink():
                found[name] = str(self.out / os.readlink(self.out / link))
        files = {"curves": "curves.png", "metrics": "metrics.jsonl", "evaluations": "eval.jsonl"}
        return found | {name: str(self.out / file) for name, file in files.items()}

    def close(self, seconds: dict[str, float], is_done: bool = False) -> None:
        if not self._is_writer:
            return
        with (
            storing(f"timings.json, curves.png or the logs in {self.out}"),
            contextlib.ExitStack() as last,  # closes all files, whatever fails before
        ):
            for file in self._logs.values():
                last.callback(file.close)
            if self._tracker is not None:
                last.callback(self._tracker.close, is_done)
            if is_done:  # otherwise the run says what ended it
                self.log_marks()
            write_json(self.out / "timings.json", seconds)
            with atomic_file(self.out / "curves.png") as path:
                objective, seed = self.options["objective"], self.options["seed"]
                title = f"{self.out.name}: {objective}, seed {seed}"
                draw_curves(self.history["metrics"], self.history["eval"], path, title)


def _numbers(log: str, record: dict[str, Any]) -> dict[str, Any]:
    return {f"{log}/{name}": value for name, value in flat(record).items() if value is not None}


def _json_value(value: Any) -> Any:
    """Return the value with null for infinite numbers and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _json_value(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
