import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
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
