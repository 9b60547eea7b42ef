"""Prepares training prompts in a thread while a GPU samples and trains on the previous batch."""

import atexit
from concurrent.futures import Future, wait

from maxrl_fast.records import Prompts
from maxrl_fast.runtime.background import in_thread
from maxrl_fast.tasks import Task

EXIT_SECONDS = 10.0  # how long the exit of the process waits for the thread


class PromptPrefetcher:
    """The training prompts of a task, always one batch ahead; `task.prompts` must be callable from
    another thread.

    Prompts depend only on their index. A batch that does not follow the last one, as after a
    resume, is made on request. On a CPU the thread would compete with the trainer's own threads:
    use this only with a GPU.
    """

    def __init__(self, task: Task):
        self._task = task
        self._coming: tuple[range, Future[Prompts]] | None = None  # being made by the thread
        # Without this Python would kill the thread at exit, which aborts the process if the thread
        # is inside PyTorch.
        atexit.register(lambda: self._coming and wait([self._coming[1]], EXIT_SECONDS))

    def take(self, start: int, count: int) -> Prompts:
        """Return prompts `start` to `start + count - 1`, and start to make the next `count`. Raises
        what `task.prompts` raises."""
        wanted, coming = range(start, start + count), self._coming
        self._coming = None  # a batch that is not wanted is dropped, and its error with it
        if coming is not None and coming[0] == wanted:
            prompts = coming[1].result()
        else:
            prompts = self._task.prompts("train", start, count)
        following = range(wanted.stop, wanted.stop + count)
        made = in_thread(lambda: self._task.prompts("train", following.start, count))
        self._coming = following, made
        return prompts
