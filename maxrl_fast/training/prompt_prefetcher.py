"""Prepares training prompts in a thread while a GPU samples and trains on the previous batch."""

import atexit

from maxrl_fast.records import Prompts
from maxrl_fast.runtime.background import Background
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
        self._background, self._made = Background(), list[Prompts]()
        self._coming: range | None = None  # the prompts that the thread is making
        # Without this Python would kill the thread at exit, which aborts the process if the thread
        # is inside PyTorch.
        atexit.register(lambda: self._background.join(EXIT_SECONDS))

    def take(self, start: int, count: int) -> Prompts:
        """Return prompts `start` to `start + count - 1`, and start to make the next `count`. Raises
        what `task.prompts` raises."""
        wanted, coming = range(start, start + count), self._coming
        self._coming = None
        if wanted == coming:
            self._background.wait()
            prompts = self._made.pop()
        else:
            prompts = self._task.prompts("train", start, count)
        # New objects, so that a batch that was not used, or its error, is dropped.
        self._background, self._made = Background(), []
        self._coming, made = range(wanted.stop, wanted.stop + count), self._made
        self._background.submit(
            lambda: made.append(self._task.prompts("train", wanted.stop, count))
        )
        return prompts
