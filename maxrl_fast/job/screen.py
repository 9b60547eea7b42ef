"""The output of a run: progress on a terminal, and plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text


class Stage:
    """A stage's progress and the time left; a resumed run starts at `done` items."""

    def __init__(self, console: Console, name: str, total: int, lines: int, done: int):
        self._name, self._total, self._console = name, total, console
        self._every = max(1, total // lines)
        self._start, self._before = time.monotonic(), done
        note = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self.bar = Progress(
            *Progress.get_default_columns(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False, table_column=note),
            console=console,
            expand=True,
        )
        self._task = self.bar.add_task(name, total=total, completed=done, note="")

    def advance(self, done: int, note: str = "") -> None:
        if self._console.is_terminal:
            self.bar.update(self._task, completed=done, note=note)
        elif done % self._every == 0 or done == self._total:
            of_one = (time.monotonic() - self._start) / max(done - self._before, 1)
            left = of_one * (self._total - done)
            line = f"{self._name} {done}/{self._total}  {left:.0f} s left  {note}"
            show(self._console, line.rstrip())


class Screen:
    """Standard output, unless `is_quiet`, and standard error; neither if another rank prints. A
    notebook gets plain lines, because rich would need widgets for a moving bar."""

    def __init__(self, is_other_rank: bool = False, is_quiet: bool = False):
        self._is_notebook = Console().is_jupyter
        plain, is_quiet = False if self._is_notebook else None, is_quiet or is_other_rank
        self.console = Console(quiet=is_quiet, force_jupyter=plain, force_terminal=plain)
        self._errors = Console(stderr=True, quiet=is_other_rank)

    @contextmanager
    def stage(
        self, name: str, total: int, lines: int | None = None, done: int = 0
    ) -> Iterator[Stage]:
        """Show a Stage with about `lines` lines off a terminal; None: all, or 20 in a notebook."""
        lines = lines or (20 if self._is_notebook else max(total, 1))
        stage = Stage(self.console, name, total, lines, done)
        with stage.bar if self.console.is_terminal else nullcontext():
            yield stage

    def info(self, text: str) -> None:
        show(self.console, text)

    def error(self, sentence: str) -> None:
        show(self._errors, f"error: {sentence}")

    def warning(self, sentence: str) -> None:
        show(self._errors, f"warning: {sentence}")


def show(console: Console, text: str) -> None:
    """Print lines: on a terminal wrapped between words, elsewhere whole."""
    for line in text.splitlines():
        is_whole = not console.is_terminal
        console.print(Text(line), overflow="ignore", crop=False, soft_wrap=is_whole)
