"""What options need and what they exclude: the only place for conditions between options of several
parts. What concerns one part alone, that part refuses (`refuses` of an objective)."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from string import Formatter
from typing import Any

from maxrl_fast.algorithms.options import multiple_of
from maxrl_fast.config.options import Config, Options
from maxrl_fast.config.parts import loss_of, part_options
from maxrl_fast.errors import InputError
from maxrl_fast.rewards.models import CLASSIFIER
from maxrl_fast.tasks.names import GYM, OBJECT, dataset_spec, is_plugin, is_reward
from maxrl_fast.training.correction import CORRECTIONS
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.objectives.objective import Objective, has_teacher
from maxrl_fast.training.objectives.registry import find_objective, make_objective
from maxrl_fast.training.policy_reward import LIKELIHOODS


class View(dict[str, Any]):
    """Options by name, as attributes too; what the run does not have is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __missing__(self, name: str) -> None:
        return None


def _has_processes(c: View) -> bool:
    """Whether a reward or an environment runs in processes: no Python object, no reward model."""
    if c.environment and not c.environment.startswith(OBJECT):
        return True
    if c.reward:
        return any(not x.startswith((OBJECT, CLASSIFIER)) for x in c.reward)
    is_text = dataset_spec(c.task) is not None or c.task.startswith((GYM, OBJECT))
    return is_text or is_plugin(c.task)


def _has_answers(c: View) -> bool:
    return (spec := dataset_spec(c.task)) is None or spec.gold is not None


# What a run must have to use the options of these names: a sentence, and the condition. Without it
# an option is not in the configuration, and is refused where it is given; without a sentence it is
# ignored.
NEEDS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    (
        "reward_workers reward_concurrency reward_seconds reward_memory_gb reward_env",
        "needs a --reward that runs in processes",
        _has_processes,
    ),
    ("max_reward_error_rate", "needs --reward", lambda c: c.reward or _has_processes(c)),
    ("reward", "is not used by task {task}", lambda c: not is_reward(c.task)),
    (
        "reward_weights",
        "needs --reward: with --task FILE:f write --task dataset --reward FILE:f and others",
        lambda c: c.reward,
    ),
    (
        "reward_threshold",
        "needs --reward with task {task}",
        lambda c: c.reward or c.task != "maze",
    ),
    ("answer_key", "is not used by task {task}", _has_answers),
    ("max_turns", "needs --environment", lambda c: c.environment or "environment" not in c),
    ("overlong_penalty", "needs --overlong-buffer", lambda c: c.overlong_buffer),
    (
        "vllm_tensor_parallel kv_cache_gb",
        "cannot be used with --vllm-url",
        lambda c: c.vllm_url is None,
    ),
    (
        "stop_at",
        "needs --objective maxrl: to stop when some rollouts succeed biases {objective}",
        lambda c: c.objective == "maxrl",
    ),
    ("first_rollouts schedule", "needs --stop-at", lambda c: c.stop_at),
    ("std_filter", "needs --dynamic-sampling of 2 or more", lambda c: c.dynamic_sampling > 1),
    ("kl teacher_prompt", "needs --kl-coef", lambda c: c.kl_coef),
    ("divergence", "needs --kl full", lambda c: c.kl_coef and c.kl == "full"),
    ("jsd_beta", "needs --divergence jsd", lambda c: c.kl_coef and c.divergence == "jsd"),
    (
        "reference",
        "needs --kl-coef, --objective distill or pacs_paper",
        lambda c: c.kl_coef or c.objective == "pacs_paper",
    ),
    # the sizes of a checkpoint are its own
    (
        "hidden_size intermediate_size layers heads kv_heads rope_theta",
        "",
        lambda c: c.model is None,
    ),
    ("model_backend", "needs --model", lambda c: c.model),
    ("lora_alpha lora_targets", "needs --lora-rank", lambda c: c.lora_rank),
    ("allow_changes", "needs --resume", lambda c: c.resume),
)


