"""What can be known of a configuration to be wrong before any work."""

import math
from collections.abc import Callable
from typing import Any

import torch

from maxrl_fast.config.options import Config
from maxrl_fast.config.parse import default_k, nearest
from maxrl_fast.errors import InputError
from maxrl_fast.objectives import OBJECTIVES, estimator_options
from maxrl_fast.ops import ESTIMATORS, group_advantage
from maxrl_fast.ops.token_batch import AGGREGATIONS
from maxrl_fast.run.trackers import check_tracker
from maxrl_fast.tasks.dataset_specs import KINDS
from maxrl_fast.tasks.registry import GYM, TASKS, is_file, unknown_task


def check(config: Config) -> None:
    """Everything that can be known to be wrong before any work.

    Raises:
        InputError: with a sentence that says what was wanted and what came.
    """
    options = config.flat()
    if options["objective"] not in OBJECTIVES:
        raise InputError(
            f"objective must be one of {', '.join(OBJECTIVES)}, got {options['objective']!r}"
            f"{nearest(options['objective'], OBJECTIVES)}"
        )
    if options["aggregation"] not in (None, *AGGREGATIONS):
        raise InputError(
            f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {options['aggregation']!r}"
            f"{nearest(options['aggregation'], AGGREGATIONS)}"
        )
    at_least_one = (
        "prompts rollouts max_new_tokens sft_batch updates_per_step token_budget hidden_size intermediate_size layers heads "
        "kv_heads eval_prompts eval_samples threads reward_workers max_prompt_tokens"
    )
    _require(options, at_least_one, "at least 1", lambda x: x >= 1)
    _require(
        options,
        "top_k sft_steps steps warmup_steps eval_every save_every keep_checkpoints lora_rank dynamic_sampling keep_samples "
        "diagnose_every",
        "at least 0",
        lambda x: x >= 0,
    )
    _require(options, "seed", "in [0, 2^63)", lambda x: 0 <= x < 2**63)
    _require(
        options,
        "temperature kv_cache_gb sft_lr lr clip_grad rope_theta lora_alpha reward_seconds reward_memory_gb stall_limit",
        "a finite number above 0",
        lambda x: 0 < x < math.inf,
    )
    _require(
        options,
        "importance_cap clip_high weight_decay entropy_coef kl_coef",
        "finite and at least 0",
        lambda x: 0 <= x < math.inf,
    )
    _require(options, "reward_threshold", "finite", math.isfinite)
    _require(options, "min_p max_reward_error_rate", "in [0, 1]", lambda x: 0 <= x <= 1)
    _require(options, "top_p", "above 0 and at most 1", lambda x: 0 < x <= 1)
    _require(options, "clip_low beta1 beta2 sft_beta2", "in [0, 1)", lambda x: 0 <= x < 1)
    _require(options, "dual_clip", "above 1", lambda x: 1 < x < math.inf)
    _check_task(options)
    if OBJECTIVES[options["objective"]].row is None:
        _check_pacs(options)
    else:
        _check_estimator(config, options)
    check_tracker(options["log_to"])
    if options["resume"] is not None and options["out"] not in (None, options["resume"]):
        raise InputError(f"--resume goes on in its own folder, {options['resume']}, got --out {options['out']}")
    if options["prompts"] % options["updates_per_step"]:
        raise InputError(
            f"prompts must be a multiple of updates_per_step, got {options['prompts']} and {options['updates_per_step']}"
        )
    for whole, part in (("hidden_size", "heads"), ("heads", "kv_heads")):
        if options[whole] % options[part]:
            raise InputError(f"{whole} must be a multiple of {part}, got {options[whole]} and {options[part]}")
    if options["hidden_size"] // options["heads"] % 2:
        raise InputError(f"hidden_size / heads must be even, got {options['hidden_size']} / {options['heads']}")


