"""What can be known to be wrong with a configuration before any work."""

import importlib.util
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxrl_fast.algorithms.losses.registry import TokenLoss, learns_without_advantage
from maxrl_fast.config.conditions import loss_of
from maxrl_fast.config.metadata import as_list, check_limits
from maxrl_fast.config.options import Config, CorrectionName, LossOptions
from maxrl_fast.errors import InputError
from maxrl_fast.rollout.names import check_engine_name
from maxrl_fast.tasks.names import is_known, unknown_task
from maxrl_fast.training.correction import CORRECTIONS, DEFAULT_CAP, correction_numbers
from maxrl_fast.training.objectives.distill import DistillObjective
from maxrl_fast.training.objectives.objective import Objective
from maxrl_fast.training.objectives.pacs import PacsObjective
from maxrl_fast.training.objectives.registry import make_objective
from maxrl_fast.training.objectives.riskpo import RiskpoObjective
from maxrl_fast.training.policy_reward import LIKELIHOODS

TASK_IS_MISSING = (
    "--task, which says what it shall answer: gsm8k, math, dataset with --data FILE, maze or "
    "another (--help lists them)"
)


def check(config: Config) -> None:
    """Refuse everything that can be known to be wrong before any work.

    Raises:
        InputError: with an expected/got message.
    """
    options = config.flat()
    check_task(options["task"])
    check_environment(options)
    check_engine_name(options["rollout"])
    check_reward_weights(options)
    check_limits(Config, options)
    objective = objective_of(config)
    loss = loss_of(objective.loss if config.loss.loss is None else config.loss.loss)
    _check_objective(objective, loss, options)
    _check_loss(config, loss, options)
    _check_reference(objective, loss, options)
    if not 0 < config.loss.beta() < 1:
        raise InputError(f"beta of jsd must be between 0 and 1, got {config.loss.beta():g}")
    _check_correction(config, objective)
    check_tracker(options["log_to"])
    if (
        options["resume"]
        and options["out"]
        and Path(options["out"]).absolute() != Path(options["resume"]).absolute()
    ):
        raise InputError(
            f"--resume writes into the run's own folder, {options['resume']}, got --out "
            f"{options['out']}"
        )
    _check_multiples(options)
    if options["model_backend"] == "transformers" and options["compile"]:
        raise InputError("--compile is for the native decoder, got --model-backend transformers")


def check_task(name: str) -> None:
    """Raise InputError where no task has this name."""
    if not is_known(name):
        raise InputError(unknown_task(name))


def check_environment(options: Mapping[str, Any]) -> None:
    """Raise InputError where an environment cannot live as --reward-isolation says."""
    if options["environment"] is not None and options["reward_isolation"] == "call":
        raise InputError(
            "--reward-isolation must be process with --environment, whose objects live from call "
            "to call, got call"
        )


def check_tracker(name: str | None) -> None:
    """Raise InputError if the tracker is not installed."""
    if name is not None and importlib.util.find_spec(name) is None:
        raise InputError(f"--log-to {name} is not installed: pip install 'maxrl_fast[{name}]'")


def check_reward_weights(options: Mapping[str, Any]) -> None:
    """Raise InputError where --reward-weights are not a finite number for each reward."""
    rewards, weights = as_list(options["reward"]), as_list(options["reward_weights"])
    if weights and len(weights) != len(rewards):
        raise InputError(
            f"reward_weights must be a number for each of the {len(rewards)} rewards, got "
            f"{len(weights)}"
        )
    if not all(map(math.isfinite, weights)):
        raise InputError(f"reward_weights must be finite, got {' '.join(map(str, weights))}")


def objective_of(config: Config) -> Objective:
    """Return the objective that a configuration asks for.

    Raises:
        InputError: where its options do not fit it.
    """
    chosen = config.objective
    try:
        return make_objective(
            chosen.objective,
            chosen.options,
            config.rollout.rollouts,
            config.optimizer.updates_per_step,
        )
    except ValueError as error:
        is_named = "--rollouts" in str(error) or not re.search(r"\bN\b|rollouts", str(error))
        raise InputError(str(error) if is_named else f"{error}; --rollouts sets N") from error


