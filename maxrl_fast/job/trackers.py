"""`--log-to tensorboard`, `wandb` or `trackio`: they get the numbers of the logs."""

import importlib
import json
import textwrap
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from maxrl_fast.config.names import OF_ONE_START
from maxrl_fast.errors import InputError


class Tracker:
    """A run of a tracker, named after its folder `out`; a resumed run continues after `step`. After
    a failure in the run, a warning, nothing is sent."""

    def __init__(
        self, name: str, out: Path, options: dict[str, Any], step: int, warn: Callable[[str], None]
    ):
        self._warn = warn
        try:
            if name == "tensorboard":
                self._target: Any = _TensorBoard(out / name, options, step)
                return
            # folders of the same name in different places are different runs
            identity = f"{out.name}-{zlib.crc32(str(out).encode()):08x}"
            own = {"id": identity, "dir": str(out)} if name == "wandb" else {}
            self._target = importlib.import_module(name)
            self._target.init(
                project="maxrl_fast", name=out.name, config=options, resume="allow", **own
            )
        except Exception as error:  # no API key, no network, bad settings
            raise InputError(
                f"--log-to {name} could not be started: {type(error).__name__}: {error}"
            ) from error

    def call(self, name: str, *arguments: Any, **options: Any) -> None:
        """Call a function of the tracker, if it has it."""
        try:
            getattr(self._target, name, lambda *_, **__: None)(*arguments, **options)
        except Exception as error:  # of the network, a full disk, or a process that has ended
            self._target = None
            lost = "the tracker, which gets no more numbers (the logs have all)"
            self._warn(f"{type(error).__name__} of {lost}: {error}")


class _TensorBoard:
    """A new event file; TensorBoard drops what earlier files have of later steps."""

    def __init__(self, folder: Path, options: Mapping[str, Any], step: int):
        from tensorboard.plugins.hparams import summary_v2  # an extra
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)
        shown = {
            name: json.dumps(x) if isinstance(x, list | dict) else x
            for name, x in options.items()
            if name not in OF_ONE_START
        }
        file: Any = self._writer.file_writer
        file.add_summary(summary_v2.hparams_pb(shown, trial_id=str(folder.parent)), 0)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def log_samples(self, records: Iterable[Mapping[str, Any]], step: int) -> None:
        self._writer.add_text("samples", "\n\n".join(map(_markdown, records)), step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


def _markdown(record: Mapping[str, Any]) -> str:
    """Format a sample as Markdown with its texts in an indented block, which no text can end."""
    title = ", ".join(f"{name} {record[name]}" for name in ("id", "reward", "tokens", "truncated"))
    text = f"{record['prompt']}\n--- response:\n{record['response']}"
    text = text.encode(errors="backslashreplace").decode()
    return f"##### {title}\n\n" + textwrap.indent(text, "    ", lambda line: True)
