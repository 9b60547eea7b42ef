"""The parts of a run that are chosen by name, the options of each, and all conditions between
options of several parts. What concerns one part alone, that part refuses (`refuses` of an
objective)."""

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from maxrl_fast.algorithms.estimators.of_training import has_teacher
from maxrl_fast.algorithms.losses import ALIASES, CLIPS, LOSSES, Clips, find_loss
from maxrl_fast.algorithms.method import Method
from maxrl_fast.algorithms.options import Option, options_of
from maxrl_fast.config.options import Config, EvaluationConfig
from maxrl_fast.errors import InputError
from maxrl_fast.rollout.vllm import VllmOptions
from maxrl_fast.runtime.loading import OBJECT, is_code, load_code
from maxrl_fast.tasks.dataset import DatasetOptions
from maxrl_fast.tasks.dataset_specs import DATASETS, GYM, is_reward, spec_of
from maxrl_fast.tasks.gym import GymOptions, generator_options
from maxrl_fast.tasks.maze import MazeOptions
from maxrl_fast.training.answers import LIKELIHOODS
from maxrl_fast.training.correction import CORRECTIONS
from maxrl_fast.training.objectives.group import GroupObjective, Objective
from maxrl_fast.training.objectives.registry import (
    OBJECTIVES,
    find_code,
    find_objective,
    make_objective,
    method_hint,
)
from maxrl_fast.training.teacher import TEMPLATES, names_asked

# in the order of choice: the default of a later one follows from earlier ones
SECTIONS = ("objective", "rollout", "task", "loss", "correction")
_BUILT_IN: dict[str, Any] = {
    "objective": OBJECTIVES,
    "loss": LOSSES | ALIASES,
    "correction": CORRECTIONS,
    "task": {"maze": MazeOptions} | dict.fromkeys(DATASETS, DatasetOptions),
    "rollout": {"native": None, "vllm": VllmOptions},
}
# arguments that a user's class may ask for, which are no options
OFFERED = {
    "task": ("seed", "model"),
    "rollout": ("model", "dtype", "max_batch", "ranks", "cache_bytes"),
}


def part(section: str, name: str) -> Any:
    """Return what --SECTION NAME names: a method, a dataclass of options, a user's class, or None
    for a part without options."""
    if section == "objective":
        return find_objective(name)
    if name in (built_in := _BUILT_IN[section]):
        return built_in[name]
    if section == "task" and name.startswith((GYM, OBJECT)):
        return GymOptions if name.startswith(GYM) else None
    if section == "task" and is_reward(name):
        return DatasetOptions
    if is_code(name):
        is_loss = section == "loss"
        return find_code("loss", name, find_loss) if is_loss else load_code(section, name, "CLASS")
    names = ", ".join([*built_in, *["gym:NAME"] * (section == "task")])
    raise InputError(
        f"--{section} must be one of {names}, or FILE.py:NAME or package.module:NAME, got "
        f"{name!r:.80}{method_hint(name, built_in)}"
    )


def _signature(section: str, name: str) -> Mapping[str, Option]:
    """Return the options of a part by the names in its signature."""
    found = part(section, name)
    if isinstance(found, Method):
        clips = options_of(Clips) if getattr(found, "clips", False) else {}
        size = getattr(found, "size", None)
        return {**clips, **({size.name: size.option} if size else {}), **found.options}
    if name.startswith(GYM):
        return {**options_of(found), **generator_options(name.removeprefix(GYM))}
    is_class = inspect.isclass(found)
    return options_of(found, OFFERED[section]) if is_class else {}


@lru_cache(maxsize=256)
def options_of_part(section: str, name: str) -> dict[str, Option]:
    """Return the options of a part by flag. Where a group or a built-in part of an earlier section
    has the name, the part's own stands before it: simko_k, icepop_low."""
    evaluated = EvaluationConfig.options() if section in ("task", "rollout") else ()
    earlier = {"loss": ("objective",), "correction": ("objective", "loss")}.get(section, ())
    used = {*evaluated}.union(Config.options(), *map(owners_by_option, earlier))
    signature, short = _signature(section, name).items(), name.rpartition(":")[2]
    flags = {f"{short}_{key}" if key in used else key: (key, x) for key, x in signature}
    return {flag: replace(x, name=flag, own_name=key) for flag, (key, x) in flags.items()}


