"""What a resumed run may change."""

import re
from collections.abc import Mapping
from typing import Any

# of one start of a run, which do not belong to its configuration
OF_ONE_START = ("resume", "out", "allow_changes", "config", "dry_run")
# at which weight.json has W_N(p): 60 for each power of ten
PASS_RATES = [10.0 ** (i / 60 - 3) for i in range(181)]


# how numbers round depends on them
_ROUNDING = """threads device token_budget sharding kv_cache_gb vllm_tensor_parallel
checkpoint_activations"""
# nothing that is learned depends on them
_FREE = """reward_workers reward_concurrency reward_seconds reward_memory_gb reward_env
max_reward_error_rate vllm_url eval_every keep_rollouts log_to save_every
keep_checkpoints stall_limit"""
ROUNDING = frozenset(_ROUNDING.split())
FREE = ROUNDING.union(OF_ONE_START, _FREE.split())


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the options outside FREE that differ, each as "lr: 0.1 before, 0.2 now"."""
    # otherwise the learning rate depends on the steps
    free = FREE | ({"steps"} if now.get("lr_schedule") == "constant" else set())
    return [said for name, said in differing(before, now).items() if name not in free]


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return the options that both have, with other values, and what to say of each; paths of which
    only the folder differs are equal: fingerprints compare the files."""
    both = [name for name in now if name in before and _names(before[name]) != _names(now[name])]
    said = {name: f"{name}: {before[name]} before, {now[name]} now" for name in both}
    if "steps" in said and now.get("lr_schedule") == "cosine":
        said["steps"] += ", on which the learning rate of --lr-schedule cosine depends"
    return said


def _names(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_names, value)]
    return re.sub(r"^(hf:)?/(?!/).*/", r"\1", value) if isinstance(value, str) else value


def own_options(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    others = [x for name, x in differing(before, now).items() if name not in OF_ONE_START]
    but = f", but for {'; '.join(others)}" if others else ""
    return f"options: the run's own, from its config.json{but}"