def _check_task(options: dict[str, Any]) -> None:
    """What is wrong with options of a task that is another."""
    task = options["task"]
    is_gym, is_own, has_lines = task.startswith(GYM), is_file(task), is_file(task) or task in KINDS
    if not (is_gym or has_lines or task in TASKS):
        raise InputError(unknown_task(task))
    for names, is_taken in (
        ("data test_data hub prompt_key", has_lines),
        ("answer_key", has_lines and task in KINDS and KINDS[task].gold is not None),
        ("prompt_suffix", has_lines or is_gym),
        ("gym_config", is_gym),
        ("reward", not is_own),  # it is one
    ):
        for name in names.split():
            if options[name] not in (None, "") and not is_taken:
                raise InputError(f"task {task} takes no {name}, got {options[name]!r}")


def _check_estimator(config: Config, options: dict[str, Any]) -> None:
    """What is wrong with the options of an objective that is a group advantage."""
    name, n = options["objective"], options["rollouts"]
    row = OBJECTIVES[name].row
    assert row is not None
    if n < row.min_rollouts:
        raise InputError(f"{name} needs at least {row.min_rollouts} rollouts per prompt, got {n}")
    try:
        row.resolve_size(name, n, default_k(config), options["order"])
        row.resolve_options(name, estimator_options(options["estimator_options"]))
    except ValueError as error:
        raise InputError(str(error)) from error
    if options["dynamic_sampling"] and _learns_from_equal_rewards(config, options):
        raise InputError(f"dynamic_sampling leaves out groups whose rewards are equal, from which {name} learns")
    if options["scale_by_k"] and not row.scales_by_k:
        raise InputError(f"{name} takes no scale_by_k")
    _refuse_options(options, "beta score class_weight ref_reset_interval")


def _learns_from_equal_rewards(config: Config, options: dict[str, Any]) -> bool:
    """Whether rollouts of a group that all failed, or all succeeded, have advantages."""
    name, n = options["objective"], options["rollouts"]
    rewards = torch.tensor([[0.0], [1.0]]).expand(2, n)
    known = {
        "lengths": torch.ones(2, n, dtype=torch.int64),
        "logprobs": -torch.arange(1.0, n + 1).expand(2, n),
        "greedy_correct": torch.tensor([False, False]),
    }
    inputs: dict[str, Any] = {name_of: known[name_of] for name_of in ESTIMATORS[name].inputs}
    more = estimator_options(options["estimator_options"])
    return bool(group_advantage(rewards, name, k=default_k(config), order=options["order"], **inputs, **more).any())


def _check_pacs(options: dict[str, Any]) -> None:
    """The same for PACS."""
    name, objective = options["objective"], OBJECTIVES[options["objective"]]
    _refuse_options(options, "k order scale_by_k estimator_options")
    if name != "pacs_paper":
        _refuse_options(options, "ref_reset_interval")
    _require(options, "beta", "a finite number above 0", lambda x: 0 < x < math.inf)
    _require(options, "ref_reset_interval", "at least 0", lambda x: x >= 0)
    if options["rollouts"] < 2 and options["score"] != "naive":
        raise InputError(f"{name} needs at least 2 rollouts per prompt, but with --score naive, got {options['rollouts']}")
    if options["importance_cap"]:
        raise InputError(f"{name} takes no importance_cap: it learns from rollouts as from data, whoever sampled them")
    for option, needed in (("loss", objective.loss), ("aggregation", objective.aggregation)):
        if options[option] not in (None, needed):
            raise InputError(f"{option} must be {needed} for {name}, whose loss it is a part of, got {options[option]}")


def _refuse_options(options: dict[str, Any], names: str) -> None:
    for name in names.split():
        if options[name] not in (None, False, ""):
            raise InputError(f"{options['objective']} takes no {name}")


def _require(options: dict[str, Any], names: str, wanted: str, holds: Callable[[Any], bool]) -> None:
    for name in names.split():
        if options[name] is not None and not holds(options[name]):
            raise InputError(f"{name} must be {wanted}, got {options[name]}")
