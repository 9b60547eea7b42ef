"""What the folder of a run holds before it is resumed, and what it means that an option differs
from the run's before.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxrl_fast.config.metadata import Resume, options_of
from maxrl_fast.config.options import Config


@dataclass(frozen=True)
class Changes:
    """Options that differ, each as "lr: 0.1 before, 0.2 now"."""

    policy: tuple[str, ...]  # of the policy's shape
    semantic: tuple[str, ...]  # of what is computed
    rounding: tuple[str, ...]


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    said = {name: _describe(name, before, now) for name in _differing(before, now)}
    schedule = now["lr_schedule"]
    if schedule == "constant":
        said.pop("steps", None)  # otherwise the learning rate depends on the number of steps
    elif "steps" in said:
        said["steps"] += f", on which the learning rate of --lr-schedule {schedule} depends"
    kinds = Resume.POLICY, Resume.SEMANTIC, Resume.ROUNDING
    return Changes(
        *(tuple(text for name, text in said.items() if _meaning(name) == kind) for kind in kinds)
    )


def in_place(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options `now` with the paths `before` where only a folder differs: fingerprints
    compare the files.
    """
    return {
        name: before[name]
        if name in before and _without_folders(value) == _without_folders(before[name])
        else value
        for name, value in now.items()
    }


def _without_folders(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_without_folders, value)]
    return re.sub(r"^(hf:)?/(?!/).*/", r"\1", value) if isinstance(value, str) else value


def own_options(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a line on the options that a resumed run takes from its start, and on those that now
    differ."""
    others = "; ".join(_describe(name, before, now) for name in _differing(before, now))
    but = f", but for {others}" if others else ""
    return f"options: the run's own, from its config.json{but}"


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    common = (name for name in now if name in before and _meaning(name) != Resume.NOT_COMPARED)
    return [name for name in common if before[name] != now[name]]


def _meaning(name: str) -> Resume:
    """An option of another version changes what is computed."""
    option = options_of(Config).get(name)
    return (option and option.find(Resume)) or Resume.SEMANTIC


def _describe(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return f"{name}: {before[name]} before, {now[name]} now"


def checkpoint_order(directory: Path) -> tuple[bool, int]:
    kind, _, number = directory.name.rpartition("-")
    return kind == "step", int(number)


def checkpoints_of(out: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, oldest first, whole or damaged."""
    folder = out / "checkpoints"
    paths = [path for pattern in ("warm-start-*", "step-*") for path in folder.glob(pattern)]
    paths = [path for path in paths if path.name.rpartition("-")[2].isdecimal()]
    return sorted(paths, key=checkpoint_order)


def ended_before_first_step(out: Path, now: dict[str, Any] | None = None) -> bool:
    """Return whether the run in this folder ended before its first step, so that the same command
    may begin it again; not within its warm start, which is resumed, nor with a checkpoint if the
    options `now` compute something else.
    """
    found = [path.name for path in checkpoints_of(out)]
    try:
        options = json.loads((out / "config.json").read_text())
        has_steps = (
            isinstance(options, dict) and options.get("steps", 0) > 0 and "objective" in options
        )
        log = out / "metrics.jsonl"
        has_begun = log.exists() and log.stat().st_size > 0
        # config.json has no option without a value
        changed = changes(dict.fromkeys(now) | options, now) if found and now is not None else None
    except (OSError, ValueError, TypeError, RecursionError):
        return False
    if changed and (changed.policy or changed.semantic):
        return False
    return has_steps and not has_begun and found[-1:] in ([], ["step-000000"])
