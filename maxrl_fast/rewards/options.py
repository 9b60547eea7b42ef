"""The options of rewards. The workers of functions do not import them, nor torch."""

from dataclasses import dataclass
from typing import Annotated

from maxrl_fast.algorithms.options import Count, Positive, UnitInterval
from maxrl_fast.runtime.loading import absolute_name


@dataclass(frozen=True)
class Reward:
    """How responses are scored."""

    reward: Annotated[tuple[str, ...], absolute_name] = ()
    """f(prompt, response, **columns) -> float, as FILE.py:f or package.module:f; or hf:DIR, a
    sequence classifier. By default the task's own."""
    reward_weights: tuple[float, ...] = ()
    """Their weights in the sum. By default 1 each."""
    reward_threshold: float | None = None
    """Rewards above this become 1, others 0."""
    reward_workers: Count = 2
    """Processes that run each function."""
    reward_concurrency: Count = 16
    """Calls of an async function at a time in a process."""
    reward_seconds: Positive = 5.0
    """Seconds after which a call is killed and counts as failed."""
    reward_memory_gb: Positive = 2.0
    """Memory of a process beside the loaded function, in 1e9 bytes."""
    reward_env: str = ""
    """Environment variables that functions see, as NAME,NAME."""
    max_reward_error_rate: UnitInterval = 0.1
    """Stop when a larger share of a step's rewards fails; failed ones are left out."""
