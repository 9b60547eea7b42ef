"""What gives responses their rewards. Every reward worker imports this package at its start, so
nothing slow may be imported here."""

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

from maxrl_fast.errors import printable
from maxrl_fast.runtime.background import Progress as Progress
from maxrl_fast.runtime.background import no_progress as no_progress

PROGRESS_INTERVAL = 1.0  # seconds between two calls of `on_progress` where nothing else happens
LONGEST_MESSAGE = 1000  # characters

Rows = Sequence[dict[str, Any]]  # each has "prompt", "response" and the columns of the prompt


class Outcome(NamedTuple):
    """What scoring one response has given; between processes a JSON list."""

    reward: float | None = None  # finite in float32; None: it has failed, or does not apply
    components: Mapping[str, float] = {}  # of the reward, by name
    # of a failure: "exception", "timeout", "crash" (the process ended), "memory", "invalid" (no
    # finite number), or "left" (too many others failed). A late verifier has one, and reward 0.
    kind: str = ""
    message: str = ""  # of a failure, one printable line
    text: str | None = None  # what an environment returned

    @property
    def has_failed(self) -> bool:
        return bool(self.kind) and self.reward is None

    def or_failure(self) -> "Outcome":
        """Return a failure if the reward does not apply."""
        return self if self.kind or self.reward is not None else NOT_APPLIED


def failure(kind: str, message: str) -> Outcome:
    return Outcome(None, {}, kind, printable(message, LONGEST_MESSAGE))


LEFT = failure("left", "")
NOT_APPLIED = failure("invalid", "no reward applies to this response: it is None or NaN")
Outcomes = Generator[tuple[int, Outcome] | None, None, None]


class RewardSource:
    name = ""  # as in --reward
    wants_raw = False  # whether its rows have "response_raw", which includes special tokens
    weights: Mapping[str, float] = {}  # of several rewards, by the names of their components
    wrong_kinds: tuple[str, ...] = ()  # of failures that have reward 0, of a built-in verifier

    def outcomes(self, rows: Rows, group: int) -> Outcomes:
        """Yield the index and outcome of each row in any order, and None at least every second;
        `group` successive rows have the same prompt."""
        raise NotImplementedError

    def score(
        self,
        rows: Rows,
        group: int = 1,
        max_failures: int | None = None,
        on_progress: Progress = no_progress,
    ) -> list[Outcome]:
        """Return the outcome of each row; LEFT for the rest after more than `max_failures`
        failures. `on_progress` is called at least every second."""
        found, num_failed = [LEFT] * len(rows), 0
        with contextlib.closing(self.outcomes(rows, group)) as coming:
            for one in coming:
                on_progress()
                if one is not None:
                    found[one[0]] = one[1].or_failure()
                    num_failed += found[one[0]].has_failed
                if max_failures is not None and num_failed > max_failures:
                    break
        return found

    def lines(self) -> list[str]:
        """What the start of a run says about it."""
        return []

    def close(self) -> None:
        """End what it has started."""
