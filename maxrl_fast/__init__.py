"""maxrl_fast: high-throughput reinforcement learning with verifiable rewards."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from maxrl_fast.api import Run as Run
    from maxrl_fast.api import Session as Session
    from maxrl_fast.api import run as run
    from maxrl_fast.ops.group_advantage import group_advantage as group_advantage

_MODULES = {"run": "api", "Run": "api", "Session": "api", "group_advantage": "ops"}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, so that `maxrl_fast.ops` loads no trainer."""
    if name in _MODULES:
        return getattr(import_module(f"maxrl_fast.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'maxrl_fast' has no attribute {name!r}")
