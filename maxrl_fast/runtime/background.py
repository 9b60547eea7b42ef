import threading
from collections.abc import Callable


class _Job(threading.Thread):
    """Runs after the job before it; fails with that job's error if it failed."""

    def __init__(self, work: Callable[[], None], before: "_Job | None"):
        # A daemon thread: a process that must stop at once does not wait for it.
        super().__init__(name="background", daemon=True)
        self._work, self._before = work, before
        self.error: BaseException | None = None

    def run(self) -> None:
        if self._before is not None:
            self._before.join()
            self.error = self._before.error
        if self.error is None:
            try:
                self._work()
            except BaseException as error:  # raised by check and wait
                self.error = error
        del self._work, self._before  # frees the memory that they hold


class Background:
    """Runs jobs one after another in a thread; `check` and `wait` raise a job's error."""

    def __init__(self) -> None:
        self._newest: _Job | None = None

    def submit(self, work: Callable[[], None]) -> None:
        self._newest = _Job(work, self._newest)
        self._newest.start()

    def check(self) -> None:
        """Raise the error of failed work, without waiting."""
        if self._newest is not None and not self._newest.is_alive():
            self.wait()

    def wait(self) -> None:
        job = self._newest
        if job is not None:
            job.join()
            self._newest = None
            if job.error is not None:
                raise job.error

    def join(self, seconds: float) -> None:
        """Wait at most this many seconds; errors are not raised."""
        if self._newest is not None:
            self._newest.join(seconds)
