"""The files of a run: config.json, the logs (metrics.jsonl, eval.jsonl and others), TensorBoard events, curves.png and
timings.json; and the same numbers to wandb or trackio."""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from maxrl_fast.errors import InputError, StorageError
from maxrl_fast.files.durable import write_json
from maxrl_fast.hardware import versions
from maxrl_fast.run.plots import draw_curves
from maxrl_fast.run.resume import Saved
from maxrl_fast.run.trackers import Tracker

LOGS = ("metrics", "eval", "warnings", "samples", "diagnostics")
DRAWN = ("metrics", "eval")


class RunFiles:
    """Writes the files of one run into its folder; each JSON line is on disk once it is written.

    Args:
        options: of the run, by name, for config.json.
        log_to: "wandb" or "trackio", beside TensorBoard.
        is_writer: one rank writes; on the others nothing is written.
        is_resumed: whether the folder may hold a run already.
        saved: the checkpoint that a resumed run starts from; None: from the beginning. The logs are cut to what they held then.

    Raises:
        InputError: where the folder cannot be written to.
    """

    def __init__(
        self,
        out: Path,
        options: dict[str, Any],
        log_to: str | None = None,
        is_writer: bool = True,
        is_resumed: bool = False,
        saved: Saved | None = None,
    ):
        self.out, self.options, self._is_writer = out, options, is_writer
        self.history: dict[str, list[dict[str, Any]]] = {log: [] for log in DRAWN}
        if not is_writer:
            return
        try:
            if not is_resumed and (self.out / "config.json").exists():  # two were started at once, and one has ended
                raise InputError(f"--out must be a new or empty folder, got {self.out}, which holds another run")
            if saved is None:
                self.write_config()
            for partial in (*self.out.glob(".*.partial"), *self.out.glob("checkpoints/.*.partial")):  # of a killed process
                shutil.rmtree(partial) if partial.is_dir() and not partial.is_symlink() else partial.unlink()
            self._logs = {log: self._open(log, *(saved.logs.get(log, (0, None)) if saved else (0, None))) for log in LOGS}
            self._tracker = None if log_to is None else Tracker(log_to, out.absolute(), options)
            next_step = saved.progress.step + 1 if saved and saved.progress.phase == "training" else 0
            self._board = SummaryWriter(str(self.out / "tensorboard"), purge_step=next_step if is_resumed else None)
        except OSError as error:
            raise InputError(f"cannot write to --out {self.out}: {error}") from error

    def write_config(self) -> None:
        """config.json: options, versions, command."""
        if self._is_writer:
            write_json(self.out / "config.json", {**self.options, "versions": versions(), "command": sys.argv})

    def _open(self, log: str, size: int, sha256: str | None) -> Any:
        """A log to append to, cut back to the `size` bytes that had this SHA-256; what they hold is in `history`. One that was
        moved away begins anew."""
        path = self.out / f"{log}.jsonl"
        kept = path.read_bytes()[:size] if path.exists() else b""
        if kept and sha256 not in (None, hashlib.sha256(kept).hexdigest()):
            wanted = f"begin with the {size:,} bytes that it had at the checkpoint; moved away, it begins anew"
            raise InputError(f"{path} must {wanted}, got {path.stat().st_size:,} bytes that do not")
        file = open(path, "a", buffering=1)  # noqa: SIM115
        file.truncate(len(kept))
        if log in DRAWN:
            self.history[log] = [json.loads(line) for line in kept.splitlines()]
        return file

    def write(self, log: str, record: dict[str, Any]) -> None:
        """Append to a log, and to the TensorBoard events.

        Raises:
            StorageError: where the disk does not take it.
        """
        if not self._is_writer:
            return
        try:
            self._logs[log].write(json.dumps(record) + "\n")
            if log in DRAWN:
                self.history[log].append(record)
                self._draw(log, record)
        except OSError as error:
            raise StorageError(f"cannot write {self.out / log}.jsonl or TensorBoard's events: {error}") from error

    def _draw(self, log: str, record: dict[str, Any]) -> None:
        numbers: dict[str, Any] = {}
        for name, value in record.items():
            if isinstance(value, dict):  # pass_at_k
                numbers |= {f"{log}/{name.removesuffix('_k')}_{k}": number for k, number in value.items()}
            else:
                numbers[f"{log}/{name}"] = value
        for name, value in numbers.items():
            self._board.add_scalar(name, value, record["step"])
        if self._tracker:
            self._tracker.log(numbers, record["step"])

    def log_marks(self) -> dict[str, tuple[int, str]]:
        """Bytes and SHA-256 of every log, all of them on the disk."""
        self._board.flush()
        marks = {}
        for log, file in self._logs.items():
            os.fsync(file.fileno())
            content = (self.out / f"{log}.jsonl").read_bytes()
            marks[log] = (len(content), hashlib.sha256(content).hexdigest())
        return marks

    def listing(self) -> dict[str, str]:
        """Where to find what."""
        newest, best = self.out / "latest", self.out / "best"
        return {
            "checkpoint": str(self.out / os.readlink(newest)) if newest.exists() else "none was written",
            **({"best": str(self.out / os.readlink(best))} if best.exists() else {}),
            "curves": str(self.out / "curves.png"),
            "metrics": str(self.out / "metrics.jsonl"),
            "evaluations": str(self.out / "eval.jsonl"),
            "TensorBoard": f"tensorboard --logdir {self.out}",
        }

    def close(self, seconds: dict[str, float]) -> None:
        """Draw the curves, write the seconds of each stage and finish the files."""
        if not self._is_writer:
            return
        try:
            draw_curves(self.history["metrics"], self.history["eval"], self.out / "curves.png")
            write_json(self.out / "timings.json", seconds)
            self._board.close()
            if self._tracker:
                self._tracker.finish()
            for file in self._logs.values():
                file.close()
        except OSError as error:
            raise StorageError(f"cannot write {self.out / 'curves.png'} or TensorBoard's events: {error}") from error
