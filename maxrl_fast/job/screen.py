"""The output of a run: progress on a terminal, and plain lines elsewhere."""

import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    RenderableColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

_BAR_WIDTH = 24


class FittedProgress(Progress):
    """A progress line of one task that fits the terminal's width: the step, the total and the time
    left, then, as far as they fit, the numbers of the task's note, the elapsed time and the bar."""

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        """Choose the columns for each drawing: the terminal may have been resized."""
        tasks = list(tasks)
        if tasks:  # none yet at the first call
            self.columns = self._fitting(tasks[0])
        return super().make_tasks_table(tasks)

    def _fitting(self, task: Task) -> tuple[ProgressColumn, ...]:
        name = TextColumn("{task.description:<10}")
        count = MofNCompleteColumn()
        elapsed = TimeElapsedColumn()
        left: tuple[ProgressColumn, ...] = (TextColumn("left"), TimeRemainingColumn())
        always = sum(len(str(column(task))) + 1 for column in (name, count, *left))
        room = self.console.width - always + 1
        numbers = [number for number in task.fields["note"].split("  ") if number]
        note = numbers.copy()
        while note and len("  ".join(note)) + 1 > room:
            note.pop()
        room -= len("  ".join(note)) + 1 if note else 0
        has_elapsed = note == numbers and room > len(str(elapsed(task)))
        room -= len(str(elapsed(task))) + 1
        has_bar = has_elapsed and room > _BAR_WIDTH
        bar = [BarColumn(bar_width=_BAR_WIDTH)] * has_bar
        shown = [RenderableColumn(Text("  ".join(note), no_wrap=True))] * bool(note)
        return (name, *bar, count, *[elapsed] * has_elapsed, *left, *shown)


class Stage:
    """Shows a stage's progress and the time left; a resumed run starts at `done` items."""

    def __init__(self, console: Console, name: str, total: int, lines: int, done: int):
        self._name, self._total, self._console = name, total, console
        self._every = max(1, total // lines)
        self._start, self._before = time.monotonic(), done
        self._bar = FittedProgress(console=console)
        self._task = self._bar.add_task(name, total=total, completed=done, note="")

    def advance(self, done: int, note: str = "") -> None:
        if self._console.is_terminal:
            self._bar.update(self._task, completed=done, note=note)
        elif done % self._every == 0 or done == self._total:
            of_one = (time.monotonic() - self._start) / max(done - self._before, 1)
            left = of_one * (self._total - done)
            line = f"{self._name} {done}/{self._total}  {left:.0f} s left  {note}"
            self._console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def running(self) -> Iterator["Stage"]:
        if self._console.is_terminal:
            with self._bar:
                yield self
        else:
            yield self


class Screen:
    """Prints to standard output and standard error; nothing if `is_quiet`, because another rank
    prints. `most_lines` limits a stage's progress lines off a terminal."""

    def __init__(
        self, console: Console | None = None, is_quiet: bool = False, most_lines: int | None = None
    ):
        self.console, self._is_quiet = console or Console(quiet=is_quiet), is_quiet
        self._most_lines = most_lines

    def info(self, text: str) -> None:
        """Print lines, wrapped between words on a terminal and whole in a file."""
        shown = wrapped(text, self.console.width) if self.console.is_terminal else text
        self.console.print(shown, markup=False, highlight=False, soft_wrap=True)

    def stage(
        self, name: str, total: int, lines: int | None = None, done: int = 0
    ) -> AbstractContextManager[Stage]:
        """Return the context of a Stage with about `lines` lines off a terminal; None: all."""
        lines = min(lines or max(total, 1), self._most_lines or max(total, 1))
        return Stage(self.console, name, total, lines, done).running()

    def error(self, sentence: str) -> None:
        self._report(f"error: {sentence}")

    def warning(self, sentence: str) -> None:
        self._report(f"warning: {sentence}")

    def _report(self, line: str) -> None:
        if not self._is_quiet:
            shown = wrapped(line, self.console.width) if sys.stderr.isatty() else line
            print(shown, file=sys.stderr, flush=True)


def wrapped(text: str, width: int) -> str:
    """Wrap long lines between words; continuation lines are indented. A longer word, such as a
    path, stays whole for copying."""
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        wrapper = textwrap.TextWrapper(
            width,
            subsequent_indent=indent + "  ",
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        lines += wrapper.wrap(line) or [""]
    return "\n".join(lines)
