"""Compare boxed answers with math-verify. This runs in worker processes (rewards/pool.py)."""

from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from maxrl_fast.rewards.boxed import boxed


def score(prompt: Any, response: str, answer: str, **line: Any) -> float:
    """Return 1 if the last \\boxed{} of the response equals the answer, as text or mathematically; else 0.

    The pool limits the time of a call and counts timeouts separately from wrong answers.
    """
    given = boxed(response)
    if not given:
        return 0.0
    if given == answer:
        return 1.0
    # The correct answer comes first: verify is not symmetric. math-verify's own time limits use signals; the pool has its own.
    return float(verify(_parsed(answer), _parsed(given), timeout_seconds=None))


@lru_cache(4096)  # the rollouts of a group share the correct answer, and often wrong ones
def _parsed(answer: str) -> list[Any]:
    return parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
