"""What options need and what they exclude: the only place for conditions between options of several
parts. What concerns one part alone, that part refuses (`refuses` of an objective)."""

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import date
from typing import Any

from maxrl_fast.algorithms.losses.registry import learns_without_advantage
from maxrl_fast.algorithms.options import REQUIRED, Rule, multiple_of
from maxrl_fast.config.options import Config, Options
from maxrl_fast.config.parts import by_signature, loss_of
from maxrl_fast.errors import InputError
from maxrl_fast.rewards.models import CLASSIFIER
from maxrl_fast.tasks.names import GYM, OBJECT, dataset_spec, is_plugin, is_reward
from maxrl_fast.training.correction import CORRECTIONS
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.objectives.objective import Objective, has_teacher
from maxrl_fast.training.objectives.registry import (
    OBJECTIVE_CLASSES,
    make_objective,
    objective_options,
)
from maxrl_fast.training.policy_reward import LIKELIHOODS

Values = Mapping[str, Any]


def _reads_text(c: Values) -> bool:
    return dataset_spec(c["task"]) is not None or c["task"].startswith(GYM)


def _has_reward_processes(c: Values) -> bool:
    if c.get("environment") is not None and not c["environment"].startswith(OBJECT):
        return True
    if rewards := c["reward"]:  # Python objects and reward models run in this process
        return any(not x.startswith((OBJECT, CLASSIFIER)) for x in rewards)
    # which may score by a function
    return _reads_text(c) or is_plugin(c["task"]) or c["task"].startswith(OBJECT)


def _has_functions(c: Values) -> Any:
    return _has_reward_processes(c) or c["reward"] or c.get("environment") is not None


def _has_answers(c: Values) -> bool:
    return (spec := dataset_spec(c["task"])) is not None and spec.gold is not None


# What a run must have to use an option: a sentence, and the condition. Without it the option is not
# in the configuration, and is refused where it is given; without a sentence it is ignored.
NEEDS: dict[str, tuple[str, Callable[[Values], Any]]] = {
    **dict.fromkeys(
        (
            "reward_workers",
            "reward_concurrency",
            "reward_seconds",
            "reward_memory_gb",
            "reward_env",
        ),
        ("needs a --reward that runs in processes", _has_reward_processes),
    ),
    **dict.fromkeys(
        ("lora_alpha", "lora_targets"), ("needs --lora-rank", lambda c: c["lora_rank"])
    ),
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "rope_theta"),
        ("", lambda c: c["model"] is None),  # the sizes of a checkpoint are its own
    ),
    **dict.fromkeys(("kl", "teacher_prompt"), ("needs --kl-coef", lambda c: c["kl_coef"])),
    "reward": ("is not used by task {task}", lambda c: not is_reward(c["task"])),
    "reward_weights": (
        "needs --reward: with --task FILE:f write --task dataset --reward FILE:f and others",
        lambda c: c["reward"],
    ),
    "reward_threshold": (
        "needs --reward with task {task}",
        lambda c: c["task"] != "maze" or c["reward"],
    ),
    "max_reward_error_rate": ("needs --reward", _has_functions),
    "answer_key": ("is not used by task {task}", _has_answers),
    "max_turns": ("needs --environment", lambda c: c.get("environment", "") is not None),
    "overlong_penalty": ("needs --overlong-buffer", lambda c: c["overlong_buffer"]),
    "vllm_tensor_parallel": ("cannot be used with --vllm-url", lambda c: c["vllm_url"] is None),
    "kv_cache_gb": ("cannot be used with --vllm-url", lambda c: c.get("vllm_url") is None),
    "stop_at": (
        "needs --objective maxrl: to stop when some rollouts succeed biases {objective}",
        lambda c: c["objective"] == "maxrl",
    ),
    "first_rollouts": ("needs --stop-at", lambda c: c["stop_at"]),
    "schedule": ("needs --stop-at", lambda c: c["stop_at"]),
    "std_filter": (
        "needs --dynamic-sampling of 2 or more",
        lambda c: c["dynamic_sampling"] > 1,
    ),
    "divergence": ("needs --kl full", lambda c: c["kl_coef"] and c["kl"] == "full"),
    "jsd_beta": ("needs --divergence jsd", lambda c: c["kl_coef"] and c["divergence"] == "jsd"),
    "reference": (
        "needs --kl-coef, --objective distill or pacs_paper",
        lambda c: c["kl_coef"] or c["objective"] == "pacs_paper",
    ),
    "model_backend": ("needs --model", lambda c: c["model"] is not None),
    "allow_changes": ("needs --resume", lambda c: c["resume"] is not None),
}


