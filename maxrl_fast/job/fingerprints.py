"""Fingerprints of a run's code, prompts and tokenizer, which determine its result."""

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from maxrl_fast.errors import InputError
from maxrl_fast.runtime.loading import is_file
from maxrl_fast.tasks import Task


def fingerprints(task: Task, files: Mapping[str, Path | None]) -> dict[str, str]:
    """Return SHA-256 hashes by name.

    `files` are by the option that names them. Only a function's own file is read, not its imports.
    Raises InputError if a file cannot be read.
    """
    contents = {
        "the prompts": task.fingerprint.encode(),
        "the stop tokens": json.dumps(task.stop_ids).encode(),
    }
    for name, content in task.tokenizer_files().items():
        if isinstance(content, bytes):  # a file that was read; the task's code makes the others
            contents[f"{name} of the tokenizer"] = content
    for option, file in files.items():
        if file is not None:
            try:
                contents[f"the file of --{option}"] = file.read_bytes()
            except OSError as error:
                raise InputError(f"cannot read the file of --{option}, {file}: {error}") from error
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def source_file(function: str) -> Path | None:
    """Return the file of FILE.py:FUNCTION or package.module:function, without importing it."""
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
