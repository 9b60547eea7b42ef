"""What gives responses their rewards: the records that all sources share. `tasks/scorer.py` asks
them, the other modules are them.

Every reward worker imports this package at its start, so nothing slow may be imported here.
"""

import math
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

PROGRESS_INTERVAL = 1.0  # seconds between two calls of `on_progress` where nothing else happens
LONGEST_MESSAGE = 1000  # characters

Rows = Sequence[dict[str, Any]]  # each has "prompt", "response" and the columns of the prompt
Progress = Callable[[], None]


def no_progress() -> None:
    """Ignore the progress of scoring."""


@dataclass(frozen=True)
class Failure:
    """The reason why a response has no reward.

    Args:
        index: of the response in its batch.
        kind: "exception", "timeout", "crash" (the process ended), "memory", or "invalid" (the
            result is not a finite number).
        message: one printable line.
    """

    index: int
    kind: str
    message: str


@dataclass
class Scores:
    """Rewards in the order of the rows, 0 for those that failed, and the failures sorted by index.

    A reward is NaN where the function does not apply, if that is allowed.
    """

    rewards: list[float]
    failures: list[Failure] = field(default_factory=list)
    num_left: int = 0  # rows without a result; in the end, because too many others failed
    components: list[dict[str, float]] = field(default_factory=list)  # of each reward
    num_late: int = 0  # responses that exceeded the time limit of a verifier, which are wrong

    @classmethod
    def of_rows(cls, num_rows: int) -> "Scores":
        """Return scores without any result yet."""
        return cls([0.0] * num_rows, [], num_rows, [{} for _ in range(num_rows)])

    def add(self, rows: range, results: Sequence[dict[str, Any]]) -> None:
        """Keep the results (`function.py`) of these rows, or one for all."""
        self.num_left -= len(rows)
        for row, result in zip(
            rows, results if len(results) == len(rows) else [*results] * len(rows), strict=True
        ):
            if "kind" in result:
                insort(
                    self.failures,
                    Failure(row, result["kind"], printable(result["message"])),
                    key=lambda other: other.index,
                )
            else:
                self.rewards[row] = math.nan if result["reward"] is None else result["reward"]
                self.components[row] = result.get("components", {})

    def is_done(self, max_failures: int | None) -> bool:
        """Return whether all rows have a result, or too many have failed."""
        return not self.num_left or (max_failures is not None and len(self.failures) > max_failures)


class RewardSource(Protocol):
    """What gives responses a reward: a Python function, a classifier, or several of them.

    One that derives from this accepts every row, has no processes, and no option makes it faster.
    """

    name: str  # as in --reward
    # whether its rows also have "response_raw", the response with its special tokens
    wants_raw: bool = False

    def score(
        self,
        rows: Rows,
        max_failures: int | None = None,
        on_progress: Progress = no_progress,
        group: int = 1,
    ) -> Scores:
        """Return the rewards of rows, each with "prompt", "response", `function.CUT` and columns;
        `group` rows have the same prompt.

        Args:
            max_failures: after more failures than this the remaining rows are left.
            on_progress: called when results come, and every second.
        """

    def check(self, row: dict[str, Any]) -> None:
        """Raise InputError if it cannot take such a row."""
        return

    def lines(self) -> list[str]:
        """Return what the start of a run says about it."""

    def faster(self, factor: float) -> str:
        """Return the option that makes it about this many times as fast; "" if there is none."""
        return ""

    def close(self) -> None:
        """End what it has started."""
        return


def printable(text: str) -> str:
    """Return text of the reward code as one short line without escape sequences."""
    return "".join(c if c.isprintable() else " " for c in text[:LONGEST_MESSAGE])


def power_of_two(number: float) -> int:
    """Return the nearest power of two that is at least 2."""
    return 2 ** max(1, round(math.log2(number)))
