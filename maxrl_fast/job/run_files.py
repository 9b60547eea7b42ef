"""The files of a run: config.json, logs, curves.png and timings.json; trackers get its numbers."""

import contextlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxrl_fast.config.changes import ended_before_first_step
from maxrl_fast.config.names import PASS_RATES
from maxrl_fast.errors import InputError
from maxrl_fast.job.log import flat
from maxrl_fast.job.plots import draw_curves
from maxrl_fast.job.resume import Saved
from maxrl_fast.job.trackers import Tracker
from maxrl_fast.runtime.device import versions
from maxrl_fast.runtime.files import (
    atomic_file,
    check_in_place,
    storing,
    write_error,
    write_json,
)
from maxrl_fast.runtime.run_folder import RunFolder
from maxrl_fast.training.objectives.weight import weight_of

LOGS = (
    *("metrics", "eval", "eval_prompts", "pass_rates"),
    *("warnings", "samples", "rollouts", "diagnostics"),
)


class LogFile:
    """A JSON Lines file to which a run appends; every line is flushed, and the first one makes the
    file. What it has after `size` bytes, those that it had at a checkpoint, is cut off."""

    def __init__(self, path: Path, size: int):
        self._path, self._file = path, path.open("ab") if path.exists() else None
        content = path.read_bytes() if self._file else b""
        self.is_lost = len(content) < size  # lines that it had at the checkpoint
        self.size = content[:size].rfind(b"\n") + 1
        if self._file:
            self._file.truncate(self.size)

    def write(self, record: dict[str, Any]) -> None:
        # JSON has neither NaN nor infinite numbers: they become null
        text = json.dumps(json.loads(json.dumps(record), parse_constant=lambda _: None))
        line = text.encode() + b"\n"
        self._file = self._file or self._path.open("ab")
        self._file.write(line)
        self._file.flush()
        self.size += len(line)

    def sync(self) -> None:
        """Wait until it is on the disk. RemovedError: it is no longer in its place."""
        if self._file:
            check_in_place(self._path, os.fstat(self._file.fileno()))
            os.fsync(self._file.fileno())

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
        self._tracker: Tracker | None = None
        self._logs: dict[str, LogFile] = {}
        if not is_writer:
            return
        if (checkpoints := out / "checkpoints").is_symlink():  # it is removed from, by and by
            raise InputError(f"{checkpoints} must be a folder of this run, got a symbolic link")
        try:
            if not is_resumed and (out / "config.json").exists():
                # another command, or one started at the same time
                if not ended_before_first_step(out, options):
                    raise InputError(
                        f"--out must be a new or empty folder, got {out}, which holds another run; "
                        f"--resume {out} resumes it"
                    )
                self._remove("checkpoints", "tensorboard", "latest", "best", "timings.json")
            if saved is None:
                self.write_config()
            # left by a killed process
            self._remove(".*.partial", "checkpoints/.*.partial")
            self._opened = out.stat()  # `locked` keeps it open: no other folder gets its number
            sizes = saved.logs if saved else {}
            self._logs = {log: LogFile(out / f"{log}.jsonl", sizes.get(log, 0)) for log in LOGS}
            for log in (log for log in LOGS if self._logs[log].is_lost):
                lost = "is missing or shorter than at the checkpoint: the lines before it are lost"
                warn(f"{out / log}.jsonl {lost}")
            if log_to is not None:
                is_training = saved is not None and saved.progress.phase == "training"
                step = saved.progress.step if saved and is_training else -1
                self._tracker = Tracker(log_to, out.absolute(), options, step, warn)
        except OSError as error:
            raise write_error(out, error) from error

    def _remove(self, *patterns: str) -> None:
        for path in [path for pattern in patterns for path in self.out.glob(pattern)]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def write_config(self) -> None:
        used = {name: value for name, value in self.options.items() if value is not None}
        content = {**used, "versions": versions(), "command": sys.argv}
        write_json(self.out / "config.json", content)
        write_json(self.out / "weight.json", weight_of(self.options, PASS_RATES))

    def write(self, log: str, record: dict[str, Any]) -> None:
        """Append a record to a log, and send its numbers to the tracker."""
        if not self._is_writer:
            return
        with storing(f"{self.out / log}.jsonl"):
            self._logs[log].write(record)
        if self._tracker is not None and log in ("metrics", "eval"):
            numbers = {f"{log}/{k}": x for k, x in flat(record).items() if x is not None}
            self._tracker.call("log", numbers, step=record["step"])

    def write_samples(self, records: list[dict[str, Any]], step: int) -> None:
        for record in records:
            self.write("samples", record)
        if self._tracker is not None:
            self._tracker.call("log_samples", records, step)

    def sync(self) -> dict[str, int]:
        """Wait until everything is on the disk; return each log's size in bytes. RemovedError where
        a file that the run has open, or its folder, is no longer in its place."""
        check_in_place(self.out, self._opened)
        for file in self._logs.values():
            file.sync()
        return {log: file.size for log, file in self._logs.items()}

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
                last.callback(self._tracker.call, "finish")
            if is_done:  # otherwise the run says what ended it
                self.sync()
            write_json(self.out / "timings.json", seconds)
            with atomic_file(self.out / "curves.png") as path:
                objective, seed = self.options["objective"], self.options["seed"]
                title, logs = f"{self.out.name}: {objective}, seed {seed}", RunFolder(self.out)
                draw_curves(logs.log("metrics"), logs.log("eval"), path, title)
