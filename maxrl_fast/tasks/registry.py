"""Tasks by name."""

import dataclasses
import difflib
from collections.abc import Callable
from pathlib import Path

from maxrl_fast.config.options import TaskOptions
from maxrl_fast.errors import InputError
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.chain import ChainTask
from maxrl_fast.tasks.dataset import DatasetTask
from maxrl_fast.tasks.dataset_specs import KINDS
from maxrl_fast.tasks.gym import GymTask, check_config
from maxrl_fast.tasks.maze import MazeTask

GYM = "gym:"


def _maze(options: TaskOptions, seed: int, model: Path | None) -> Task:
    return MazeTask(options.maze_size, seed, options.maze_strict)


def _chain(options: TaskOptions, seed: int, model: Path | None) -> Task:
    return ChainTask(options.chain_length, seed)


def _dataset(options: TaskOptions, seed: int, model: Path | None) -> Task:
    kind = dataclasses.replace(KINDS["dataset"], reward=options.task) if is_file(options.task) else KINDS[options.task]
    if options.data is not None and options.hub is not None:
        raise InputError(f"--task {options.task} takes --data or --hub, got both")
    if options.data is None and options.hub is None and kind.hub is None:
        raise InputError(f"--task {options.task} needs --data FILE or --hub NAME")
    if options.reward is None and kind.reward is None:
        raise InputError(f"--task {options.task} needs --reward FILE:FUNCTION")
    return DatasetTask(options, seed, _of_text(options, model), kind)


def _gym(options: TaskOptions, seed: int, model: Path | None) -> Task:
    check_config(options.gym_config)
    return GymTask(options.task.removeprefix(GYM), options, seed, _of_text(options, model))


def _of_text(options: TaskOptions, model: Path | None) -> Path:
    if model is None:
        raise InputError(f"--task {options.task} needs --model DIR, whose tokenizer reads text")
    return model


TASKS: dict[str, Callable[[TaskOptions, int, Path | None], Task]] = {
    "maze": _maze,
    "chain": _chain,
    **dict.fromkeys(KINDS, _dataset),
}


def unknown_task(name: str) -> str:
    """What to say of a name that no task has."""
    close = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"--task must be {', '.join(TASKS)}, gym:NAME or FILE.py:FUNCTION, got {name!r}{hint}"


def is_file(name: str) -> bool:
    """Whether a task or a reward is FILE.py:FUNCTION."""
    return name.rpartition(":")[0].endswith(".py")


def build_task(options: TaskOptions, seed: int, model: Path | None = None) -> Task:
    """The task that a configuration asks for; InputError where there is none of its name, its options do not fit it, or its
    files cannot be read.

    Args:
        model: the checkpoint directory whose tokenizer reads text.
    """
    if options.task.startswith(GYM):
        return _gym(options, seed, model)
    if is_file(options.task):
        return _dataset(options, seed, model)
    if options.task not in TASKS:
        raise InputError(unknown_task(options.task))
    return TASKS[options.task](options, seed, model)
