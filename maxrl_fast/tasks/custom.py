"""`--task FILE.py:CLASS` or package.module:CLASS: a custom task."""

import json
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.runtime.loading import build_from_code
from maxrl_fast.tasks import Task


def custom_task(name: str, arguments: str, seed: int, model: Path | None) -> Task:
    """Return the task of a class. arguments: --task-args, a JSON object; `seed` and `model` are
    given to a class that has parameters of these names."""
    offered = {"seed": seed} if model is None else {"seed": seed, "model": model}
    hint = "" if model is not None else ", or --model if it is model"
    given = json_object("--task-args", arguments)
    return build_from_code("task", name, Task, offered, given, f"; --task-args gives it{hint}")


def json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InputError(f"{option} must be a JSON object, got {text!r:.80}")
    return value
