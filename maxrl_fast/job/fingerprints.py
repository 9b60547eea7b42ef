"""Fingerprints of what determines a run's result beside its options."""

import hashlib
import importlib.util
import json
from pathlib import Path

from maxrl_fast.algorithms.options import as_list
from maxrl_fast.config.options import Config
from maxrl_fast.config.resolve import NAMES_CODE
from maxrl_fast.errors import InputError
from maxrl_fast.job.resume import Saved
from maxrl_fast.model.checkpoint import HUB
from maxrl_fast.rewards.models import CLASSIFIER
from maxrl_fast.runtime.files import check_regular
from maxrl_fast.runtime.loading import is_code, is_file
from maxrl_fast.tasks import Task


def fingerprints(config: Config, task: Task, saved: Saved | None) -> dict[str, str]:
    """Return SHA-256 hashes by name. Of a function only its own file is read. A resumed run has the
    weights of its checkpoint `saved`, and does not need --model."""
    contents = {
        "the prompts": task.fingerprint.encode(),
        "the stop tokens": json.dumps(task.stop_ids).encode(),
    }
    for name, content in task.tokenizer_files().items():
        if isinstance(content, bytes):  # a file that was read; the task's code makes the others
            contents[f"{name} of the tokenizer"] = content
    options, kept = config.flat(), dict[str, str]()
    if saved is not None and saved.options.get("model") == config.model.model:
        options.pop("model", None)
        kept = {name: x for name, x in saved.fingerprints.items() if name == "the file of --model"}
    for option in (*NAMES_CODE, "model", "reference"):
        for i, value in enumerate(map(str, as_list(options.get(option)))):
            what = f"the file of --{option.replace('_', '-')}{f' {i + 1}' if i else ''}"
            is_folder = option in ("model", "reference") or value.startswith(CLASSIFIER)
            try:
                if is_folder and not value.startswith(HUB):  # one of the hub has its commit
                    contents[what] = model_content(Path(value.removeprefix(CLASSIFIER)))
                elif (file := source_file(value)).is_file():
                    contents[what] = file.read_bytes()
            except OSError as error:
                raise InputError(f"cannot read {what}, {value}: {error}") from error
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()} | kept


def model_content(directory: Path) -> bytes:
    """Return a model's configuration, and size and header of each file of weights, which has the
    names, types and shapes of tensors."""
    config = directory / "config.json"
    content = config.read_bytes() if config.exists() else b""
    for path in sorted(directory.glob("*.safetensors")):
        check_regular(path)
        with path.open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), path.stat().st_size))
        content += f"{path.name} {path.stat().st_size}".encode() + header
    return content


def source_file(name: str) -> Path:
    """Return the file of FILE.py:NAME or package.module:NAME, which is missed when it is loaded."""
    place = name.rpartition(":")[0]
    root, *rest = place.split(".")
    if is_file(name) or not is_code(name):
        return Path(place)
    spec = importlib.util.find_spec(root)  # that of a module would run its package
    if spec is None or not rest:
        return Path(spec.origin or "") if spec else Path()
    module = Path(next(iter(spec.submodule_search_locations or [""])), *rest)
    return module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
