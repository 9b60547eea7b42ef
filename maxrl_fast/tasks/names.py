"""The names that --task takes."""

import difflib

from maxrl_fast.tasks.dataset_specs import DATASETS, DatasetSpec

GYM = "gym:"
OBJECT = "python:"  # of a task or a reward that was given to maxrl_fast.train as a Python object, and has no other name
TASKS = ("maze", "chain", *DATASETS)


def is_file(name: str) -> bool:
    """Return whether a task, a reward or an objective is FILE.py:FUNCTION."""
    return name.rpartition(":")[0].endswith(".py")


def is_known(name: str) -> bool:
    """Return whether a task has this name."""
    return name in TASKS or name.startswith((GYM, OBJECT)) or is_file(name)


def dataset_spec(name: str) -> DatasetSpec | None:
    """Return the format of a task's data set; None for tasks that read no data set."""
    return DatasetSpec(reward=name) if is_file(name) else DATASETS.get(name)


def lost_object(option: str, name: str) -> str:
    """Return the error message for a Python object that another process has given to maxrl_fast.train."""
    what = f"--{option} {name} is a Python object that was given to maxrl_fast.train, which only its caller has"
    return f"{what}; give it there again, as {option}=..."


def unknown_task(name: str) -> str:
    """Return the error message for a name that no task has."""
    close = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"--task must be {', '.join(TASKS)}, gym:NAME or FILE.py:FUNCTION, got {name!r}{hint}"
