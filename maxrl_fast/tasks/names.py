"""The names that --task takes."""

import ast
from pathlib import Path

from maxrl_fast.errors import InputError
from maxrl_fast.runtime.loading import is_code, is_file
from maxrl_fast.tasks.dataset_specs import DATASETS, DatasetSpec

GYM = "gym:"
# of a task or a reward that was given to maxrl_fast.run as a Python object, and has no other name
OBJECT = "python:"


def is_plugin(name: str) -> bool:
    """Whether it is a class of the user's: FILE.py:CLASS or package.module:CLASS."""
    return _is_class(name) if is_file(name) else is_code(name)


def is_dataset(name: str) -> bool:
    return name in DATASETS or is_reward(name)


def spec_of(name: str) -> DatasetSpec:
    """Return the specification of a data set, or of prompts for the reward FILE.py:FUNCTION."""
    return DATASETS.get(name) or DatasetSpec(reward=name)


def is_reward(name: str) -> bool:
    """Whether it is FILE.py:FUNCTION, a reward for the prompts of --data."""
    return is_file(name) and not _is_class(name)


def _is_class(name: str) -> bool:
    """The file is not run: rewards run in separate processes."""
    file, _, wanted = name.rpartition(":")
    try:
        statements = ast.parse(Path(file).read_bytes()).body
    except SyntaxError as error:
        why = f"syntax error in {file}, line {error.lineno}: {error.msg}"
        raise InputError(f"--task {name} cannot be read: {why}") from error
    except (OSError, ValueError):  # whoever loads it reports this
        return False
    return any(isinstance(x, ast.ClassDef) and x.name == wanted for x in statements)


def other_prompts(name: str) -> str:
    """Return what besides --data gives a task FILE.py:NAME prompts."""
    file, _, wanted = name.rpartition(":")
    return f", or a class {wanted} in {file} that makes its own prompts" if file else ""


def lost_object(option: str, name: str) -> str:
    """Another process has given this Python object to maxrl_fast.run."""
    return (
        f"--{option} {name} is a Python object that was given to maxrl_fast.run, which only its "
        f"caller has; give it there again, as {option}=..."
    )
