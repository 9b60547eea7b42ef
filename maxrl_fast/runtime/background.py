import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
Progress = Callable[[], None]


def no_progress() -> None:
    pass


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Start work in a daemon thread, for which a process that must stop does not wait."""
    job: Future[T] = Future()

    def run() -> None:
        try:
            job.set_result(work())
        except BaseException as error:  # raised by job.result()
            job.set_exception(error)

    threading.Thread(target=run, name="background", daemon=True).start()
    return job


class Background:
    """Runs jobs one after another; `check`, which does not wait, and `wait` raise a job's error,
    with which the jobs after it fail too."""

    def __init__(self) -> None:
        self._newest: Future[None] | None = None

    def submit(self, work: Callable[[], None]) -> None:
        before = self._newest

        def run() -> None:
            if before is not None:
                before.result()
            work()

        self._newest = in_thread(run)

    def check(self) -> None:
        if self._newest is not None and self._newest.done():
            self.wait()

    def wait(self) -> None:
        job = self._newest
        if job is not None:
            wait([job])  # an interrupt leaves the job
            self._newest = None
            job.result()


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
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        outer, before, is_inside = self.stage, self._inside, self._depth > 0
        self._depth += 1
        self.stage, self._inside, self.beats = stage, 0.0, self.beats + 1
        try:
            yield
        finally:
            lap = time.perf_counter() - start
            self.seconds[stage] = self.seconds.get(stage, 0.0) + lap - self._inside
            self.stage = outer if is_inside else f"what follows {stage}"
            self._inside, self._depth = before + lap, self._depth - 1
            self.beats += 1

    def total(self, *stages: str) -> float:
        return sum(self.seconds.get(stage, 0.0) for stage in stages)

    def beat(self) -> None:
        self.beats += 1
        if self._parent is not None:
            self._parent.beat()
