"""What the folder of a run holds before it is resumed, and what it means that an option differs
from the run's before.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxrl_fast.config.names import OF_ONE_START

# What a resumed run may change: nothing that is learned depends on it. Those of ROUNDING change how
# numbers round.
_ROUNDING = """threads device token_budget sharding kv_cache_gb vllm_tensor_parallel compile
checkpoint_activations"""
_FREE = """reward_workers reward_concurrency reward_seconds reward_memory_gb reward_env
max_reward_error_rate vllm_url eval_every diagnose_every keep_rollouts log_to save_every
keep_checkpoints stall_limit"""
ROUNDING = frozenset(_ROUNDING.split())
FREE = ROUNDING.union(OF_ONE_START, _FREE.split())


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the options outside FREE that differ, each as "lr: 0.1 before, 0.2 now"."""
    changed = [name for name in differing(before, now) if name not in FREE]
    if now.get("lr_schedule") == "constant":  # otherwise the learning rate depends on the steps
        changed = [name for name in changed if name != "steps"]
    return [describe(name, before, now) for name in changed]


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the options that both have, with other values; paths of which only the folder differs
    are equal: fingerprints compare the files."""
    return [
        name
        for name in now
        if name in before and _without_folders(before[name]) != _without_folders(now[name])
    ]


def describe(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    said = f"{name}: {before[name]} before, {now[name]} now"
    if name == "steps" and now.get("lr_schedule") == "cosine":
        said += ", on which the learning rate of --lr-schedule cosine depends"
    return said


def _without_folders(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_without_folders, value)]
    return re.sub(r"^(hf:)?/(?!/).*/", r"\1", value) if isinstance(value, str) else value


def own_options(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a line on the options that a resumed run takes from its start."""
    others = [name for name in differing(before, now) if name not in OF_ONE_START]
    but = f", but for {'; '.join(describe(x, before, now) for x in others)}" if others else ""
    return f"options: the run's own, from its config.json{but}"


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
        changed = changes(dict.fromkeys(now) | options, now) if found and now is not None else []
    except (OSError, ValueError, TypeError, RecursionError):
        return False
    return not changed and has_steps and not has_begun and found[-1:] in ([], ["step-000000"])
