"""Tasks by name."""

from collections.abc import Callable
from pathlib import Path

from maxrl_fast.errors import InputError
from maxrl_fast.options import TaskOptions
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.dataset import DatasetTask
from maxrl_fast.tasks.maze import MazeTask


def _maze(options: TaskOptions, seed: int, model: Path | None) -> Task:
    return MazeTask(options.maze_size, seed, options.maze_strict)


def _dataset(options: TaskOptions, seed: int, model: Path | None) -> Task:
    for option, value in (("data FILE", options.data), ("reward FILE:FUNCTION", options.reward), ("model DIR", model)):
        if value is None:
            raise InputError(f"--task dataset needs --{option}")
    assert model is not None
    return DatasetTask(options, seed, model)


TASKS: dict[str, Callable[[TaskOptions, int, Path | None], Task]] = {"maze": _maze, "dataset": _dataset}


def build_task(options: TaskOptions, seed: int, model: Path | None = None) -> Task:
    """The task that a configuration asks for; InputError where its options do not fit it, or its files cannot be read.

    Args:
        model: the checkpoint directory whose tokenizer reads text.
    """
    return TASKS[options.task](options, seed, model)
