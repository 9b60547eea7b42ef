"""The files of a run: config.json, metrics.jsonl, eval.jsonl, TensorBoard events, curves.png, checkpoints."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from maxrl_fast.curves import draw_curves
from maxrl_fast.errors import InputError
from maxrl_fast.hardware import versions
from maxrl_fast.model.checkpoint import save_checkpoint
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.options import Config
from maxrl_fast.tasks import Task


class RunFiles:
    """Writes the files of one run into a folder that it makes; each JSON line is on disk once it is written."""

    def __init__(self, config: Config, is_writer: bool = True):
        """Only one rank is the writer; on the others nothing is written."""
        assert config.run.out is not None
        self.out, self._is_writer = config.run.out, is_writer
        self._history: dict[str, list[dict[str, Any]]] = {"metrics": [], "eval": []}
        self.checkpoint: Path | None = None  # the last one
        if not is_writer:
            return
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            # Exclusively: of two runs started at once in one folder the second stops here.
            with open(self.out / "config.json", "x") as file:
                json.dump({**config.flat(), "versions": versions(), "command": sys.argv}, file, indent=2)
        except OSError as error:
            raise InputError(f"cannot write to --out {self.out}: {error}") from error
        self._streams = {name: open(self.out / f"{name}.jsonl", "a", buffering=1) for name in ("metrics", "eval")}  # noqa: SIM115
        self._board = SummaryWriter(str(self.out / "tensorboard"))

    def write(self, stream: str, record: dict[str, Any]) -> None:
        """Append to metrics.jsonl or eval.jsonl, and to the TensorBoard events."""
        if not self._is_writer:
            return
        self._streams[stream].write(json.dumps(record) + "\n")
        self._history[stream].append(record)
        for name, value in record.items():
            if isinstance(value, dict):  # pass_at_k
                for k, number in value.items():
                    self._board.add_scalar(f"{stream}/{name.removesuffix('_k')}_{k}", number, record["step"])
            else:
                self._board.add_scalar(f"{stream}/{name}", value, record["step"])

    def save(self, step: int, model: Decoder, task: Task) -> Path:
        """checkpoints/step-NNNNNN, a Hugging Face directory, and `checkpoint`, a link to the newest."""
        directory = self.out / "checkpoints" / f"step-{step:06d}"
        if directory == self.checkpoint:
            return directory
        if not self._is_writer:
            for _ in model.weights():  # gathered from all ranks together
                pass
            self.checkpoint = directory
            return directory
        save_checkpoint(directory, model.config, model.weights(), task.tokenizer_files(), task.stop_ids)
        link = self.out / ".checkpoint-link"
        link.unlink(missing_ok=True)
        link.symlink_to(directory.relative_to(self.out))
        os.replace(link, self.out / "checkpoint")
        self.checkpoint = directory
        return directory

    def listing(self) -> dict[str, str]:
        """Where to find what."""
        return {
            "checkpoint": str(self.checkpoint) if self.checkpoint else "none was written",
            "curves": str(self.out / "curves.png"),
            "metrics": str(self.out / "metrics.jsonl"),
            "evaluations": str(self.out / "eval.jsonl"),
            "TensorBoard": f"tensorboard --logdir {self.out}",
        }

    def close(self) -> None:
        """Draw curves.png and close the files."""
        if not self._is_writer:
            return
        self._board.close()
        for stream in self._streams.values():
            stream.close()
        draw_curves(self._history["metrics"], self._history["eval"], self.out / "curves.png")
