"""What the folder of a run holds, before it is resumed: its checkpoints, and whether it may be
started again.
"""

import json
from pathlib import Path
from typing import Any

from maxrl_fast.config.changes import changes


def checkpoint_order(directory: Path) -> tuple[bool, int]:
    kind, _, number = directory.name.rpartition("-")
    return kind == "step", int(number)


def checkpoints_of(out: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, oldest first, whole or damaged."""
    folder = out / "checkpoints"
    names = [path for pattern in ("warm-start-*", "step-*") for path in folder.glob(pattern)]
    return sorted(
        (path for path in names if path.name.rpartition("-")[2].isdecimal()), key=checkpoint_order
    )


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
        changed = changes(options, now) if found and now is not None else None
    except (OSError, ValueError, TypeError, RecursionError):
        return False
    if changed and (changed.policy or changed.semantic):
        return False
    return has_steps and not has_begun and found[-1:] in ([], ["step-000000"])
