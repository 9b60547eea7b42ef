"""Builds the task and what scores it."""

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from maxrl_fast.config.options import Config, Reward
from maxrl_fast.config.rules import own_options
from maxrl_fast.errors import InputError
from maxrl_fast.rewards import RewardSource, WeightedRewards
from maxrl_fast.rewards.models import CLASSIFIER, Classifier
from maxrl_fast.rewards.pool import RewardOutput, RewardPool, UserCode
from maxrl_fast.runtime.loading import build_from_code
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.dataset import DatasetTask
from maxrl_fast.tasks.dataset_specs import GYM, OBJECT, is_plugin, lost_object
from maxrl_fast.tasks.gym import GymTask
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.tasks.tools import ToolTask

CPU, NO_REWARDS = torch.device("cpu"), Reward()


def build_run_task(config: Config, environment: type | None = None) -> Task:
    """Build the task; `environment` is a class of this process, by --environment's name."""
    return build_task(
        config.chosen.task,
        own_options(config, "task"),
        config.run.seed,
        config.model.directory,
        config.reward,
        environment=environment,
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
    needs_reward: bool = True,
    **others: Any,
) -> Task:
    """Build the task `name` with its `own` options, those that are given. `others`: further
    arguments of DatasetTask."""
    if name.startswith(OBJECT):
        raise InputError(lost_object("task", name))
    if is_plugin(name):
        offered = {"seed": seed} | ({} if model is None else {"model": model})
        built: Task = build_from_code("task", name, Task, offered, own, "; --model gives model")
        return built
    if name == "maze":
        return MazeTask(**own, seed=seed)
    if model is None:
        raise InputError(f"--task {name} needs --model DIR, whose tokenizer reads text")
    if name.startswith(GYM):
        return GymTask(name.removeprefix(GYM), seed, model, **own)
    make: Callable[..., Task] = DatasetTask
    if code := own.get("environment"):
        given = "environment", code, environment, rewards, RewardOutput()
        make = partial(ToolTask, partial(start_code, *given, is_environment=True))
    needs_reward = needs_reward and not rewards.reward
    return make(name, seed, model, needs_reward=needs_reward, **others, **own)


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
    this process (`functions`, by name), or a reward model. Each of `num_ranks` scores a part."""
    names = options.reward or ((task.reward,) if task.reward else ())
    sources, weights = list[RewardSource](), options.reward_weights or (1.0,) * len(names)
    with contextlib.ExitStack() as on_error:
        for name in names:
            if name.startswith(CLASSIFIER):
                sources.append(Classifier(name, device, dtype))
            else:
                given = (functions or {}).get(name)
                sources.append(start_code("reward", name, given, options, output))
            on_error.callback(sources[-1].close)
        is_sum = weights not in ((), (1.0,))
        whole = WeightedRewards(sources, weights) if is_sum else next(iter(sources), None)
        on_error.pop_all()
    # a custom function sees the whole response
    limit = None if options.reward else task.answer_limit
    rate, threshold = options.max_reward_error_rate, options.reward_threshold
    return Scorer(task, whole, rate, threshold, limit, num_ranks)


def start_code(
    option: str,
    name: str,
    given: Callable[..., Any] | None,
    options: Reward,
    output: RewardOutput | None,
    is_environment: bool = False,
) -> UserCode:
    """Return what calls an option's code: `given`, an object of this process, or that of `name` in
    workers."""
    if given is not None:
        return UserCode(given, name, is_environment)
    if name.startswith(OBJECT):
        raise InputError(lost_object(option, name))
    return RewardPool(name, options, is_environment, output)