def unused_options(values: Values) -> dict[str, str]:
    """Return the options that a run of these options by name does not use, and what to say."""
    return {
        name: said.format_map(values)
        for name, (said, holds) in NEEDS.items()
        if name in values and not holds(values)
    }


def _is_likelihood(c: Values) -> bool:
    return c["reward_source"] in LIKELIHOODS


def _has_full_kl(c: Values) -> bool:
    return bool(c["kl_coef"]) and c["kl"] == "full"


def _is_over_batch(c: Values) -> bool:
    is_masked = c["correction"] == "sequence_mask"
    return c["token_loss"].over_batch or c["top_entropy"] != 1 or c["siren"] or is_masked


def _is_day(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False


def _only(option: str, value: Any, sentence: str, holds: Callable[[Values], Any]) -> Rule:
    """Return the refusal of other values of an option where `holds`."""
    return Rule(f"{sentence}, got {{{option}}}", lambda c: holds(c) and c[option] != value)


_NO_TOKEN_WEIGHTS = "{objective} does not support %s: its loss does not use token weights"
# of training and of evaluation; an option that a command or a task does not have is None
SHARED_RULES = (
    Rule(
        "reward_weights must be a number for each reward, got {reward_weights} for {reward}",
        lambda c: len(c["reward_weights"]) not in (0, len(c["reward"])),
    ),
    Rule(
        "where must be NAME=VALUE, such as level=1, got {where}",
        lambda c: not all(x.partition("=")[0] and "=" in x for x in c["where"] or ()),
    ),
    Rule(
        "template_date must be a day such as 2026-11-26, got {template_date}",
        lambda c: c["template_date"] and not _is_day(c["template_date"]),
    ),
    Rule("stop must not be an empty text", lambda c: "" in (c["stop"] or ())),
    Rule(
        "chat_template_kwargs must be a JSON object, got {chat_template_kwargs}",
        lambda c: not isinstance(c["chat_template_kwargs"] or {}, dict),
    ),
)
# Besides the options by name, `c` has the objective as "method" with what it `needs` and whether it
# owns its loss, and the loss as "token_loss".
RULES = (
    *SHARED_RULES,
    Rule(
        "prompts x rollouts must be below 2^31, got {prompts} x {rollouts}",
        lambda c: c["prompts"] * c["rollouts"] >= 2**31,
    ),
    multiple_of("updates_per_step", "prompts"),
    Rule(
        "rollouts must be a multiple of first_rollouts with --stop-at, got {rollouts} and "
        "{first_rollouts}",
        lambda c: c["stop_at"] and c["rollouts"] % c["first_rollouts"],
    ),
    Rule(
        "--stop-at draws again for prompts without successes: it cannot be used with "
        "--dynamic-sampling {dynamic_sampling}",
        lambda c: c["stop_at"] and c["dynamic_sampling"],
    ),
    Rule(
        "--stop-at needs rewards of 0 or 1 of each response by itself, got --reward-source "
        "{reward_source}",
        lambda c: c["stop_at"] and c["reward_source"] != "given",
    ),
    Rule(
        "--ahead {ahead} needs an engine that samples while the policy trains: native, or vllm "
        "with --vllm-url",
        lambda c: c["ahead"] and c["rollout"] == "vllm" and c["vllm_url"] is None,
    ),
    Rule(
        "--ahead {ahead} cannot be used with --reward-source {reward_source}, which reads the "
        "policy while it changes",
        lambda c: c["ahead"] and c["reward_source"] not in ("given", "vote"),
    ),
    # vLLM has no log-probs before top-p at another temperature
    Rule(
        "--rollout vllm with --top-p {top_p} needs --temperature 1, got {temperature:g}",
        lambda c: c["rollout"] == "vllm" and c["top_p"] < 1 and c["temperature"] != 1,
    ),
    multiple_of("heads", "hidden_size"),
    Rule(
        "hidden_size / heads must be even, got {hidden_size} / {heads}",
        lambda c: c["hidden_size"] // c["heads"] % 2,
    ),
    multiple_of("kv_heads", "heads"),
    Rule(
        "--resume writes into the run's own folder, {resume}, got --out {out}",
        lambda c: c["resume"] and c["out"] and c["out"].absolute() != c["resume"].absolute(),
    ),
    Rule(
        "--compile is for the native decoder, got --model-backend {model_backend}",
        lambda c: c["compile"] and c["model_backend"] == "transformers",
    ),
    Rule(
        "dynamic_sampling leaves out groups whose rewards are equal, from which {objective} learns",
        lambda c: c["dynamic_sampling"] and c["method"].learns_from_equal_rewards(c["rollouts"]),
    ),
    Rule(
        "stop_at is MaxRL of the order of rollouts, {rollouts}, so that order cannot be {order}",
        lambda c: c["stop_at"] and c["order"] not in (None, c["rollouts"] - 1),
    ),
    Rule(
        "{objective} weights single tokens, so loss cannot be {loss}, whose ratio is one of whole "
        "responses",
        lambda c: c["needs"].token_weights and c["token_loss"].by_sequence,
    ),
    Rule(
        "--reward-source {reward_source} does not support {objective}: it needs individual rewards",
        lambda c: (
            (c["reward_source"] == "vote" or _is_likelihood(c))
            and (c["needs"].greedy or c["needs"].parts)
        ),
    ),
    Rule(
        "reward_source cannot be {reward_source} for {objective}, which needs rewards of 0 or 1",
        lambda c: _is_likelihood(c) and c["needs"].binary,
    ),
    Rule(
        "reward_source cannot be {reward_source} for task {task}, whose responses are answers "
        "without reasoning, so that all responses to a prompt have the same reward; --objective "
        "verifree learns from them",
        lambda c: _is_likelihood(c) and c["task"] == "maze",
    ),
    _only(
        "reward_source",
        "given",
        "reward_source must be given for {objective}, which computes its own reward",
        lambda c: c["needs"].answers,
    ),
    _only(
        "overlong_buffer",
        0,
        "{objective} does not support --overlong-buffer, which changes its rewards",
        lambda c: c["needs"].answers or c["needs"].parts or c["needs"].binary,
    ),
    _only(
        "truncated",
        "keep",
        "truncated must be keep for {objective}, which trains on the reference answer",
        lambda c: c["needs"].answers,
    ),
    Rule(
        "truncated cannot be zero with --reward-source {reward_source}: the reference answer, not "
        "the end of a response, decides its reward; use keep or mask",
        lambda c: c["truncated"] == "zero" and _is_likelihood(c),
    ),
    Rule(
        "{objective} needs each reward separately: --reward needs 2 or more, got {reward}",
        lambda c: c["needs"].parts and len(c["reward"]) < 2,
    ),
    _only(
        "reward_threshold",
        None,
        "{objective} needs each reward separately, so that reward_threshold would change none of "
        "them",
        lambda c: c["needs"].parts,
    ),
    Rule(
        "hero needs 1 as the weight of the verifier, the first reward, got {reward_weights}",
        lambda c: c["objective"] == "hero" and c["reward_weights"][:1] not in ((), (1.0,)),
    ),
    _only("top_entropy", 1, _NO_TOKEN_WEIGHTS % "--top-entropy", lambda c: c["owns_loss"]),
    Rule(
        "--ahead {ahead} cannot be used with {objective}, whose rewards read the policy while it "
        "changes",
        lambda c: c["ahead"] and c["needs"].answers,
    ),
    _only("correction", "none", _NO_TOKEN_WEIGHTS % "--correction", lambda c: c["owns_loss"]),
    Rule(
        "{objective} weights single tokens by either sign, so correction cannot be {correction}",
        lambda c: c["needs"].token_weights and c["correction"] == "sequence_mask",
    ),
    Rule(
        "kl full needs another teacher than the policy, --reference or --teacher-prompt",
        lambda c: _has_full_kl(c) and not has_teacher(c),
    ),
    Rule(
        "kl full cannot be used where a token's loss depends on other responses, as with loss "
        "kl_cov, --top-entropy, --siren and --correction sequence_mask",
        lambda c: _has_full_kl(c) and _is_over_batch(c),
    ),
    Rule(
        "loss must be {fixed_loss} for {objective}, whose loss it is a part of, got {loss}",
        lambda c: c["owns_loss"] and c["loss"] != c["fixed_loss"],
    ),
    Rule(
        "aggregation must be {fixed_aggregation} for {aggregation_owner}, whose loss it is a part "
        "of, got {aggregation}",
        lambda c: c["fixed_aggregation"] and c["aggregation"] not in (None, c["fixed_aggregation"]),
    ),
)


class _Values(dict[str, Any]):
    """Options by name; one that the run does not have is None."""

    def __missing__(self, name: str) -> None:
        return None


def check(config: Config) -> None:
    """Refuse what can be known to be wrong before any work.

    The options by themselves have been checked where they were read.
    """
    values = _Values(config.values())
    tracker = values["log_to"]
    # a folder of this name, such as one that wandb leaves, has no origin
    if tracker and not getattr(importlib.util.find_spec(tracker), "origin", None):
        raise InputError(f"--log-to {tracker} is not installed: pip install {tracker}", "log_to")
    objective, loss = objective_of(config), loss_of(values["loss"])
    owns = objective.owns_loss
    fixed = objective.aggregation if owns else loss.aggregation
    values |= {
        "method": objective,
        "needs": objective.needs,
        "owns_loss": owns,
        "token_loss": loss,
        "fixed_loss": objective.loss,
        "fixed_aggregation": fixed,
        "aggregation_owner": values["objective" if owns else "loss"],
    }
    for rule in (*RULES, *getattr(OBJECTIVE_CLASSES.get(values["objective"]), "refuses", ())):
        rule.check(values)
    config.sampling.stopping()  # or an error
    try:
        learns_without_advantage(loss, tuple(loss_options(config).items()))
    except ValueError as error:
        raise InputError(str(error), "loss", *config.parts["loss"]) from error
    correction_of(config)


def check_shared(config: Options) -> None:
    """The rules of an evaluation."""
    for rule in SHARED_RULES:
        rule.check(_Values(config.values()))


def own_options(config: Options, section: str) -> dict[str, Any]:
    """Return the options of a chosen part, by the names in its signature."""
    return by_signature(section, getattr(config.chosen, section), config.parts[section])


def loss_options(config: Config) -> dict[str, Any]:
    """Return the options of the loss besides its clips."""
    own = own_options(config, "loss")
    return loss_of(config.chosen.loss).resolve(
        {name: x for name, x in own.items() if name not in ("clip_low", "clip_high")}
    )


def objective_of(config: Config) -> Objective:
    name, num_updates = config.chosen.objective, config.optimizer.updates_per_step
    own = {key: x for key, x in own_options(config, "objective").items() if x is not None}
    for key, option in objective_options(name).items():
        if option.default is REQUIRED and key not in own:
            raise InputError(f"{name} needs {key}, {option.wanted}", key)
    try:
        made = make_objective(name, own, config.sampling.rollouts, num_updates)
    except ValueError as error:
        is_named = "--rollouts" in str(error) or not re.search(r"\bN\b|rollouts", str(error))
        raise InputError(
            str(error) if is_named else f"{error}; --rollouts sets N", *own, "rollouts"
        ) from error
    if isinstance(made, GroupObjective) and (stop_at := config.sampling.stop_at):
        return replace(made, stop_at=stop_at)
    return made


def correction_of(config: Config) -> tuple[str, dict[str, float]]:
    """Return the name and the numbers of the correction."""
    name = config.chosen.correction
    try:
        return name, CORRECTIONS[name].resolve(own_options(config, "correction"))
    except ValueError as error:
        raise InputError(str(error), *config.parts["correction"]) from error
