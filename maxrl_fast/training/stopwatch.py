import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Lap:
    seconds: float = 0.0


class Stopwatch:
    """Measures wall time by stage, and the time since the current stage last made progress.

    The time of a nested stage counts for the inner stage only. `seconds`, totals by stage, is
    updated in place. A beat is one of the `parent` too, which measures what waits for this one.
    """

    def __init__(
        self, seconds: dict[str, float] | None = None, parent: "Stopwatch | None" = None
    ) -> None:
        self._parent = parent
        self.seconds = seconds if seconds is not None else {}
        # seconds of the stages inside the current one; how many enclose it
        self._inside, self._depth = 0.0, 0
        # replaced whole: the watchdog reads it from another thread
        self._now = ("the start", time.monotonic())

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

    def total(self, *stages: str) -> float:
        return sum(self.seconds.get(stage, 0.0) for stage in stages)

    def beat(self) -> None:
        self._now = (self._now[0], time.monotonic())
        if self._parent is not None:
            self._parent.beat()

    def silence(self) -> tuple[str, float]:
        """Return the current stage, and the seconds since it started or last made progress."""
        stage, since = self._now
        return stage, time.monotonic() - since
