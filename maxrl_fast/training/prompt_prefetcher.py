"""Training prompts that are made in a thread while a GPU samples and trains on those before them."""

import atexit

from maxrl_fast.records import Prompts
from maxrl_fast.runtime.background import Background
from maxrl_fast.tasks import Task

EXIT_SECONDS = 10.0  # that the end of the process waits for the thread


class PromptPrefetcher:
    """The training prompts of a task, always one batch ahead.

    A task's prompts depend on their index alone, so these are the same prompts, whenever they are made. Steps take batch after
    batch, also under dynamic sampling; a batch that does not follow the one before, as after a resume, is made when it is asked
    for. Not for processes that share the cores with the trainer's own threads, as on a CPU.

    Args:
        task: its `prompts` may be called from another thread.
    """

    def __init__(self, task: Task):
        self._task = task
        self._background, self._made = Background(), list[Prompts]()
        self._coming: range | None = None  # what the thread makes
        # Else Python would end the thread wherever it is, and in an operation of PyTorch this aborts the process.
        atexit.register(lambda: self._background.join(EXIT_SECONDS))

    def take(self, start: int, count: int) -> Prompts:
        """Return prompts `start` to `start + count - 1`, and begin to make as many after them.

        Raises:
            What `task.prompts` raises for these prompts.
        """
        wanted, coming = range(start, start + count), self._coming
        self._coming = None
        if wanted == coming:
            self._background.wait()
            prompts = self._made.pop()
        else:
            prompts = self._task.prompts("train", start, count)
        # New ones, so that a batch which nobody has asked for, or its error, is forgotten.
        self._background, self._made = Background(), []
        self._coming, made = range(wanted.stop, wanted.stop + count), self._made
        self._background.submit(lambda: made.append(self._task.prompts("train", wanted.stop, count)))
        return prompts
