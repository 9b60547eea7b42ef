"""Fingerprints of a run's code, prompts and tokenizer, which determine its result."""

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from maxrl_fast.config.options import Config
from maxrl_fast.errors import InputError
from maxrl_fast.job.build_task import reward_names
from maxrl_fast.model.hub import HUB
from maxrl_fast.rewards.models import CLASSIFIER
from maxrl_fast.runtime.loading import is_file
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.names import OBJECT, is_plugin

if TYPE_CHECKING:
    from maxrl_fast.job.resume import Saved

NUM_PARTS, PART = 8, 1 << 12  # of each tensor of a model, and the bytes of a part


def fingerprints(config: Config, task: Task, saved: "Saved | None") -> dict[str, str]:
    """Return SHA-256 hashes by name.

    Of a function only its own file is read, not its imports. A resumed run has the weights of its
    checkpoint `saved`, and does not need --model.
    """
    contents = {
        "the prompts": task.fingerprint.encode(),
        "the stop tokens": json.dumps(task.stop_ids).encode(),
    }
    for name, content in task.tokenizer_files().items():
        if isinstance(content, bytes):  # a file that was read; the task's code makes the others
            contents[f"{name} of the tokenizer"] = content
    files, kept = _files(config, task), {}
    if saved is not None and saved.options.get("model") == config.model.model:
        files["model"] = None
        kept = {name: x for name, x in saved.fingerprints.items() if name == "the file of --model"}
    for option, file in files.items():
        if file is not None:
            try:
                content = model_content(file) if file.is_dir() else file.read_bytes()
                contents[f"the file of --{option}"] = content
            except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: of mmap
                raise InputError(f"cannot read the file of --{option}, {file}: {error}") from error
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()} | kept


def model_content(directory: Path) -> bytes:
    """Return what tells a model from another: its configuration and tokenizer, and the name, type,
    shape and parts of every tensor, so that another head alone is noticed.
    """
    files = [directory / name for name in ("config.json", "tokenizer.json")]
    parts = [path.read_bytes() for path in files if path.exists()]  # who reads it refuses others
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)  # mapped: only what is read below is loaded
                parts.append(f"{name} {tensor.dtype} {[*tensor.shape]}".encode())
                content = tensor.reshape(-1).view(torch.uint8)
                places = {len(content) * i // NUM_PARTS for i in range(NUM_PARTS)}
                parts += [content[i : i + PART].numpy().tobytes() for i in sorted(places)]
                parts.append(content[-PART:].numpy().tobytes())
    return b"".join(parts)


def _files(config: Config, task: Task) -> dict[str, Path | None]:
    """Return the files that the result depends on, by the option that names them."""
    name, loss = config.chosen.task, config.loss
    files = {
        "objective": source_file(config.chosen.objective),
        "loss": source_file(config.chosen.loss),
        "task": source_file(name) if is_plugin(name) else None,
        "environment": source_file(config.parts["task"].get("environment") or ""),
        "rollout": source_file(config.chosen.rollout),
        "teacher-prompt": source_file(loss.teacher_prompt or ""),
    }
    for option, model in (("model", config.model.model), ("reference", loss.reference)):
        if model is not None and not model.startswith(HUB):  # one of the hub has its commit
            files[option] = Path(model)
    for i, reward in enumerate(reward_names(config.reward, task)):
        is_model = reward.startswith(CLASSIFIER)
        path = Path(reward.removeprefix(CLASSIFIER)) if is_model else source_file(reward)
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
