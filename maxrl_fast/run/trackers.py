"""Experiment trackers beside TensorBoard: wandb and trackio, which share one way of being called."""

import importlib
import importlib.util
import zlib
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError

PROJECT = "maxrl_fast"  # a run has the name of its folder there


class Tracker:
    """A run of wandb or trackio.

    A run that is resumed goes on under its old name; steps that are done again are what the tracker makes of them (wandb leaves
    out what goes back).

    Args:
        name: "wandb" or "trackio".
        out: the run's folder, whose name is the run's; wandb keeps its files in it.
        options: of the run, as its configuration.
    """

    def __init__(self, name: str, out: Path, options: dict[str, Any]):
        self._module = importlib.import_module(name)
        # Runs of one name in different folders are different ones.
        identity = f"{out.name}-{zlib.crc32(str(out).encode()):08x}"
        own = {"id": identity, "dir": str(out)} if name == "wandb" else {}
        try:
            self._module.init(project=PROJECT, name=out.name, config=options, resume="allow", **own)
        except Exception as error:  # of keys, of the network, of its settings' parsers
            raise InputError(f"--log-to {name} does not begin: {type(error).__name__}: {error}") from error

    def log(self, numbers: dict[str, Any], step: int) -> None:
        """Numbers by name, of a training step."""
        self._module.log(numbers, step=step)

    def finish(self) -> None:
        """Wait until everything is sent."""
        self._module.finish()


def check_tracker(name: str | None) -> None:
    """InputError where it is not installed."""
    if name is not None and importlib.util.find_spec(name) is None:
        raise InputError(f"--log-to {name} needs it to be installed: pip install 'maxrl_fast[{name}]'")
