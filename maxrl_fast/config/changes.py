"""What it means for a resumed run that an option differs from the run's before."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Options that say how a run was started,
OF_ONE_START = ("out", "config", "resume", "allow_changes", "dry_run")
# options that change nothing that is learned,
FREE = (
    *("save_every", "keep_checkpoints", "eval_every", "stall_limit"),
    *("reward_workers", "reward_seconds", "reward_memory_gb", "reward_isolation", "reward_env", "max_reward_error_rate"),
    *("reward_concurrency", "judge_rate"),
    *("diagnose_every", "keep_rollouts", "log_to", "vllm_url"),
)
# options that fix the shape of the policy,
POLICY = (
    "model_backend",
    "hidden_size",
    "intermediate_size",
    "layers",
    "heads",
    "kv_heads",
    "rope_theta",
    "lora_rank",
    "lora_targets",
)
# and options that change the numbers by rounding alone. All others change the mathematics, or, as eval_prompts
# and eval_samples do, what is measured: the evaluation after the checkpoint is made again, and `best` compares evaluations.
ROUNDING = (
    *("device", "threads", "sharding", "token_budget", "checkpoint_activations", "compile", "kv_cache_gb"),
    "vllm_tensor_parallel",
)


@dataclass(frozen=True)
class Changes:
    """Options that differ, each as "lr: 0.1 before, 0.2 now"."""

    policy: tuple[str, ...]  # of the policy's shape
    mathematics: tuple[str, ...]
    rounding: tuple[str, ...]


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Return the options whose values changed between a run and its resumption."""
    differing = [name for name in now if name in before and before[name] != now[name] and name not in (*OF_ONE_START, *FREE)]
    if now["lr_schedule"] == "constant" and "steps" in differing:
        differing.remove("steps")  # otherwise the learning rate depends on the number of steps
    said = {name: _said(name, before, now) for name in differing}
    if "steps" in said:
        said["steps"] += f", on which the learning rate of --lr-schedule {now['lr_schedule']} depends"
    return Changes(
        policy=tuple(text for name, text in said.items() if name in POLICY),
        mathematics=tuple(text for name, text in said.items() if name not in (*POLICY, *ROUNDING)),
        rounding=tuple(text for name, text in said.items() if name in ROUNDING),
    )


def own_options(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a line on the options that a resumed run takes from its start, and on those that now have other values."""
    differing = [name for name in now if name in before and before[name] != now[name] and name not in OF_ONE_START]
    others = "; ".join(_said(name, before, now) for name in differing)
    return "options: the run's own, from its config.json" + (f", but for {others}" if others else "")


def _said(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return f"{name}: {before[name]} before, {now[name]} now"
