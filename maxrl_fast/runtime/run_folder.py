"""The folder of a run, read without PyTorch."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError, printable
from maxrl_fast.runtime.files import read_json

NOT_OPTIONS = ("versions", "command")  # entries of config.json beside the options


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, or what a session has saved; it may be incomplete, and written to."""

    path: Path

    @property
    def is_run(self) -> bool:
        """Whether config.json is not a model's, but has options of a run."""
        try:
            content = read_json(self.path / "config.json")
        except InputError:
            return False
        return "objective" in content and "model_type" not in content

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options that have a value, by name."""
        file = self.path / "progress.json"  # of a session, whose config.json is the policy's
        is_session = file.exists()
        content = read_json(file if is_session else self.path / "config.json")
        options = content.get("options") if is_session else content
        if not isinstance(options, dict):
            raise InputError(
                f"{file} must hold the options of a run, got {options!r:.80}; restore it"
            )
        return {k: x for k, x in options.items() if k not in NOT_OPTIONS and x is not None}

    def log(self, name: str) -> list[dict[str, Any]]:
        """Return the records of NAME.jsonl, if it is there, but for a line without an end."""
        file, records = self.path / f"{name}.jsonl", []
        content = file.read_bytes() if file.exists() else b""
        for number, line in enumerate(content.rpartition(b"\n")[0].splitlines(), start=1):
            try:
                records.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                place = f"line {number} of {printable(file)}"
                raise InputError(f"{place} must be JSON: {error}; remove it") from error
        return records

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints, whole or damaged, oldest first."""
        found = [
            (kind == "step", int(number), path)
            for kind in ("warm-start", "step")
            for path in self.path.glob(f"checkpoints/{kind}-*")
            if (number := path.name.removeprefix(f"{kind}-")).isdecimal()
        ]
        return [path for *_, path in sorted(found)]

    @property
    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        link = self.path / "latest"
        return link.resolve() if link.is_dir() else None

    @property
    def is_finished(self) -> bool:
        """Whether the last step has its checkpoint and its evaluation."""
        steps = self.options.get("steps", 0)
        is_saved = self.newest is not None and self.newest.name == f"step-{steps:06d}"
        return is_saved and [x.get("step") for x in self.log("eval")][-1:] == [steps]