def unused_options(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the options that a run of these options by name does not use, and what to say."""
    c, found = View(values), dict[str, str]()
    for names, said, holds in NEEDS:
        own = [x for x in names.split() if x in values]
        if own and not holds(c):
            found |= dict.fromkeys(own, said.format_map(c))
    return found


def _is_likelihood(c: View) -> bool:
    return c.reward_source in LIKELIHOODS


def _has_full_kl(c: View) -> bool:
    return bool(c.kl_coef) and c.kl == "full"


def _is_over_batch(c: View) -> bool:
    is_masked = c.correction == "sequence_mask"
    return c.token_loss.over_batch or c.top_entropy != 1 or c.siren or is_masked


# A rule: a sentence, which is a format of the options that it refuses, and whether it does.
Rules = dict[str, Callable[[Any], Any]]
SHARED_RULES: Rules = {  # of training and of evaluation
    "reward_weights must be a number for each reward, got {reward_weights} for {reward}": (
        lambda c: len(c.reward_weights) not in (0, len(c.reward))
    ),
}
# besides the options there are the objective as `method`, what it `needs`, and the `token_loss`
RULES: Rules = {
    **SHARED_RULES,
    "prompts x rollouts must be below 2^31, got {prompts} x {rollouts}": (
        lambda c: c.prompts * c.rollouts >= 2**31
    ),
    **multiple_of("updates_per_step", "prompts"),
    **multiple_of("heads", "hidden_size"),
    **multiple_of("kv_heads", "heads"),
    "hidden_size / heads must be even, got {hidden_size} / {heads}": (
        lambda c: c.hidden_size // c.heads % 2
    ),
    "rollouts must be a multiple of first_rollouts with --stop-at, got {rollouts} and "
    "{first_rollouts}": lambda c: c.stop_at and c.rollouts % c.first_rollouts,
    "--stop-at draws again for prompts without successes, each response with a reward of 0 or 1: "
    "it needs --dynamic-sampling 0 and --reward-source given, got {dynamic_sampling} and "
    "{reward_source}": (lambda c: c.stop_at and (c.dynamic_sampling or c.reward_source != "given")),
    "stop_at is MaxRL of the order of rollouts, {rollouts}, so that order cannot be {order}": (
        lambda c: c.stop_at and c.order not in (None, c.rollouts - 1)
    ),
    "--ahead {ahead} needs an engine that samples while the policy trains: native, or vllm with "
    "--vllm-url": lambda c: c.ahead and c.rollout == "vllm" and c.vllm_url is None,
    "--ahead {ahead} cannot be used for {objective} with --reward-source {reward_source}, because "
    "its rewards read the policy while it changes": (
        lambda c: c.ahead and (_is_likelihood(c) or c.needs.answers)
    ),
    # vLLM has no log-probs before top-p at another temperature
    "--rollout vllm with --top-p {top_p} needs --temperature 1, got {temperature:g}": (
        lambda c: c.rollout == "vllm" and c.top_p < 1 and c.temperature != 1
    ),
    "--resume writes into the run's own folder, {resume}, got --out {out}": (
        lambda c: c.resume and c.out and c.out.absolute() != c.resume.absolute()
    ),
    "dynamic_sampling leaves out groups whose rewards are equal, from which {objective} learns": (
        lambda c: c.dynamic_sampling and c.method.learns_from_equal_rewards(c.rollouts)
    ),
    "{objective} weights single tokens by either sign, so loss cannot be one of whole responses "
    "and correction not sequence_mask, got {loss} and {correction}": (
        lambda c: (
            c.needs.token_weights and (c.token_loss.by_sequence or c.correction == "sequence_mask")
        )
    ),
    "{objective} learns from the reference answer: it needs --reward-source given, --truncated "
    "keep and --overlong-buffer 0, got {reward_source}, {truncated} and {overlong_buffer}": (
        lambda c: (
            c.needs.answers
            and (c.reward_source, c.truncated, c.overlong_buffer) != ("given", "keep", 0)
        )
    ),
    "{objective} needs each reward separately: --reward of 2 or more without --reward-source, "
    "--reward-threshold and --overlong-buffer, got {reward}, {reward_source}, {reward_threshold} "
    "and {overlong_buffer}": lambda c: (
        c.needs.parts
        and (
            len(c.reward) < 2
            or (c.reward_source, c.reward_threshold, c.overlong_buffer) != ("given", None, 0)
        )
    ),
    "{objective} needs rewards of 0 or 1, which --reward-source {reward_source} and "
    "--overlong-buffer {overlong_buffer} do not give": (
        lambda c: c.needs.binary and (_is_likelihood(c) or c.overlong_buffer)
    ),
    "--reward-source {reward_source} does not support {objective}: it needs individual rewards": (
        lambda c: c.reward_source != "given" and c.needs.greedy
    ),
    "reward_source cannot be {reward_source} for task {task}, whose responses are answers without "
    "reasoning, so that all responses to a prompt have the same reward; --objective verifree "
    "learns from them": lambda c: _is_likelihood(c) and c.task == "maze",
    "truncated cannot be zero with --reward-source {reward_source}: the reference answer, not the "
    "end of a response, decides its reward; use keep or mask": (
        lambda c: c.truncated == "zero" and _is_likelihood(c)
    ),
    "hero needs 1 as the weight of the verifier, the first reward, got {reward_weights}": (
        lambda c: c.objective == "hero" and c.reward_weights[:1] not in ((), (1.0,))
    ),
    "kl full needs another teacher than the policy, --reference or --teacher-prompt": (
        lambda c: _has_full_kl(c) and not has_teacher(c)
    ),
    "kl full cannot be used where a token's loss depends on other responses, as with loss kl_cov, "
    "--top-entropy, --siren and --correction sequence_mask": (
        lambda c: _has_full_kl(c) and _is_over_batch(c)
    ),
    "{objective} has a loss of its own, without token weights: it needs --loss {method.loss}, "
    "--correction none and --top-entropy 1, got {loss}, {correction} and {top_entropy}": (
        lambda c: (
            c.method.owns_loss
            and (c.loss, c.correction, c.top_entropy) != (c.method.loss, "none", 1)
        )
    ),
    "aggregation must be {fixed} for {objective} with loss {loss}, got {aggregation}": (
        lambda c: c.fixed and c.aggregation not in (None, c.fixed)
    ),
}


def refuse(rules: Mapping[str, Callable[[Any], Any]], c: View) -> None:
    """Raise the InputError of the first rule by which the options are refused."""
    for sentence, is_wrong in rules.items():
        if is_wrong(c):
            shown = [name for _, name, *_ in Formatter().parse(sentence) if name]
            several = {key: " ".join(map(str, x)) for key, x in c.items() if isinstance(x, tuple)}
            raise InputError(sentence.format_map(View({**c, **several})), *shown)


def check(config: Config) -> None:
    """Refuse what can be known to be wrong before any work.

    The options by themselves have been checked where they were read.
    """
    c = View(config.values())
    # a folder of this name, such as one that wandb leaves, has no origin
    if c.log_to and not getattr(importlib.util.find_spec(c.log_to), "origin", None):
        raise InputError(f"--log-to {c.log_to} is not installed: pip install {c.log_to}", "log_to")
    objective, loss = objective_of(config), loss_of(c.loss)
    c |= {"method": objective, "needs": objective.needs, "token_loss": loss}
    c["fixed"] = objective.aggregation if objective.owns_loss else loss.aggregation
    refuse({**RULES, **getattr(find_objective(c.objective), "refuses", {})}, c)
    config.sampling.stopping()  # or an error
    try:
        loss.resolve(loss_options(config))
    except ValueError as error:
        raise InputError(str(error), "loss", *config.parts["loss"]) from error
    correction_of(config)


def own_options(config: Options, section: str) -> dict[str, Any]:
    """Return the options of a chosen part, by the names in its signature."""
    return part_options(section, getattr(config.chosen, section), config.parts[section])


def loss_options(config: Config) -> dict[str, Any]:
    """Return the options of the loss besides its clips."""
    own = own_options(config, "loss")
    return loss_of(config.chosen.loss).resolve(
        {name: x for name, x in own.items() if name not in ("clip_low", "clip_high")}
    )


def objective_of(config: Config) -> Objective:
    name, num_updates = config.chosen.objective, config.optimizer.updates_per_step
    own = {key: x for key, x in own_options(config, "objective").items() if x is not None}
    try:
        made = make_objective(name, own, config.sampling.rollouts, num_updates)
    except ValueError as error:
        advice = "; --rollouts sets N" * ("rollouts" in str(error))
        raise InputError(f"{error}{advice}", *own, "rollouts") from error
    if isinstance(made, GroupObjective) and (stop_at := config.sampling.stop_at):
        return replace(made, stop_at=stop_at)
    return made


def correction_of(config: Config) -> tuple[str, dict[str, float]]:
    """Return the name and the numbers of the correction."""
    name = config.chosen.correction
    try:
        numbers = CORRECTIONS[name].resolve(own_options(config, "correction"))
        if "low" in numbers and numbers["low"] >= numbers["high"]:
            bounds = f"{numbers['low']:g} and {numbers['high']:g}"
            raise ValueError(f"low of {name} must be below high, got {bounds}")
        return name, numbers
    except ValueError as error:
        raise InputError(str(error), *config.parts["correction"]) from error
