"""`--log-to wandb` and `--log-to trackio`, which share an interface."""

import importlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError

PROJECT = "maxrl_fast"


class Tracker:
    """A run of wandb or trackio, named after its folder `out`, also when resumed.

    It has the methods of TensorBoard; samples are not sent. After a failure in the run, a warning,
    nothing is sent.
    """

    def __init__(self, name: str, out: Path, options: dict[str, Any], warn: Callable[[str], None]):
        self._warn = warn
        # Folders of the same name in different places are different runs.
        identity = f"{out.name}-{zlib.crc32(str(out).encode()):08x}"
        own = {"id": identity, "dir": str(out)} if name == "wandb" else {}
        try:
            module = importlib.import_module(name)
            module.init(project=PROJECT, name=out.name, config=options, resume="allow", **own)
        except Exception as error:  # no API key, no network, bad settings
            raise InputError(
                f"--log-to {name} could not be started: {type(error).__name__}: {error}"
            ) from error
        self._module: Any = module

    def log(self, numbers: Mapping[str, Any], step: int) -> None:
        self._try("log", numbers, step=step)

    def _try(self, name: str, *arguments: Any, **options: Any) -> None:
        try:
            if self._module is not None:
                getattr(self._module, name)(*arguments, **options)
        except Exception as error:  # of the network, a full disk, or a process that has ended
            self._module = None
            lost = "the tracker, which gets no more numbers (the logs have all)"
            self._warn(f"{type(error).__name__} of {lost}: {error}")

    def log_samples(self, records: Iterable[Mapping[str, Any]], step: int) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self, is_done: bool) -> None:
        self._try("finish")
