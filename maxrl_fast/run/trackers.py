"""Experiment trackers beside TensorBoard: wandb and trackio, which share one way of being called."""

import importlib
import importlib.util
import zlib
from pathlib import Path
from typing import Any

from maxrl_fast.config.options import Config
from maxrl_fast.errors import InputError


class Tracker:
    """A run of wandb or trackio.

    A run that is resumed goes on under its old name; steps that are done again are what the tracker makes of them (wandb leaves
    out what goes back).

    Args:
        name: "wandb" or "trackio".
        project: its name there.
        out: the run's folder, whose name is the run's; wandb keeps its files in it.
        options: of the run, as its configuration.
    """

    def __init__(self, name: str, project: str, out: Path, options: dict[str, Any]):
        self._module = importlib.import_module(name)
        # Runs of one name in different folders are different ones.
        identity = f"{out.name}-{zlib.crc32(str(out).encode()):08x}"
        own = {"id": identity, "dir": str(out)} if name == "wandb" else {}
        try:
            self._module.init(project=project, name=out.name, config=options, resume="allow", **own)
        except Exception as error:  # of keys, of the network, of its settings' parsers
            raise InputError(f"--log-to {name} does not begin: {type(error).__name__}: {error}") from error

    def log(self, numbers: dict[str, Any], step: int) -> None:
        """Numbers by name, of a training step."""
        self._module.log(numbers, step=step)

    def finish(self) -> None:
        """Wait until everything is sent."""
        self._module.finish()


def tracker_of(config: Config) -> Tracker | None:
    """What --log-to asks for."""
    options = config.evaluation
    if options.log_to is None:
        return None
    assert config.run.out is not None
    return Tracker(options.log_to, options.log_project, config.run.out.absolute(), config.flat())


def check_tracker(name: str | None) -> None:
    """InputError where it is not installed."""
    if name is not None and importlib.util.find_spec(name) is None:
        raise InputError(f"--log-to {name} needs it to be installed: pip install 'maxrl_fast[{name}]'")
