"""What options need and what they exclude: the only place for conditions between options of several
parts. What concerns one part alone, that part refuses (`refuses` of an objective)."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from string import Formatter
from typing import Any

from maxrl_fast.algorithms.losses.registry import CLIPS, learns_without_advantage
from maxrl_fast.algorithms.options import multiple_of
from maxrl_fast.config.options import Config, Options
from maxrl_fast.config.parts import loss_of, part_options
from maxrl_fast.errors import InputError
from maxrl_fast.tasks.names import is_reward, spec_of
from maxrl_fast.training.correction import CORRECTIONS
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.objectives.objective import OBJECTIVE_CLASSES, Objective, has_teacher
from maxrl_fast.training.objectives.registry import make_objective
from maxrl_fast.training.policy_reward import LIKELIHOODS


class View(dict[str, Any]):
    """Options by name, as attributes too; what the run does not have is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __missing__(self, name: str) -> None:
        return None


# What a run must have to use the options of these names: a sentence, and the condition. Without it
# an option is not in the configuration, and is refused where it is given; without a sentence it is
# ignored.
NEEDS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    (
        "reward_workers reward_concurrency reward_seconds reward_memory_gb reward_env "
        "max_reward_error_rate reward_threshold",
        "needs --reward with task {task}",
        lambda c: c.reward or c.task != "maze",
    ),
    ("reward", "is not used by task {task}", lambda c: not is_reward(c.task)),
    (
        "reward_weights",
        "needs --reward: with --task FILE:f write --task dataset --reward FILE:f and others",
        lambda c: c.reward,
    ),
    ("answer_key", "is not used by task {task}", lambda c: spec_of(c.task).gold),
    ("max_turns", "needs --environment", lambda c: c.environment or "environment" not in c),
    ("overlong_penalty", "needs --overlong-buffer", lambda c: c.overlong_buffer),
    (
        "vllm_tensor_parallel kv_cache_gb",
        "cannot be used with --vllm-url",
        lambda c: not c.vllm_url,
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
    ("hidden_size intermediate_size layers heads kv_heads rope_theta", "", lambda c: not c.model),
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


# A rule: a sentence, which is a format of the options that it refuses, and whether it does.
Rules = dict[str, Callable[[Any], Any]]


def only(why: str, holds: Callable[[Any], Any], **wanted: Any) -> Rules:
    """Return the refusal of other values than these, where a condition holds."""
    needed = " and ".join(f"--{name.replace('_', '-')} {x}" for name, x in wanted.items())
    got = " and ".join(f"{{{name}}}" for name in wanted)
    sentence = f"{why} needs {needed.lower()}, got {got}"
    return {sentence: lambda c: holds(c) and any(c[name] != x for name, x in wanted.items())}


def _reads_policy(c: View) -> bool:
    return c.reward_source in LIKELIHOODS


def _has_full_kl(c: View) -> bool:
    return bool(c.kl_coef) and c.kl == "full"


def _is_over_batch(c: View) -> bool:
    is_masked = c.correction == "sequence_mask"
    return c.token_loss.over_batch or c.top_entropy != 1 or c.siren or is_masked


_WEIGHTS: Rules = {
    "reward_weights must be a number for each reward, got {reward_weights} for {reward}": (
        lambda c: len(c.reward_weights) not in (0, len(c.reward))
    ),
}
EVALUATION_RULES: Rules = {
    **_WEIGHTS,
    **only("greedy decoding, of temperature 0,", lambda c: c.temperature == 0, samples=1),
    "k must be from 1 to the {samples} samples, got {k}": (
        lambda c: not all(1 <= k <= c.samples for k in c.k)
    ),
}
# besides the options there are the objective as `method`, what it `needs`, and the `token_loss`
RULES: Rules = {
    **_WEIGHTS,
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
    **only(
        "--stop-at draws again for prompts without successes, and",
        lambda c: c.stop_at,
        dynamic_sampling=0,
        reward_source="given",
    ),
    "stop_at is MaxRL of the order of rollouts, {rollouts}, so that order cannot be {order}": (
        lambda c: c.stop_at and c.order not in (None, c.rollouts - 1)
    ),
    "--ahead {ahead} needs an engine that samples while the policy trains: native, or vllm with "
    "--vllm-url": lambda c: c.ahead and c.rollout == "vllm" and not c.vllm_url,
    "--ahead {ahead} cannot be used for {objective} with --reward-source {reward_source}, because "
    "its rewards read the policy while it changes": (
        lambda c: c.ahead and (_reads_policy(c) or c.needs.answers)
    ),
    # vLLM has no log-probs before top-p at another temperature
    **only(
        "--rollout vllm with --top-p below 1",
        lambda c: c.rollout == "vllm" and c.top_p < 1,
        temperature=1,
    ),
    "--resume writes into the run's own folder, {resume}, got --out {out}": (
        lambda c: c.resume and c.out and c.out.absolute() != c.resume.absolute()
    ),
    "--compile is for the native decoder, got --model-backend {model_backend}": (
        lambda c: c.compile and c.model_backend == "transformers"
    ),
    "dynamic_sampling leaves out groups whose rewards are equal, from which {objective} learns": (
        lambda c: c.dynamic_sampling and c.method.learns_from_equal_rewards(c.rollouts)
    ),
    "{objective} weights single tokens by either sign, so loss cannot be one of whole responses "
    "and correction not sequence_mask, got {loss} and {correction}": lambda c: (
        c.needs.token_weights and (c.token_loss.by_sequence or c.correction == "sequence_mask")
    ),
    **only(
        "{objective} learns from the reference answer: it",
        lambda c: c.needs.answers,
        reward_source="given",
        truncated="keep",
        overlong_buffer=0,
    ),
    "{objective} needs a --reward of 2 or more functions, got {reward}": (
        lambda c: c.needs.parts and len(c.reward) < 2
    ),
    **only(
        "{objective} learns from each reward separately: it",
        lambda c: c.needs.parts,
        reward_source="given",
        reward_threshold=None,
        overlong_buffer=0,
    ),
    **only(
        "{objective} reads rewards of single responses: it",
        lambda c: c.needs.greedy,
        reward_source="given",
    ),
    "{objective} needs rewards of 0 or 1, which --reward-source {reward_source} and "
    "--overlong-buffer {overlong_buffer} do not give": (
        lambda c: c.needs.binary and (_reads_policy(c) or c.overlong_buffer)
    ),
    "reward_source cannot be {reward_source} for task {task}, whose responses are answers without "
    "reasoning, so that all have the same reward; --objective verifree learns from them": (
        lambda c: _reads_policy(c) and c.task == "maze"
    ),
    "truncated cannot be zero with --reward-source {reward_source}: the reference answer, not the "
    "end of a response, decides its reward; use keep or mask": (
        lambda c: c.truncated == "zero" and _reads_policy(c)
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


def refuse(rules: Rules, c: View) -> None:
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
    refuse({**RULES, **getattr(OBJECTIVE_CLASSES.get(c.objective), "refuses", {})}, c)
    config.sampling.stopping()  # or an error
    with _about("loss", *config.parts["loss"]):
        learns_without_advantage(loss, tuple(loss_options(config).items()))
    correction_of(config)


@contextlib.contextmanager
def _about(*options: str) -> Iterator[None]:
    """Say of a ValueError, which a part raises, of which options it is."""
    try:
        yield
    except ValueError as error:
        advice = "; --rollouts sets N" * ("rollouts" in options and "rollouts" in str(error))
        raise InputError(f"{error}{advice}", *options) from error


def own_options(config: Options, section: str) -> dict[str, Any]:
    """Return the options of a chosen part, by the names in its signature."""
    return part_options(section, getattr(config.chosen, section), config.parts[section])


def loss_options(config: Config) -> dict[str, Any]:
    """Return the options of the loss besides its clips."""
    own = own_options(config, "loss")
    return loss_of(config.chosen.loss).resolve({x: y for x, y in own.items() if x not in CLIPS})


def objective_of(config: Config) -> Objective:
    own = {key: x for key, x in own_options(config, "objective").items() if x is not None}
    sizes = config.sampling.rollouts, config.optimizer.updates_per_step
    with _about(*own, "rollouts"):
        made = make_objective(config.chosen.objective, own, *sizes)
    if isinstance(made, GroupObjective) and (stop_at := config.sampling.stop_at):
        return replace(made, stop_at=stop_at)
    return made


def correction_of(config: Config) -> tuple[str, dict[str, float]]:
    """Return the name and the numbers of the correction."""
    name = config.chosen.correction
    with _about(*config.parts["correction"]):
        return name, CORRECTIONS[name].resolve(own_options(config, "correction"))
