"""maxrl_fast: high-throughput reinforcement learning with verifiable rewards."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from maxrl_fast.api import Run as Run
    from maxrl_fast.train import Command

    train: Command


def __getattr__(name: str) -> Any:
    """Import `train` and `Run` when they are first used, so that `maxrl_fast.ops` loads no trainer."""
    if name == "train":
        return import_module("maxrl_fast.train")
    if name == "Run":
        return import_module("maxrl_fast.api").Run
    raise AttributeError(f"module 'maxrl_fast' has no attribute {name!r}")
