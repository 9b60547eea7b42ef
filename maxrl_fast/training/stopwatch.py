"""Wall time by stage of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Lap:
    seconds: float = 0.0


class Stopwatch:
    """Wall time by stage, that of a stage inside another counted once, and how long the present one has shown no progress.

    Args:
        seconds: by stage, of the run so far.
    """

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds = seconds if seconds is not None else {}
        self._inside, self._depth = 0.0, 0  # seconds of the stages inside the present one; how many there are around
        self._now = ("the start", time.monotonic())  # replaced whole: the watchdog reads it from another thread

    @contextmanager
    def __call__(self, stage: str) -> Iterator[Lap]:
        lap, start = Lap(), time.perf_counter()
        outer, before, is_inside = self._now[0], self._inside, self._depth > 0
        self._depth += 1
        self._now, self._inside = (stage, time.monotonic()), 0.0
        try:
            yield lap
        finally:
            lap.seconds = time.perf_counter() - start
            self.seconds[stage] = self.seconds.get(stage, 0.0) + lap.seconds - self._inside
            self._now = (outer if is_inside else f"what follows {stage}", time.monotonic())
            self._inside, self._depth = before + lap.seconds, self._depth - 1

    def beat(self) -> None:
        """The present stage has made progress."""
        self._now = (self._now[0], time.monotonic())

    def silence(self) -> tuple[str, float]:
        """The present stage, and the seconds since it began or last made progress."""
        stage, since = self._now
        return stage, time.monotonic() - since
