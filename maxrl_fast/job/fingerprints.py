"""Fingerprints of a run's code, prompts and tokenizer, which determine its result."""

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from maxrl_fast.config.options import ResolvedConfig
from maxrl_fast.errors import InputError
from maxrl_fast.job.build_task import reward_names
from maxrl_fast.model.hub import directory_of
from maxrl_fast.rewards.models import CLASSIFIER
from maxrl_fast.runtime.loading import is_file
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.names import OBJECT, is_plugin


def fingerprints(config: ResolvedConfig, task: Task) -> dict[str, str]:
    """Return SHA-256 hashes by name.

    Of a function only its own file is read, not its imports.
    """
    contents = {
        "the prompts": task.fingerprint.encode(),
        "the stop tokens": json.dumps(task.stop_ids).encode(),
    }
    for name, content in task.tokenizer_files().items():
        if isinstance(content, bytes):  # a file that was read; the task's code makes the others
            contents[f"{name} of the tokenizer"] = content
    for option, file in _files(config, task).items():
        if file is not None:
            try:
                contents[f"the file of --{option}"] = file.read_bytes()
            except OSError as error:
                raise InputError(f"cannot read the file of --{option}, {file}: {error}") from error
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def _files(config: ResolvedConfig, task: Task) -> dict[str, Path | None]:
    """Return the files that the result depends on, by the option that names them."""
    name, loss = config.task.task, config.loss
    files = {
        "objective": source_file(config.objective.objective),
        "loss": source_file(loss.loss),
        "task": source_file(name) if is_plugin(name) else None,
        "environment": source_file(config.task.environment or ""),
        "rollout": source_file(config.rollout.rollout),
        "teacher-prompt": source_file(loss.teacher_prompt or ""),
    }
    if loss.reference is not None:
        files["reference"] = directory_of(loss.reference) / "config.json"
    for i, reward in enumerate(reward_names(config.reward, task)):
        is_model = reward.startswith(CLASSIFIER)
        path = (
            Path(reward.removeprefix(CLASSIFIER), "config.json")
            if is_model
            else source_file(reward)
        )
        # a Python object has no file
        files[f"reward {i + 1}" if i else "reward"] = None if reward.startswith(OBJECT) else path
    return files


def source_file(function: str) -> Path | None:
    """Return the file of FILE.py:FUNCTION or package.module:function, without importing it; None if
    the name is built in."""
    place, spec, path = function.rpartition(":")[0], None, None
    if is_file(function):
        return Path(place) if Path(place).is_file() else None
    parts = place.split(".")
    if not all(part.isidentifier() for part in parts):  # reported when the function is loaded
        return None
    # importlib.util.find_spec would import the packages around the module
    for i in range(1, len(parts) + 1):
        finders = (finder.find_spec(".".join(parts[:i]), path) for finder in sys.meta_path)
        spec = next((found for found in finders if found is not None), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    if spec is not None and spec.has_location and spec.origin is not None:
        return Path(spec.origin)
    return None


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    found = [f"{name}: missing" for name in before if name not in now]
    found += [f"{name}: new" for name in now if name not in before]
    found += [f"{name}: changed" for name in before if now.get(name, before[name]) != before[name]]
    return sorted(found)