def correction_name(config: Config) -> CorrectionName:
    """Return the correction that a configuration asks for, or the default: none where engine and
    trainer are compared by the tests, else tis."""
    options = config.rollout
    if options.correction is not None:
        return options.correction
    if options.importance_cap is not None:
        return "tis" if options.importance_cap else "none"
    return "none" if options.rollout == "native" or objective_of(config).owns_loss else "tis"


def importance_cap(config: Config, correction: CorrectionName) -> float | None:
    """Return the upper bound of this correction's weights, None where it has another or none."""
    given = config.rollout.importance_cap
    return None if not CORRECTIONS[correction].has_cap else DEFAULT_CAP if given is None else given


def correction_of(config: Config) -> tuple[str, dict[str, float]]:
    """Return the name and the numbers of the correction that a configuration asks for.

    Raises:
        InputError: where its options do not fit it.
    """
    name = correction_name(config)
    try:
        return name, correction_numbers(
            name, importance_cap(config, name), config.rollout.correction_numbers()
        )
    except ValueError as error:
        raise InputError(str(error)) from error


def _check_correction(config: Config, objective: Objective) -> None:
    options, name, whose = config.rollout, correction_of(config)[0], config.objective.objective
    if name != "none" and objective.owns_loss:
        raise InputError(
            f"{whose} does not support --correction: its loss does not use token weights, got "
            f"{name}"
        )
    if name == "sequence_mask" and objective.needs.token_weights:
        raise InputError(
            f"{whose} weights single tokens by either sign, so correction cannot be sequence_mask"
        )
    if options.rollout == "vllm" and options.top_p < 1 and options.temperature != 1:
        raise InputError(
            "vLLM has no log-probs before top-p at another temperature than 1: --rollout vllm with "
            "--top-p needs "
            f"--temperature 1, got {options.temperature:g}"
        )


def _check_reference(objective: Objective, loss: TokenLoss, options: Mapping[str, Any]) -> None:
    is_other = options["reference"] is not None or options["teacher_prompt"] is not None
    if isinstance(objective, DistillObjective) and not (options["kl_coef"] and is_other):
        raise InputError(
            "distill needs --kl-coef above 0 and a teacher, --reference or --teacher-prompt, got "
            f"kl_coef {options['kl_coef']:g} and {'a' if is_other else 'no'} teacher"
        )
    if isinstance(objective, PacsObjective) and objective.ref_reset_interval and is_other:
        raise InputError(
            "pacs_paper with --reference or --teacher-prompt needs --ref-reset-interval 0, got "
            f"{objective.ref_reset_interval}"
        )
    if not options["kl_coef"] or options["kl"] != "full":
        return
    if not is_other:
        raise InputError(
            "kl full needs another teacher than the policy, --reference or --teacher-prompt"
        )
    masks = options["correction"] == "sequence_mask"
    if loss.over_batch or options["top_entropy"] != 1 or options["siren"] or masks:
        raise InputError(
            "kl full cannot be used where a token's loss depends on other responses, as with loss "
            "kl_cov, --top-entropy, --siren and --correction sequence_mask"
        )
    if options["divergence"] == "jsd" and "beta" in loss.options:
        raise InputError(f"divergence jsd and loss {loss.name} both have an option beta")


def _check_loss(config: Config, loss: TokenLoss, options: Mapping[str, Any]) -> None:
    try:
        learns_without_advantage(loss, tuple(loss.resolve(config.loss.own_numbers()).items()))
    except ValueError as error:
        raise InputError(str(error)) from error
    for name in ("clip_low", "clip_high"):
        # of a custom loss, loaded now
        if not loss.clips and options[name] != getattr(LossOptions, name):
            raise InputError(f"{name} is not used by loss {loss.name}, got {options[name]}")
    _check_part_of_loss(loss.name, "aggregation", loss.aggregation, options)


def _check_part_of_loss(
    name: str, option: str, needed: str | None, options: Mapping[str, Any]
) -> None:
    if needed and options[option] not in (None, needed):
        raise InputError(
            f"{option} must be {needed} for {name}, whose loss it is a part of, got "
            f"{options[option]}"
        )


