import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Lap:
    seconds: float = 0.0


class Stopwatch:
    """Measures wall time by stage, of nested ones for the inner one only, in `seconds`, and counts
    signs of progress for the watchdog; a beat is one of `parent` too, which waits for this one."""

    def __init__(
        self, seconds: dict[str, float] | None = None, parent: "Stopwatch | None" = None
    ) -> None:
        self._parent = parent
        self.seconds = seconds if seconds is not None else {}
        # seconds of the stages inside the current one; how many enclose it
        self._inside, self._depth = 0.0, 0
        self.stage, self.beats = "the start", 0

    @contextmanager
    def __call__(self, stage: str) -> Iterator[Lap]:
        lap, start = Lap(), time.perf_counter()
        outer, before, is_inside = self.stage, self._inside, self._depth > 0
        self._depth += 1
        self.stage, self._inside, self.beats = stage, 0.0, self.beats + 1
        try:
            yield lap
        finally:
            lap.seconds = time.perf_counter() - start
            self.seconds[stage] = self.seconds.get(stage, 0.0) + lap.seconds - self._inside
            self.stage = outer if is_inside else f"what follows {stage}"
            self._inside, self._depth = before + lap.seconds, self._depth - 1
            self.beats += 1

    def total(self, *stages: str) -> float:
        return sum(self.seconds.get(stage, 0.0) for stage in stages)

    def beat(self) -> None:
        self.beats += 1
        if self._parent is not None:
            self._parent.beat()
