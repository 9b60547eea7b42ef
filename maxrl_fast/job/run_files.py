"""The files of a run: config.json, logs, curves.png and timings.json; trackers get its numbers."""

import json
import os
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
from maxrl_fast.runtime.files import RunFolder, atomic_file, fsync, remove, storing, write_json
from maxrl_fast.training.objectives.weight import weight_of

LOGS = "metrics", "eval", "eval_prompts", "pass_rates", "warnings", "samples", "rollouts"


def cut_log(path: Path, size: int) -> bool:
    """Cut a log off after the last line within `size` bytes; return whether it has fewer."""
    content = path.read_bytes() if path.exists() else b""
    if content:
        os.truncate(path, content[:size].rfind(b"\n") + 1)
    return len(content) < size


class RunFiles:
    """Writes the files of one run into its folder, if `is_writer`. The logs are cut to their
    lengths at the checkpoint `saved`. StorageError if writing fails."""

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
                for name in ("checkpoints", "tensorboard", "latest", "best", "timings.json"):
                    remove(out / name)
            if saved is None:
                self.write_config()
            for path in (*out.glob(".*.partial"), *out.glob("checkpoints/.*.partial")):
                remove(path)  # of a killed process
            for path in map(self._path, LOGS):
                if cut_log(path, saved.logs.get(path.stem, 0) if saved else 0):
                    warn(f"{path} is shorter than at the checkpoint: the lines before it are lost")
            if log_to is not None:
                is_training = saved and saved.progress.phase == "training"
                step = saved.progress.step if saved and is_training else -1
                self._tracker = Tracker(log_to, out.absolute(), options, step, warn)
        except OSError as error:
            raise InputError(f"cannot write to --out {out}: {error}") from error

    def _path(self, log: str) -> Path:
        return self.out / f"{log}.jsonl"

    def write_config(self) -> None:
        used = {name: value for name, value in self.options.items() if value is not None}
        content = {**used, "versions": versions(), "command": sys.argv}
        write_json(self.out / "config.json", content)
        write_json(self.out / "weight.json", weight_of(self.options, PASS_RATES))

    def write(self, log: str, record: dict[str, Any]) -> None:
        """Append a record to a log, and send its numbers to the tracker."""
        if not self._is_writer:
            return
        # JSON has neither NaN nor infinite numbers: they become null
        text = json.dumps(json.loads(json.dumps(record), parse_constant=lambda _: None))
        with storing(str(self._path(log))), self._path(log).open("a") as file:
            file.write(text + "\n")
        if self._tracker is not None and log in ("metrics", "eval"):
            numbers = {f"{log}/{k}": x for k, x in flat(record).items() if x is not None}
            self._tracker.call("log", numbers, step=record["step"])

    def write_samples(self, records: list[dict[str, Any]], step: int) -> None:
        for record in records:
            self.write("samples", record)
        if self._tracker is not None:
            self._tracker.call("log_samples", records, step)

    def sync(self) -> dict[str, int]:
        """Wait until the logs are on the disk; return the size of each in bytes."""
        paths = [path for path in map(self._path, LOGS) if path.exists()]
        for path in paths:
            fsync(path)
        return {path.stem: path.stat().st_size for path in paths}

    def listing(self) -> dict[str, str]:
        found = {"checkpoint": "none was written"}
        for name, link in ("checkpoint", self.out / "latest"), ("best", self.out / "best"):
            if link.is_symlink():
                found[name] = str(self.out / link.readlink())
        files = {"curves": "curves.png", "metrics": "metrics.jsonl", "evaluations": "eval.jsonl"}
        return found | {name: str(self.out / file) for name, file in files.items()}

    def close(self, seconds: dict[str, float]) -> None:
        if not self._is_writer:
            return
        if self._tracker is not None:
            self._tracker.call("finish")
        with storing(f"timings.json or curves.png in {self.out}"):
            self.sync()
            write_json(self.out / "timings.json", seconds)
            with atomic_file(self.out / "curves.png") as path:
                objective, seed = self.options["objective"], self.options["seed"]
                title, logs = f"{self.out.name}: {objective}, seed {seed}", RunFolder(self.out)
                draw_curves(logs.log("metrics"), logs.log("eval"), path, title)
