"""Whether a response's boxed answer is the right one, by math-verify. It runs in worker processes (rewards/pool.py)."""

from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from maxrl_fast.rewards.boxed import boxed


def score(prompt: Any, response: str, answer: str, **line: Any) -> float:
    """1 where the last \\boxed{} of the response equals the answer, as text or as mathematics; else 0.

    The pool limits the time of a call, and counts one that takes longer apart from wrong answers.
    """
    given = boxed(response)
    if not given:
        return 0.0
    if given == answer:
        return 1.0
    # The order matters: the first is the truth. Their own time limits are signals, which the pool's make needless.
    return float(verify(_parsed(answer), _parsed(given), timeout_seconds=None))


@lru_cache(4096)  # a group's rollouts share the right answer, and often the wrong ones
def _parsed(answer: str) -> list[Any]:
    return parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
