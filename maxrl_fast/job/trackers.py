"""`--log-to tensorboard`, `wandb` or `trackio`, which get the numbers of the logs."""

import importlib
import textwrap
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError


class Tracker:
    """A tracker's run, which continues after `step`. After a failure, a warning, nothing is
    sent."""

    def __init__(
        self, name: str, out: Path, options: dict[str, Any], step: int, warn: Callable[[str], None]
    ):
        self._warn = warn
        try:
            if name == "tensorboard":
                self._target: Any = _TensorBoard(out / name, step)
                return
            own = {"project": "maxrl_fast", "name": out.name, "resume": "allow"}
            if name == "wandb":  # folders of the same name in different places are different runs
                identity = f"{out.name}-{zlib.crc32(str(out).encode()):08x}"
                own |= {"id": identity, "dir": str(out)}
            self._target = importlib.import_module(name)
            self._target.init(config=options, **own)
        except Exception as error:  # no API key, no network, bad settings
            why = f"{type(error).__name__}: {error}"
            raise InputError(f"--log-to {name} could not be started: {why}") from error

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

    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter  # an extra

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def log_samples(self, records: Iterable[Mapping[str, Any]], step: int) -> None:
        texts = list[str]()
        for x in records:
            shown = (f"{name} {x[name]}" for name in ("id", "reward", "tokens", "truncated"))
            text = f"{x['prompt']}\n--- response:\n{x['response']}"
            # an indented block of Markdown, which no text can end
            block = textwrap.indent(text, "    ", lambda line: True)
            texts.append(f"##### {', '.join(shown)}\n\n{block}")
        whole = "\n\n".join(texts).encode(errors="backslashreplace").decode()
        self._writer.add_text("samples", whole, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()
