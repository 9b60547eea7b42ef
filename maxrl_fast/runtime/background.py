import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for


class Background:
    """Runs jobs one after another in threads; `check` and `wait` raise a job's error, with which
    the jobs after it fail too.
    """

    def __init__(self) -> None:
        self._newest: Future[None] | None = None

    def submit(self, work: Callable[[], None]) -> None:
        before, self._newest = self._newest, Future()
        # a daemon thread: a process that must stop at once does not wait for it
        arguments = work, before, self._newest
        threading.Thread(target=_run, args=arguments, name="background", daemon=True).start()

    def check(self) -> None:
        """Raise the error of failed work, without waiting."""
        if self._newest is not None and self._newest.done():
            self.wait()

    def wait(self) -> None:
        job = self._newest
        if job is not None:
            wait_for([job])  # an interrupt leaves the job
            self._newest = None
            job.result()

    def join(self, seconds: float) -> None:
        """Wait at most this many seconds; errors are not raised."""
        if self._newest is not None:
            wait_for([self._newest], seconds)


def _run(work: Callable[[], None], before: "Future[None] | None", job: "Future[None]") -> None:
    try:
        if before is not None:
            before.result()
        work()
        job.set_result(None)
    except BaseException as error:  # raised by check and wait
        job.set_exception(error)
