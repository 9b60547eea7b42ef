"""Which options a run takes, by its task and objective. --help shows these alone, and all others are refused."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from maxrl_fast.algorithms.losses import LOSSES
from maxrl_fast.config.options import ObjectiveOptions, RewardOptions, TaskOptions, several
from maxrl_fast.errors import InputError
from maxrl_fast.rewards.models import JUDGE
from maxrl_fast.tasks.names import GYM, OBJECT, dataset_spec, is_plugin, is_reward
from maxrl_fast.training.correction import CORRECTIONS
from maxrl_fast.training.objective_registry import OBJECTIVES, default_loss, is_custom, objective_options


def _names(options: type) -> list[str]:
    return [option.name for option in dataclasses.fields(options)]


@dataclass(frozen=True)
class Choices:
    """The options on which it depends whether others are taken."""

    objective: str = "maxpo"
    task: str = "maze"
    reward: Any = None
    resume: Any = None
    model: Any = None
    lora_rank: int = 0
    kl_coef: float = 0.0
    loss: str | None = None
    overlong_buffer: int = 0
    rollout: str = "native"
    vllm_url: str | None = None
    correction: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Choices":
        """Return the choices among options by name."""
        return cls(**{name: options[name] for name in _names(cls) if name in options})


def not_taken(choices: Choices) -> dict[str, str]:
    """Return the options that these choices do not take, each with who does not take it."""
    found = dict(_of_task(choices))
    who = f"objective {choices.objective}"
    if choices.objective in OBJECTIVES or is_custom(choices.objective):
        taken = objective_options(choices.objective, num_rollouts=2)
        found |= {name: who for name in _names(ObjectiveOptions) if name != "objective" and name not in taken}
    if not choices.lora_rank:
        found |= dict.fromkeys(("lora_alpha", "lora_targets"), "a run without --lora-rank")
    if not choices.kl_coef:
        found["kl"] = "a run without --kl-coef"
    own_loss = default_loss(choices.objective)
    loss = LOSSES.get(choices.loss or own_loss)  # a user's own is checked when it is loaded
    if loss is not None:
        without = "a run without --loss" if own_loss == "ppo" else f"objective {choices.objective}"
        who = without if choices.loss is None else f"loss {choices.loss}"
        found |= dict.fromkeys(("clip_low", "clip_high") * (not loss.clips) + ("loss_options",) * (not loss.options), who)
    correction = CORRECTIONS.get(choices.correction or "tis")  # the one that --importance-cap alone asks for
    if correction is not None:
        who = "a run without --correction" if choices.correction is None else f"correction {choices.correction}"
        found |= dict.fromkeys(("importance_cap",) * (not correction.has_cap), who)
        found |= dict.fromkeys(("correction_options",) * (not correction.options), who)
    if not choices.overlong_buffer:
        found["overlong_penalty"] = "a run without --overlong-buffer"
    if choices.rollout != "vllm":
        found |= dict.fromkeys(("vllm_tensor_parallel", "vllm_url"), "a run without --rollout vllm")
    elif choices.vllm_url is not None:  # they are options of the server
        found |= dict.fromkeys(("vllm_tensor_parallel", "kv_cache_gb"), "a run with --vllm-url")
    if dataset_spec(choices.task) is None:
        found["sft_data"] = f"task {choices.task}"
    if choices.model is None:
        found["model_backend"] = "a run without --model"
    if choices.resume is None:
        found["allow_changes"] = "a run without --resume"
    return found


def _of_task(choices: Choices) -> Iterator[tuple[str, str]]:
    task, who = choices.task, f"task {choices.task}"
    spec, is_gym, is_own = dataset_spec(task), task.startswith(GYM), is_plugin(task)
    rewards = several(choices.reward)
    reads_text, has_function = spec is not None or is_gym, bool(rewards)
    # Functions given as Python objects run in this process.
    has_own = is_own or task.startswith(OBJECT)  # which may score by a function
    has_workers = any(not str(x).startswith(OBJECT) for x in rewards) if rewards else reads_text or has_own
    taken = {
        "maze_size": task == "maze",
        "chain_length": task == "chain",
        "gym_config": is_gym,
        "task_args": is_own,
        **dict.fromkeys(("data", "test_data", "hub", "prompt_key"), spec is not None),
        "answer_key": spec is not None and spec.gold is not None,
        **dict.fromkeys(("prompt_suffix", "plain_prompts", "max_prompt_tokens", "allow_special_tokens"), reads_text),
        "reward": not is_reward(task),  # there the task is the reward
        "reward_weights": has_function,
        **dict.fromkeys(("judge_template", "judge_score", "judge_rate"), any(str(x).startswith(JUDGE) for x in rewards)),
        "reward_threshold": task != "maze" or has_function,
        **dict.fromkeys(
            ("reward_workers", "reward_memory_gb", "reward_isolation", "reward_env", "reward_concurrency"), has_workers
        ),
        **dict.fromkeys(("reward_seconds", "max_reward_error_rate"), has_workers or has_function),
    }
    assert taken.keys() == {*_names(TaskOptions), *_names(RewardOptions)} - {"task"}
    return ((name, who) for name, is_taken in taken.items() if not is_taken)


def refuse_not_taken(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse options that the run does not take and that differ from their defaults.

    Raises:
        InputError: naming the option and what does not take it.
    """
    for name, who in not_taken(Choices.of(options)).items():
        if name in options and options[name] != defaults[name]:
            raise InputError(f"{who} takes no {name}, got {options[name]!r}")
