"""What can be known to be wrong with a configuration before any work."""

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from maxrl_fast.algorithms.losses.registry import ALIASES, learns_without_advantage
from maxrl_fast.algorithms.options import Refusal
from maxrl_fast.config.conditions import loss_of
from maxrl_fast.config.metadata import as_list, check_limits, check_refusals
from maxrl_fast.config.options import Config, CorrectionName, LossOptions
from maxrl_fast.errors import InputError
from maxrl_fast.ops.divergence import BETA
from maxrl_fast.rollout.names import check_engine_name
from maxrl_fast.training.correction import CORRECTIONS
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.objectives.objective import Objective, has_teacher
from maxrl_fast.training.objectives.registry import (
    OBJECTIVE_CLASSES,
    make_objective,
    objective_class,
    objective_defaults,
)
from maxrl_fast.training.policy_reward import LIKELIHOODS


def _is_likelihood(c: Mapping[str, Any]) -> bool:
    return c["reward_source"] in LIKELIHOODS


def _only(option: str, value: Any, message: str, holds: Callable[[Any], Any]) -> Refusal:
    """Return the refusal of other values of an option where `holds`."""
    return Refusal(f"{message}, got {{{option}}}", lambda c: holds(c) and c[option] != value)


_NO_TOKEN_WEIGHTS = "{objective} does not support %s: its loss does not use token weights"