@lru_cache
def owners_by_option(section: str) -> dict[str, tuple[str, ...]]:
    """Return the built-in parts of a section that have each option."""
    owners: dict[str, tuple[str, ...]] = {}
    for name in _BUILT_IN[section]:
        for key in options_of_part(section, name):
            owners[key] = (*owners.get(key, ()), name)
    return owners


class View(dict[str, Any]):
    """Options by name, as attributes too; what the run does not have is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __missing__(self, name: str) -> None:
        return None


def _needs(c: View) -> Iterator[tuple[str, Any, str]]:
    """Yield options, whether a run uses them, and what to say where they are given to one that does
    not; "": they are ignored."""
    yield (
        "reward_workers reward_concurrency reward_seconds reward_memory_gb reward_env "
        "max_reward_error_rate reward_threshold",
        c.reward or c.task != "maze",
        f"needs --reward with task {c.task}",
    )
    yield "reward", not is_reward(c.task), f"is not used by task {c.task}"
    others = "needs --reward: with --task FILE:f write --task dataset --reward FILE:f and others"
    yield "reward_weights", c.reward, others
    yield "answer_key", spec_of(c.task).gold, f"is not used by task {c.task}"
    yield "max_turns", c.environment or "environment" not in c, "needs --environment"
    yield "overlong_penalty", c.overlong_buffer, "needs --overlong-buffer"
    yield "vllm_tensor_parallel kv_cache_gb", not c.vllm_url, "cannot be used with --vllm-url"
    biased = f"to stop when some rollouts succeed biases {c.objective}"
    yield "stop_at", c.objective == "maxrl", f"needs --objective maxrl: {biased}"
    another = f"carried prompts would make {c.objective} another objective"
    yield "carry", c.objective == "maxrl", f"needs --objective maxrl: {another}"
    yield "first_rollouts schedule", c.stop_at, "needs --stop-at"
    yield "draw_prompts", c.task != "maze", "needs a task with a number of prompts, such as dataset"
    yield "std_filter", (c.dynamic_sampling or 0) > 1, "needs --dynamic-sampling of 2 or more"
    yield "kl teacher_prompt", c.kl_coef, "needs --kl-coef"
    yield "teacher_template", c.teacher_prompt in TEMPLATES, "needs a --teacher-prompt by name"
    has_own = c.teacher_prompt and not c.reference
    yield "teacher_ema", has_own, "needs --teacher-prompt, and no --reference"
    yield "divergence", c.kl_coef and c.kl == "full", "needs --kl full"
    yield "jsd_beta", c.kl_coef and c.divergence == "jsd", "needs --divergence jsd"
    has_reference = c.kl_coef or c.objective == "pacs_paper"
    yield "reference", has_reference, "needs --kl-coef, --objective distill or pacs_paper"
    # the sizes of a checkpoint are its own
    yield "hidden_size intermediate_size layers heads kv_heads rope_theta", not c.model, ""
    yield "model_backend", c.model, "needs --model"
    yield "lora_alpha lora_targets", c.lora_rank, "needs --lora-rank"
    yield "allow_changes", c.resume, "needs --resume"


def unused_options(values: Mapping[str, Any]) -> dict[str, str]:
    needs = (x for x in _needs(View(values)) if not x[1])
    return {name: said for x, _, said in needs for name in x.split() if name in values}


# A sentence about what is wrong is a format of the options that it is about.
def _wrong_rewards(c: View) -> Iterator[str]:
    if len(c.reward_weights) not in (0, len(c.reward)):
        yield "reward_weights must be a number for each reward, got {reward_weights} for {reward}"


def wrong_evaluation(c: View) -> Iterator[str]:
    yield from _wrong_rewards(c)
    if c.temperature == 0 and c.samples > 1:
        yield "greedy decoding, of temperature 0, needs --samples 1, got {samples}"
    if not all(1 <= k <= c.samples for k in c.k):
        yield "k must be from 1 to the {samples} samples, got {k}"


def _wrong_sizes(c: View) -> Iterator[str]:
    if c.prompts * c.rollouts >= 2**31:
        yield "prompts x rollouts must be below 2^31, got {prompts} x {rollouts}"
    first = [("rollouts", "first_rollouts")] * bool(c.stop_at)
    own = ("prompts", "updates_per_step"), ("hidden_size", "heads"), ("heads", "kv_heads")
    for whole, of in (*own, *first):
        if c[whole] % c[of]:
            yield f"{whole} must be a multiple of {of}, got {{{whole}}} and {{{of}}}"
    if c.hidden_size // c.heads % 2:
        yield "hidden_size / heads must be even, got {hidden_size} / {heads}"
    low, high = (f"{c.correction}_{x}" for x in ("low", "high"))
    if low in c and c[low] >= c[high]:
        yield f"{low} must be below {high}, got {{{low}}} and {{{high}}}"
    # a folder of this name, such as one that wandb leaves, has no origin
    if c.log_to and not getattr(importlib.util.find_spec(c.log_to), "origin", None):
        yield "--log-to {log_to} is not installed: pip install {log_to}"
    if c.resume and c.out and c.out.absolute() != c.resume.absolute():
        yield "--resume writes into the run's own folder, {resume}, got --out {out}"


def _wrong_values(c: View) -> Iterator[str]:
    needs, given = c.method.needs, {"reward_source": "given"}
    plain, alone = {**given, "overlong_buffer": 0}, {**given, "dynamic_sampling": 0}
    of_answers = "{objective}, which learns from the reference answer,"
    own = {"loss": c.method.loss, "correction": "none", "top_entropy": 1}
    drawn = {"dynamic_sampling": 0, "stop_at": 0, "carry": 0}
    only = (c.method if c.method.owns_loss else c.token_loss).aggregation
    # whether something is chosen, its name, and the only values that options then have
    fixed: list[tuple[Any, str, dict[str, Any]]] = [
        (needs.answers, of_answers, {**plain, "truncated": "keep"}),
        (needs.parts, "{objective}, of several rewards,", {**plain, "reward_threshold": None}),
        (needs.greedy, "{objective}", given),
        (needs.binary, "{objective}, of rewards of 0 or 1,", {"overlong_buffer": 0}),
        (c.method.owns_loss, "{objective}, which has a loss of its own,", own),
        (c.stop_at, "--stop-at", alone),
        (c.draw_prompts != "uniform", "--draw-prompts {draw_prompts}", drawn),
        (c.carry, "--carry", {**alone, "stop_at": 0}),
        # it has no log-probs before top-p at another temperature
        (c.rollout == "vllm" and c.top_p < 1, "vllm with --top-p {top_p}", {"temperature": 1}),
        (only and c.aggregation, "{objective} with loss {loss}", {"aggregation": only}),
    ]
    for is_chosen, owner, values in fixed:
        for name, value in values.items() if is_chosen else ():
            if c[name] != value:
                flag = f"--{name.replace('_', '-')}"
                wanted = f"no {flag}" if value is None else f"{flag} {value}"
                yield f"{owner} needs {wanted}, got {{{name}}}"
    refuses = getattr(find_objective(c.objective), "refuses", {})
    yield from (sentence for sentence, is_wrong in refuses.items() if is_wrong(c))


def _wrong_parts(c: View) -> Iterator[str]:
    needs, loss, reads_policy = c.method.needs, c.token_loss, c.reward_source in LIKELIHOODS
    if needs.parts and len(c.reward) < 2:
        yield "{objective} needs a --reward of 2 or more functions, got {reward}"
    if needs.binary and reads_policy:
        yield "{objective} needs rewards of 0 or 1, got --reward-source {reward_source}"
    if (c.stop_at or c.carry) and c.order not in (None, c.rollouts - 1):
        what = "--stop-at is MaxRL of order --rollouts" if c.stop_at else "--carry sets the order"
        yield what + ", so order cannot be {order}"
    if c.ahead and c.rollout == "vllm" and not c.vllm_url:
        yield "--ahead {ahead} needs --rollout native or --vllm-url, to sample while it trains"
    if c.ahead and (reads_policy or needs.answers):
        yield (
            "--ahead {ahead} cannot be used for {objective} with --reward-source {reward_source}, "
            "whose rewards read the policy while it changes"
        )
    if c.dynamic_sampling and c.method.learns_from_equal_rewards(c.rollouts):
        yield "dynamic_sampling leaves out groups of equal rewards, from which {objective} learns"
    if reads_policy and c.task == "maze":
        yield (
            "reward_source cannot be {reward_source} for task {task}, whose responses have no "
            "reasoning, so that all have the same reward; --objective verifree learns from them"
        )
    if reads_policy and c.truncated == "zero":
        yield (
            "truncated cannot be zero with --reward-source {reward_source}, by which the reference "
            "answer decides, not the end of a response; use keep or mask"
        )
    is_masked = c.correction == "sequence_mask"
    if needs.token_weights and (loss.by_sequence or is_masked):
        yield (
            "{objective} weights single tokens by either sign, so loss cannot be one of whole "
            "responses and correction not sequence_mask, got {loss} and {correction}"
        )
    is_full = c.kl_coef and c.kl == "full"
    if is_full and not has_teacher(c):
        yield "kl full needs another teacher than the policy, --reference or --teacher-prompt"
    if names_asked(c.teacher_prompt) and (not is_full or needs.reference or c.rollouts < 2):
        yield (
            "--teacher-prompt {teacher_prompt}, which reads the group, needs --kl full, "
            "--rollouts 2 or more and an objective without a reference policy, got --kl {kl}, "
            "--rollouts {rollouts} and --objective {objective}"
        )
    if is_full and (loss.over_batch or c.top_entropy != 1 or c.siren or is_masked):
        yield (
            "kl full cannot be used where a token's loss depends on other responses, as with loss "
            "kl_cov, --top-entropy, --siren and --correction sequence_mask"
        )


def refuse(values: Mapping[str, Any], *rules: Callable[[View], Iterator[str]]) -> None:
    several = {x: " ".join(map(str, y)) for x, y in values.items() if isinstance(y, tuple)}
    for sentence in (x for rule in rules for x in rule(View(values))):
        raise InputError(sentence.format_map(View({**values, **several})))


def check(config: Config) -> None:
    """Refuse, before any work, what is wrong with options that are right by themselves."""
    try:
        loss: Any = part("loss", config.chosen.loss)
        own = {"method": objective_of(config), "token_loss": loss}
        refuse({**config.values, **own}, _wrong_rewards, _wrong_sizes, _wrong_values, _wrong_parts)
        config.sampling.build(1, config.run.seed)  # or an error of a user's class
        given = config.parts["loss"].items()
        loss.resolve({x: y for x, y in given if x not in CLIPS})
    except InputError:
        raise
    except ValueError as error:  # of a part
        advice = "; --rollouts sets N" * ("rollouts" in str(error))
        raise InputError(f"{error}{advice}") from error


def objective_of(config: Config) -> Objective:
    own = {x: y for x, y in config.parts["objective"].items() if y is not None}
    sizes = config.sampling.rollouts, config.optimizer.updates_per_step
    made = make_objective(config.chosen.objective, own, *sizes)
    stop_at = config.sampling.stop_at or min(config.sampling.carry, 1)
    return replace(made, stop_at=stop_at) if isinstance(made, GroupObjective) and stop_at else made
