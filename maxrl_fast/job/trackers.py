"""`--log-to wandb` and `--log-to trackio`, which share an interface."""

import importlib
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError

PROJECT = "maxrl_fast"


class Tracker:
    """A run of wandb or trackio, named after its folder `out`, also when resumed.

    The tracker decides how to show repeated steps (wandb ignores steps that go backwards). It has
    the methods of TensorBoard; samples are not sent.
    """

    def __init__(self, name: str, out: Path, options: dict[str, Any]):
        self._module = importlib.import_module(name)
        # Folders of the same name in different places are different runs.
        identity = f"{out.name}-{zlib.crc32(str(out).encode()):08x}"
        own = {"id": identity, "dir": str(out)} if name == "wandb" else {}
        try:
            self._module.init(project=PROJECT, name=out.name, config=options, resume="allow", **own)
        except Exception as error:  # no API key, no network, bad settings
            raise InputError(
                f"--log-to {name} could not be started: {type(error).__name__}: {error}"
            ) from error
        self.log = self._module.log  # (numbers by name, step=...)

    def log_samples(self, records: Iterable[Mapping[str, Any]], step: int) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self, is_done: bool) -> None:
        """Wait until all numbers are sent."""
        self._module.finish()