# What the properties of the objective and the token loss exclude. Besides the options by name, `c`
# has both as "method" and "token_loss", what the objective needs, whether it owns the loss, and the
# correction of the run.
_REFUSALS = (
    Refusal(
        "dynamic_sampling leaves out groups whose rewards are equal, from which {objective} learns",
        lambda c: c["dynamic_sampling"] and c["method"].learns_from_equal_rewards(c["rollouts"]),
    ),
    Refusal(
        "stop_at is MaxRL of the order of rollouts, {rollouts}, so that order cannot be {order}",
        lambda c: c["stop_at"] and c["order"] != c["rollouts"] - 1,
    ),
    Refusal(
        "{objective} weights single tokens, so loss cannot be {loss}, whose ratio is one of whole "
        "responses",
        lambda c: c["needs"].token_weights and c["token_loss"].by_sequence,
    ),
    Refusal(
        "--reward-source {reward_source} does not support {objective}: it needs individual rewards",
        lambda c: (
            (c["reward_source"] == "vote" or _is_likelihood(c))
            and (c["needs"].greedy or c["needs"].parts)
        ),
    ),
    Refusal(
        "reward_source cannot be {reward_source} for {objective}, which needs rewards of 0 or 1",
        lambda c: _is_likelihood(c) and c["needs"].binary,
    ),
    Refusal(
        "reward_source cannot be {reward_source} for task {task}, whose responses are answers "
        "without reasoning, so that all responses to a prompt have the same reward; --objective "
        "verifree learns from them",
        lambda c: _is_likelihood(c) and c["task"] in ("maze", "chain"),
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
    Refusal(
        "truncated cannot be zero with --reward-source {reward_source}: the reference answer, not "
        "the end of a response, decides its reward; use keep or mask",
        lambda c: c["truncated"] == "zero" and _is_likelihood(c),
    ),
    Refusal(
        "{objective} needs each reward separately: --reward needs 2 or more, got {reward}",
        lambda c: c["needs"].parts and len(as_list(c["reward"])) < 2,
    ),
    _only(
        "reward_threshold",
        None,
        "{objective} needs each reward separately, so that reward_threshold would change none of "
        "them",
        lambda c: c["needs"].parts,
    ),
    Refusal(
        "hero needs 1 as the weight of the verifier, the first reward, got {reward_weights}",
        lambda c: c["objective"] == "hero" and as_list(c["reward_weights"])[:1] not in ([], [1.0]),
    ),
    _only("top_entropy", 1, _NO_TOKEN_WEIGHTS % "--top-entropy", lambda c: c["owns_loss"]),
    Refusal(
        "--ahead {ahead} cannot be used with {objective}, whose rewards read the policy while it "
        "changes",
        lambda c: c["ahead"] and c["needs"].answers,
    ),
    _only("correction", "none", _NO_TOKEN_WEIGHTS % "--correction", lambda c: c["owns_loss"]),
    Refusal(
        "{objective} weights single tokens by either sign, so correction cannot be {correction}",
        lambda c: c["needs"].token_weights and c["correction"] == "sequence_mask",
    ),
    Refusal(
        "kl full needs another teacher than the policy, --reference or --teacher-prompt",
        lambda c: _has_full_kl(c) and not has_teacher(c),
    ),
    Refusal(
        "kl full cannot be used where a token's loss depends on other responses, as with loss "
        "kl_cov, --top-entropy, --siren and --correction sequence_mask",
        lambda c: _has_full_kl(c) and _is_over_batch(c),
    ),
    Refusal(
        "divergence {divergence} and loss {loss} both have an option beta",
        lambda c: (
            _has_full_kl(c) and c["divergence"] == "jsd" and "beta" in c["token_loss"].options
        ),
    ),
)


def _has_full_kl(c: Mapping[str, Any]) -> bool:
    return bool(c["kl_coef"]) and c["kl"] == "full"


def _is_over_batch(c: Mapping[str, Any]) -> bool:
    is_masked = c["correction"] == "sequence_mask"
    return c["token_loss"].over_batch or c["top_entropy"] != 1 or c["siren"] or is_masked


def check(config: Config) -> None:
    """Refuse everything that can be known to be wrong before any work."""
    options = config.flat()
    check_options(Config, options)
    tracker = options["log_to"]
    # a folder of this name, such as one that wandb leaves, has no origin
    if tracker and not getattr(importlib.util.find_spec(tracker), "origin", None):
        raise InputError(f"--log-to {tracker} is not installed: pip install {tracker}", "log_to")
    name, objective = config.objective.objective, objective_of(config)
    given = objective.loss if config.loss.loss is None else config.loss.loss
    loss = loss_of(given)
    loss_name = given if given in ALIASES else loss.name
    defaults = objective_defaults(name, config.rollout.rollouts)
    values = options | {key: x for key, x in defaults.items() if options.get(key) is None}
    values |= {"loss": loss_name, "correction": correction_of(config)[0]}
    values |= {"method": objective, "needs": objective.needs, "owns_loss": objective.owns_loss}
    values["token_loss"] = loss
    own = OBJECTIVE_CLASSES[name].refuses if name in OBJECTIVE_CLASSES else ()
    for refusal in (*_REFUSALS, *own):
        refusal.check(values)
    config.rollout.stopping()  # or an error
    fixed = [(loss_name, "aggregation", loss.aggregation)]
    if objective.owns_loss:
        fixed += [(name, "loss", objective.loss), (name, "aggregation", objective.aggregation)]
    for owner, option, needed in fixed:
        if needed and options[option] not in (None, needed):
            wanted = f"{option} must be {needed} for {owner}, whose loss it is a part of"
            raise InputError(f"{wanted}, got {options[option]}", option)
    for option in ("clip_low", "clip_high"):  # of a custom loss, loaded now
        if not loss.clips and (value := options[option]) != getattr(LossOptions, option):
            raise InputError(f"{option} is not used by loss {loss.name}, got {value}", option)
    try:
        learns_without_advantage(loss, tuple(loss.resolve(config.loss.own_numbers()).items()))
    except ValueError as error:
        raise InputError(str(error), "loss", "loss_options") from error
    if not BETA.holds(beta := config.loss.beta()):
        raise InputError(f"beta of jsd must be {BETA.wanted}, got {beta:g}", "loss_options")


def check_options(config: type, options: Mapping[str, Any]) -> None:
    """Refuse options by name, of runs or of evaluations, that are wrong by themselves or do not go
    together."""
    check_engine_name(options["rollout"])
    check_limits(config, options)
    check_refusals(config, options)


def objective_of(config: Config) -> Objective:
    chosen, num_updates = config.objective, config.optimizer.updates_per_step
    try:
        named = chosen.objective, chosen.options
        made = make_objective(*named, config.rollout.rollouts, num_updates)
    except ValueError as error:
        is_named = "--rollouts" in str(error) or not re.search(r"\bN\b|rollouts", str(error))
        raise InputError(
            str(error) if is_named else f"{error}; --rollouts sets N", *chosen.options, "rollouts"
        ) from error
    if isinstance(made, GroupObjective) and (stop_at := config.rollout.stop_at):
        return replace(made, stop_at=stop_at)
    return made


def correction_of(config: Config) -> tuple[CorrectionName, dict[str, float]]:
    """Return the name and the numbers of the correction. The default is none where engine and
    trainer are compared by the tests, else tis."""
    options = config.rollout
    name, cap = options.correction, options.importance_cap
    if name is None and cap is not None:
        name = "tis" if cap else "none"
    elif name is None:
        cls = objective_class(config.objective.objective)
        # samples of older weights, and the loss has no ratio
        is_stale = options.ahead and (config.loss.loss or cls.loss) == "reinforce"
        name = "tis" if options.rollout != "native" or is_stale else "none"
        name = "none" if cls.owns_loss else name
    numbers: dict[str, float] = options.correction_numbers()
    if cap is not None and CORRECTIONS[name].has_cap:
        numbers["importance_cap"] = cap
    try:
        return name, CORRECTIONS[name].resolve(numbers)
    except ValueError as error:
        raise InputError(str(error), "correction_options", "importance_cap") from error
