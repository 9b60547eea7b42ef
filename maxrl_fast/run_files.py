"""The files of a run: config.json, the logs metrics.jsonl, eval.jsonl and warnings.jsonl, TensorBoard events, curves.png."""

import json
import os
import shutil
import sys
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from maxrl_fast.curves import draw_curves
from maxrl_fast.durable import write_json
from maxrl_fast.errors import InputError, StorageError
from maxrl_fast.hardware import versions
from maxrl_fast.options import Config
from maxrl_fast.resume import Saved

LOGS = ("metrics", "eval", "warnings")


class RunFiles:
    """Writes the files of one run into its folder; each JSON line is on disk once it is written.

    Args:
        config: resolved.
        is_writer: only one rank is; on the others nothing is written.
        saved: what a resumed run goes on from; None: it begins. The logs are cut to what they were then.

    Raises:
        InputError: where the folder cannot be written to.
    """

    def __init__(self, config: Config, is_writer: bool = True, saved: Saved | None = None):
        assert config.run.out is not None
        self.out, self._config, self._is_writer = config.run.out, config, is_writer
        self.history: dict[str, list[dict[str, Any]]] = {log: [] for log in LOGS}
        if not is_writer:
            return
        try:
            if not config.run.resume and (self.out / "config.json").exists():  # two were started at once, and one has ended
                raise InputError(f"--out must be a new or empty folder, got {self.out}, which holds another run")
            if saved is None:
                self.write_config()
            for partial in (*self.out.glob(".*.partial"), *self.out.glob("checkpoints/.*.partial")):  # of a killed process
                shutil.rmtree(partial) if partial.is_dir() and not partial.is_symlink() else partial.unlink()
            self._logs = {log: self._open(log, saved.logs.get(log, 0) if saved else 0) for log in LOGS}
            next_step = saved.progress.step + 1 if saved and saved.progress.phase == "training" else 0
            self._board = SummaryWriter(str(self.out / "tensorboard"), purge_step=next_step if config.run.resume else None)
        except OSError as error:
            raise InputError(f"cannot write to --out {self.out}: {error}") from error

    def write_config(self) -> None:
        """config.json: options, versions, command."""
        if self._is_writer:
            write_json(self.out / "config.json", {**self._config.flat(), "versions": versions(), "command": sys.argv})

    def _open(self, log: str, size: int) -> Any:
        """A log of `size` bytes to append to; what it holds is in `history`."""
        path = self.out / f"{log}.jsonl"
        if path.exists() and path.stat().st_size < size:
            raise InputError(f"{path} must have the {size:,} bytes that it had at the checkpoint, got {path.stat().st_size:,}")
        file = open(path, "a+", buffering=1)  # noqa: SIM115
        file.truncate(size if os.fstat(file.fileno()).st_size else 0)  # a log that was moved away begins anew
        file.seek(0)
        try:
            self.history[log] = [json.loads(line) for line in file]
        except ValueError as error:
            raise InputError(
                f"{path} is not what the run wrote: {error}; move it away, and the run goes on without it"
            ) from error
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
            self.history[log].append(record)
            if log != "warnings":
                self._draw(log, record)
        except OSError as error:
            raise StorageError(f"cannot write {self.out / log}.jsonl or TensorBoard's events: {error}") from error

    def _draw(self, log: str, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, dict):  # pass_at_k
                for k, number in value.items():
                    self._board.add_scalar(f"{log}/{name.removesuffix('_k')}_{k}", number, record["step"])
            else:
                self._board.add_scalar(f"{log}/{name}", value, record["step"])

    def log_sizes(self) -> dict[str, int]:
        """Bytes of every log, all of them on the disk."""
        self._board.flush()
        for file in self._logs.values():
            os.fsync(file.fileno())
        return {log: os.fstat(file.fileno()).st_size for log, file in self._logs.items()}

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

    def close(self) -> None:
        """Draw the curves and finish the files."""
        if not self._is_writer:
            return
        try:
            draw_curves(self.history["metrics"], self.history["eval"], self.out / "curves.png")
            self._board.close()
            for file in self._logs.values():
                file.close()
        except OSError as error:
            raise StorageError(f"cannot write {self.out / 'curves.png'} or TensorBoard's events: {error}") from error
