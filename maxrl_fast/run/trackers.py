"""Experiment trackers in addition to TensorBoard: wandb and trackio, which have the same interface."""

import importlib
import zlib
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError

PROJECT = "maxrl_fast"


class Tracker:
    """A run of wandb or trackio.

    A resumed run keeps its name. How repeated steps are shown depends on the tracker (wandb ignores steps that go backwards).

    Args:
        name: "wandb" or "trackio".
        out: the run's folder, whose name is the name of the run; wandb writes its files into it.
        options: the run's configuration.
    """

    def __init__(self, name: str, out: Path, options: dict[str, Any]):
        self._module = importlib.import_module(name)
        # Folders of the same name in different places are different runs.
        identity = f"{out.name}-{zlib.crc32(str(out).encode()):08x}"
        own = {"id": identity, "dir": str(out)} if name == "wandb" else {}
        try:
            self._module.init(project=PROJECT, name=out.name, config=options, resume="allow", **own)
        except Exception as error:  # no API key, no network, bad settings
            raise InputError(f"--log-to {name} could not be started: {type(error).__name__}: {error}") from error

    def log(self, numbers: dict[str, Any], step: int) -> None:
        """Log the numbers of a step by name."""
        self._module.log(numbers, step=step)

    def finish(self) -> None:
        """Wait until all numbers are sent."""
        self._module.finish()