def _check_objective(objective: Objective, loss: TokenLoss, options: Mapping[str, Any]) -> None:
    name = options["objective"]
    if options["dynamic_sampling"] and objective.learns_from_equal_rewards(options["rollouts"]):
        raise InputError(
            f"dynamic_sampling leaves out groups whose rewards are equal, from which {name} learns"
        )
    if objective.needs.token_weights and loss.by_sequence:
        raise InputError(
            f"{name} weights single tokens, so loss cannot be {loss.name}, whose ratio is one of "
            "whole responses"
        )
    _check_reward_source(name, objective, options)
    if objective.needs.parts:
        _check_parts(name, options)
    if options["overlong_buffer"] and objective.needs.binary:
        raise InputError(
            f"overlong_buffer makes rewards other than 0 and 1, which {name} does not support"
        )
    if isinstance(objective, RiskpoObjective) and options["prompts"] % objective.bundle_size:
        raise InputError(
            f"prompts must be a multiple of bundle_size, got {options['prompts']} and "
            f"{objective.bundle_size}"
        )
    if not objective.owns_loss:
        return
    if options["top_entropy"] != 1:
        raise InputError(
            f"{name} does not support --top-entropy: its loss does not use token weights"
        )
    _check_part_of_loss(name, "loss", objective.loss, options)
    _check_part_of_loss(name, "aggregation", objective.aggregation, options)


def _check_reward_source(name: str, objective: Objective, options: Mapping[str, Any]) -> None:
    """Refuse rewards that are neither the task's nor those of --reward where they do not fit."""
    source, needs = options["reward_source"], objective.needs
    if source == "vote" and (needs.greedy or needs.parts):
        raise InputError(
            f"reward_source cannot be vote for {name}, whose other rewards no vote gives"
        )
    if source in LIKELIHOODS and (needs.greedy or needs.parts or needs.binary):
        what = "needs rewards of 0 or 1" if needs.binary else "needs other rewards too"
        raise InputError(f"reward_source cannot be {source} for {name}, which {what}")
    if source in LIKELIHOODS and options["task"] in ("maze", "chain"):
        raise InputError(
            f"reward_source cannot be {source} for task {options['task']}, whose responses are "
            "answers without reasoning, so that all responses to a prompt have the same reward; "
            "--objective verifree learns from them"
        )
    if needs.answers and source != "given":
        raise InputError(
            f"reward_source must be given for {name}, which computes its own reward, got {source}"
        )
    if needs.answers and options["overlong_buffer"]:
        raise InputError(f"{name} does not support --overlong-buffer: its reward is a probability")


def _check_parts(name: str, options: Mapping[str, Any]) -> None:
    """Refuse what changes the sum of the rewards for an objective that uses them one by one."""
    rewards = as_list(options["reward"])
    if len(rewards) < 2:
        raise InputError(
            f"{name} uses several rewards one by one: --reward needs 2 or more, got {len(rewards)}"
        )
    for option, none in (("reward_threshold", None), ("overlong_buffer", 0)):
        if options[option] != none:
            raise InputError(
                f"{name} uses several rewards one by one, so that {option} would change none of "
                "them"
            )
    weights = as_list(options["reward_weights"]) or [1.0]
    if name == "hero" and weights[0] != 1:
        raise InputError(
            f"hero needs 1 as the weight of the verifier, the first reward, got {weights[0]:g}"
        )


def _check_multiples(options: Mapping[str, Any]) -> None:
    if options["prompts"] * options["rollouts"] >= 2**31:
        raise InputError(
            f"prompts x rollouts must be below 2^31, got {options['prompts']} x "
            f"{options['rollouts']}"
        )
    if options["prompts"] % options["updates_per_step"]:
        raise InputError(
            f"prompts must be a multiple of updates_per_step, got {options['prompts']} and "
            f"{options['updates_per_step']}"
        )
    for whole, part in (("hidden_size", "heads"), ("heads", "kv_heads")):
        if options[whole] % options[part]:
            raise InputError(
                f"{whole} must be a multiple of {part}, got {options[whole]} and {options[part]}"
            )
    if options["hidden_size"] // options["heads"] % 2:
        raise InputError(
            f"hidden_size / heads must be even, got {options['hidden_size']} / {options['heads']}"
        )
