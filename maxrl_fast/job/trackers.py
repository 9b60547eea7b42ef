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

    The tracker decides how to show repeated steps (wandb ignores steps that go backwards). It has
    the methods of TensorBoard; samples are not sent. `warn` is called once if it fails during the
    run, whose logs have everything.
    """

    def __init__(self, name: str, out: Path, options: dict[str, Any], warn: Callable[[str], None]):
        self._name, self._warn, self._has_failed = name, warn, False
        # Folders of the same name in different places are different runs.
        identity = f"{out.name}-{zlib.crc32(str(out).encode()):08x}"
        own = {"id": identity, "dir": str(out)} if name == "wandb" else {}
        try:
            self._module = importlib.import_module(name)
            self._module.init(project=PROJECT, name=out.name, config=options, resume="allow", **own)
        except Exception as error:  # no API key, no network, bad settings
            raise InputError(
                f"--log-to {name} could not be started: {type(error).__name__}: {error}"
            ) from error

    def log(self, numbers: Mapping[str, Any], step: int) -> None:
        if not self._has_failed:
            self._try(lambda: self._module.log(numbers, step=step))

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # of the network, a full disk, or a process that has ended
            if not self._has_failed:
                self._warn(
                    f"--log-to {self._name} failed and gets no more numbers, but the logs in the "
                    f"run's folder have all: {type(error).__name__}: {error}"
                )
            self._has_failed = True

    def log_samples(self, records: Iterable[Mapping[str, Any]], step: int) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self, is_done: bool) -> None:
        """Wait until all numbers are sent."""
        self._try(self._module.finish)
