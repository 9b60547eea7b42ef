"""Tasks by name."""

from maxrl_fast.options import TaskOptions
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.maze import MazeTask

TASKS = {"maze": lambda options, seed: MazeTask(options.maze_size, seed, options.maze_strict)}


def build_task(options: TaskOptions, seed: int) -> Task:
    """The task that a configuration asks for; InputError where its options do not fit it."""
    return TASKS[options.task](options, seed)
