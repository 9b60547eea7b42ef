"""Builds the task and what scores it."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from maxrl_fast.config.options import Config, Reward
from maxrl_fast.config.rules import own_options
from maxrl_fast.errors import InputError
from maxrl_fast.rewards import RewardSource
from maxrl_fast.rewards.combined import WeightedRewards
from maxrl_fast.rewards.models import CLASSIFIER, Classifier
from maxrl_fast.rewards.output import RewardOutput
from maxrl_fast.rewards.pool import InProcess, RewardPool, UserCode
from maxrl_fast.runtime.loading import build_from_code
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.dataset import DatasetTask
from maxrl_fast.tasks.dataset_specs import DATASETS
from maxrl_fast.tasks.episode import EpisodeTask
from maxrl_fast.tasks.gym import GymTask
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.tasks.names import GYM, OBJECT, is_plugin, lost_object
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.tasks.tools import ToolTask
from maxrl_fast.training.collect import LengthPenalty
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.objectives.objective import Objective
from maxrl_fast.training.policy_reward import LIKELIHOODS, PROBABILITY, PolicyReward, check_answers

NO_REWARDS = Reward()
TASKS: dict[str, Callable[..., Task]] = {"maze": MazeTask}
TASKS |= {name: partial(DatasetTask, name) for name in DATASETS}


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
    offered = {"seed": seed} | ({} if model is None else {"model": model})
    if is_plugin(name):
        built: Task = build_from_code("task", name, Task, offered, own, "; --model gives model")
        return built
    make = TASKS.get(name) or partial(DatasetTask, name)
    if name.startswith(GYM):
        make = partial(GymTask, name.removeprefix(GYM))
    if own.get("environment") is not None:
        code = "environment", own["environment"], environment, rewards, RewardOutput()
        make = partial(ToolTask, partial(start_code, *code, is_environment=True), name)
    offered |= {"needs_reward": needs_reward and not rewards.reward, **others}
    needs_model = f"--task {name} needs --model DIR, whose tokenizer reads text"
    return make_part(make, offered, own, needs_model)


def make_part(
    make: Callable[..., Any], offered: Mapping[str, Any], own: Mapping[str, Any], missing: str = ""
) -> Any:
    """Call `make` with a part's own options, and with what is offered of its other parameters;
    InputError(missing) if one without a default gets nothing."""
    parameters = inspect.signature(make).parameters.values()
    given = {x.name: offered[x.name] for x in parameters if x.name in offered} | {**own}
    for x in parameters:
        if x.default is x.empty and x.kind is not x.VAR_KEYWORD and x.name not in given:
            raise InputError(missing)
    return make(**given)


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
    names, sources = reward_names(options, task), list[RewardSource]()
    with contextlib.ExitStack() as on_error:
        for name in names:
            if name.startswith(CLASSIFIER):
                sources.append(Classifier(name, device, dtype))
            else:
                given = (functions or {}).get(name)
                sources.append(start_code("reward", name, given, options, output))
            on_error.callback(sources[-1].close)
        weights = options.reward_weights or (1.0,) * len(names)
        is_sum = weights not in ((), (1.0,))
        source = WeightedRewards(sources, weights) if is_sum else next(iter(sources), None)
        on_error.pop_all()
    # a custom function sees the whole response
    limit = None if options.reward else task.answer_limit
    rate, threshold = options.max_reward_error_rate, options.reward_threshold
    return Scorer(task, source, rate, threshold, limit, num_ranks)


def reward_names(options: Reward, task: Task) -> tuple[str, ...]:
    """Return the rewards of --reward, or the task's function; empty if the task scores."""
    return options.reward or ((task.reward,) if task.reward else ())


def start_code(
    option: str,
    name: str,
    given: Callable[..., Any] | None,
    options: Reward,
    output: RewardOutput | None,
    **how: Any,
) -> UserCode:
    """Return what calls an option's code: `given`, an object of this process, or that of `name` in
    workers."""
    if given is not None:
        return InProcess(given, name, **how)
    if name.startswith(OBJECT):
        raise InputError(lost_object(option, name))
    return RewardPool(
        name,
        workers=options.reward_workers,
        time_limit=options.reward_seconds,
        memory_limit=int(options.reward_memory_gb * 1e9),
        environment=[x.strip() for x in options.reward_env.split(",") if x.strip()],
        concurrency=options.reward_concurrency,
        output=output,
        **how,
    )


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
