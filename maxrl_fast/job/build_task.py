"""Builds the task and what scores it."""

import contextlib
import json
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch

from maxrl_fast.algorithms.options import options_of
from maxrl_fast.config.options import Config, Reward
from maxrl_fast.config.parts import part_options
from maxrl_fast.config.rules import own_options
from maxrl_fast.errors import InputError
from maxrl_fast.rewards import RewardSource
from maxrl_fast.rewards.combined import WeightedRewards
from maxrl_fast.rewards.models import CLASSIFIER, Classifier
from maxrl_fast.rewards.output import RewardOutput
from maxrl_fast.rewards.pool import InProcess, RewardPool, UserCode
from maxrl_fast.runtime.loading import build_from_code
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.chain import ChainTask
from maxrl_fast.tasks.dataset import DatasetTask
from maxrl_fast.tasks.episode import EpisodeTask
from maxrl_fast.tasks.guess import GuessTask
from maxrl_fast.tasks.gym import GymTask, generator_options
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.tasks.names import (
    GYM,
    OBJECT,
    dataset_spec,
    is_plugin,
    is_reward,
    lost_object,
    needs_data,
)
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.tasks.text_codec import TextOptions
from maxrl_fast.tasks.tools import ToolTask
from maxrl_fast.training.collect import LengthPenalty
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.objectives.objective import Objective
from maxrl_fast.training.policy_reward import LIKELIHOODS, PROBABILITY, PolicyReward, check_answers

NO_REWARDS = Reward()


def build_run_task(config: Config, environment: type | None = None) -> Task:
    """Build the task; `environment` is a class of this process, by --environment's name."""
    return build_task(
        config.chosen.task,
        own_options(config, "task"),
        config.run.seed,
        config.model.directory,
        config.reward,
        environment=environment,
        output=RewardOutput(),
        max_new_tokens=config.sampling.max_new_tokens,
        needs_reward=config.chosen.objective != "distill",
    )


def closing_task(task: Task) -> contextlib.AbstractContextManager[object]:
    return contextlib.closing(task) if isinstance(task, ToolTask) else contextlib.nullcontext()


def build_task(
    name: str,
    own: Mapping[str, Any],
    seed: int,
    model: Path | None = None,
    rewards: Reward = NO_REWARDS,
    *,
    environment: type | None = None,
    output: RewardOutput | None = None,
    max_new_tokens: int | None = None,
    needs_reward: bool = True,
    test_only: bool = False,
) -> Task:
    """Build the task `name` with its `own` options, those that are given. `max_new_tokens` is the
    longest demonstration of --sft-data. test_only: read only held-out sets, if they are given.
    """
    if name.startswith(OBJECT):
        raise InputError(lost_object("task", name))
    own = part_options("task", name, own)
    if name == "maze":
        return MazeTask(own["maze_size"], seed)
    if name == "chain":
        return ChainTask(own["chain_length"], seed)
    if name == "guess":
        return GuessTask(seed)
    if is_plugin(name):
        offered = {"seed": seed} if model is None else {"seed": seed, "model": model}
        built: Task = build_from_code("task", name, Task, offered, own, "; --model gives model")
        return built
    spec = dataset_spec(name)
    given = [own.get("data"), own.get("hub")]
    if test_only:
        given += [own.get("test_data"), own.get("test_hub")]
    if is_reward(name) and not any(given):
        raise InputError(needs_data(name))
    if spec is not None and not any(given) and spec.hub is None:
        raise InputError(f"--task {name} needs --data FILE or --hub NAME")
    has_reward = rewards.reward or own.get("environment")
    if needs_reward and spec is not None and not has_reward and spec.reward is None:
        raise InputError(f"--task {name} needs --reward FILE:FUNCTION")
    if model is None:
        raise InputError(f"--task {name} needs --model DIR, whose tokenizer reads text")
    text = {**text_options(own), "prompt_suffix": own["prompt_suffix"]}
    if spec is None:
        generator = generator_options(name.removeprefix(GYM)).items()
        config = {key: own[key] for key, option in generator if own[key] != option.default}
        return GymTask(name.removeprefix(GYM), seed, model, config=json.dumps(config), **text)
    others = {*options_of(TextOptions), "environment", "max_turns"}
    text |= {key: x for key, x in own.items() if key not in others}
    text |= {
        "test_only": test_only,
        "max_new_tokens": max_new_tokens,
        "needs_reward": needs_reward,
    }
    if own["environment"] is None:
        return DatasetTask(spec, seed, model, **text)
    workers = build_environments(rewards, own["environment"], environment, output)
    try:
        if needs_reward and not (workers.signature["has_reward"] or rewards.reward):
            raise InputError(
                f"--environment {own['environment']} needs a method get_reward(), or --reward "
                "FILE:FUNCTION"
            )
        return ToolTask(workers, own["max_turns"], spec, seed, model, **text)
    except BaseException:
        workers.drop()
        raise


