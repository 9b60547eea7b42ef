"""maxrl_fast: high-throughput reinforcement learning with verifiable rewards."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from maxrl_fast.api import Run as Run
    from maxrl_fast.api import run as run


def __getattr__(name: str) -> Any:
    """Import `run` and `Run` when they are first used, so that `maxrl_fast.ops` loads no
    trainer.
    """
    if name in ("run", "Run"):
        return getattr(import_module("maxrl_fast.api"), name)
    raise AttributeError(f"module 'maxrl_fast' has no attribute {name!r}")
