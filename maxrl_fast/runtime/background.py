"""Work that goes on in a thread beside the training."""

import threading
from collections.abc import Callable


class _Job(threading.Thread):
    """Does some work once the job before it is done; if that one has failed, this one has failed too."""

    def __init__(self, work: Callable[[], None], before: "_Job | None"):
        # A daemon: a process that must stop at once does not wait for it.
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
            except BaseException as error:  # raised in the thread that asks for it
                self.error = error
        del self._work, self._before  # they hold the memory that they used


class Background:
    """Runs jobs one after the other in a thread; the error of a job is raised by `check` and `wait`."""

    def __init__(self) -> None:
        self._newest: _Job | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Do this after the work that was submitted before, and return at once."""
        self._newest = _Job(work, self._newest)
        self._newest.start()

    def check(self) -> None:
        """Raise the error of work that has failed."""
        if self._newest is not None and not self._newest.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until all work is done; raise the error of work that has failed."""
        job = self._newest
        if job is not None:
            job.join()
            self._newest = None
            if job.error is not None:
                raise job.error

    def join(self, seconds: float) -> None:
        """Wait until all work is done or has failed, at most so long."""
        if self._newest is not None:
            self._newest.join(seconds)