def text_options(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all tasks of text take, as TextTask names it."""
    names = "plain_prompts", "max_prompt_tokens", "allow_special_tokens"
    day = own["template_date"]
    return {name: own[name] for name in names} | {
        "system": own["system_prompt"],
        "template": own["chat_template"],
        "arguments": own["chat_template_kwargs"] or {},
        "day": day and date.fromisoformat(day),
        "stop_texts": own["stop"],
    }


CPU = torch.device("cpu")


def build_scorer(
    options: Reward,
    task: Task,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    num_ranks: int = 1,
    output: RewardOutput | None = None,
) -> Scorer:
    """Build the scorer: the task, functions in worker processes, whose output `output` gets, or of
    this process (`functions`, by name), or a reward model. Each of `num_ranks` scores a part.
    """
    names = reward_names(options, task)
    if not names:
        limits = options.max_reward_error_rate, options.reward_threshold
        return Scorer(task, None, *limits, num_ranks=num_ranks)
    with contextlib.ExitStack() as on_error:
        sources: list[RewardSource] = []
        for name in names:
            if functions and name in functions:
                sources.append(InProcess(functions[name], name))
            else:
                sources.append(_build_source(options, name, device, dtype, output))
            on_error.callback(sources[-1].close)
        weights = options.reward_weights or [1.0] * len(names)
        source = WeightedRewards(sources, weights) if [*weights] != [1.0] else sources[0]
        on_error.pop_all()
    # a custom function sees the whole response
    limit = None if options.reward else task.answer_limit
    return Scorer(
        task, source, options.max_reward_error_rate, options.reward_threshold, limit, num_ranks
    )


def reward_names(options: Reward, task: Task) -> tuple[str, ...]:
    """Return the rewards of --reward, or the task's function; empty if the task scores."""
    return options.reward or ((task.reward,) if task.reward else ())


def _build_source(
    options: Reward,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    output: RewardOutput | None,
) -> RewardSource:
    if name.startswith(OBJECT):
        raise InputError(lost_object("reward", name))
    if name.startswith(CLASSIFIER):
        return Classifier(name, device, dtype)
    concurrency, pool = options.reward_concurrency, _of_pool(options, output)
    return RewardPool(name, concurrency=concurrency, **pool)


def build_environments(
    options: Reward, name: str, cls: type | None, output: RewardOutput | None
) -> UserCode:
    """Start the workers of --environment, if it is not a class of this process."""
    if cls is not None:
        return InProcess(cls, name, is_environment=True)
    if name.startswith(OBJECT):
        raise InputError(lost_object("environment", name))
    return RewardPool(name, is_environment=True, **_of_pool(options, output))


def _of_pool(options: Reward, output: RewardOutput | None) -> dict[str, Any]:
    return {
        "workers": options.reward_workers,
        "time_limit": options.reward_seconds,
        "memory_limit": int(options.reward_memory_gb * 1e9),
        "environment": [name.strip() for name in options.reward_env.split(",") if name.strip()],
        "output": output,
    }


def build_policy_reward(
    config: Config, task: Task, objective: Objective, learner: Learner | None
) -> PolicyReward | None:
    """Build the reward from the policy for training rollouts; None if there is none. Without a
    learner only the task is checked.
    """
    source = config.reward.reward_source
    who = (
        f"--objective {config.chosen.objective}"
        if objective.needs.answers
        else f"--reward-source {source}"
    )
    is_own = objective.needs.answers or source in LIKELIHOODS
    if (is_own or source == "vote") and isinstance(task, EpisodeTask):
        raise InputError(f"{who} needs responses of one turn, got episodes of {task.name}")
    if not is_own:
        return None
    answered = check_answers(task, who)
    kind = PROBABILITY if objective.needs.answers else source
    if learner is None:
        return None
    return PolicyReward(kind, answered, learner, config.sampling.max_new_tokens)


def build_length_penalty(config: Config) -> LengthPenalty | None:
    options = config.reward
    if not options.overlong_buffer:
        return None
    return LengthPenalty(
        config.sampling.max_new_tokens, options.overlong_buffer, options.overlong_penalty
    )
