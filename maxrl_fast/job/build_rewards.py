import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from maxrl_fast.config.options import ResolvedConfig, RewardOptions
from maxrl_fast.errors import InputError
from maxrl_fast.rewards import RewardSource
from maxrl_fast.rewards.combined import WeightedRewards
from maxrl_fast.rewards.in_process import InProcessEnvironments, InProcessReward
from maxrl_fast.rewards.models import CLASSIFIER, Classifier
from maxrl_fast.rewards.output import RewardOutput
from maxrl_fast.rewards.pool import EnvironmentPool, RewardPool
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.episode import EpisodeTask
from maxrl_fast.tasks.names import OBJECT, lost_object
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.length_penalty import LengthPenalty
from maxrl_fast.training.objectives.objective import Objective
from maxrl_fast.training.policy_reward import LIKELIHOODS, PROBABILITY, PolicyReward, check_answers

CPU = torch.device("cpu")


def build_scorer(
    options: RewardOptions,
    task: Task,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    num_ranks: int = 1,
    output: RewardOutput | None = None,
) -> Scorer:
    """Build the scorer: the task, functions in worker processes or in this one, or a reward model.

    `functions` of this process are by their names among the rewards. Each of `num_ranks` processes
    scores a part of the responses. `output` gets what worker processes print. Raises InputError if
    a reward cannot be loaded.
    """
    names = reward_names(options, task)
    if not names:
        return Scorer(
            task,
            None,
            options.max_reward_error_rate,
            options.reward_threshold,
            num_ranks=num_ranks,
        )
    with contextlib.ExitStack() as on_error:
        sources: list[RewardSource] = []
        for name in names:
            is_optional = len(names) > 1
            if functions and name in functions:
                sources.append(InProcessReward(functions[name], name, is_optional))
            else:
                sources.append(_build_source(options, name, is_optional, device, dtype, output))
            on_error.callback(sources[-1].close)
        weights = options.reward_weights or [1.0] * len(names)
        source = WeightedRewards(sources, weights) if [*weights] != [1.0] else sources[0]
        on_error.pop_all()
    # a custom function sees the whole response
    limit = None if options.reward else task.answer_limit
    return Scorer(
        task, source, options.max_reward_error_rate, options.reward_threshold, limit, num_ranks
    )


def reward_names(options: RewardOptions, task: Task) -> tuple[str, ...]:
    """Return the rewards of --reward, or the task's function; empty if the task scores."""
    return options.reward or ((task.reward,) if task.reward else ())


def _build_source(
    options: RewardOptions,
    name: str,
    is_optional: bool,
    device: torch.device,
    dtype: torch.dtype,
    output: RewardOutput | None,
) -> RewardSource:
    if name.startswith(OBJECT):
        raise InputError(lost_object("reward", name))
    if name.startswith(CLASSIFIER):
        return Classifier(name, device, dtype)
    return RewardPool(
        name,
        workers=options.reward_workers,
        time_limit=options.reward_seconds,
        memory_limit=int(options.reward_memory_gb * 1e9),
        environment=_variables(options),
        concurrency=options.reward_concurrency,
        is_optional=is_optional,
        output=output,
    )


def build_environments(
    options: RewardOptions, name: str, cls: type | None, output: RewardOutput | None
) -> EnvironmentPool | InProcessEnvironments:
    """Start the workers of --environment, if it is not a class of this process.

    Raises:
        InputError: if it cannot be loaded, or is not a class of environments.
    """
    if cls is not None:
        return InProcessEnvironments(cls, name)
    if name.startswith(OBJECT):
        raise InputError(lost_object("environment", name))
    return EnvironmentPool(
        name,
        workers=options.reward_workers,
        time_limit=options.reward_seconds,
        memory_limit=int(options.reward_memory_gb * 1e9),
        environment=_variables(options),
        output=output,
    )


def _variables(options: RewardOptions) -> list[str]:
    return [name.strip() for name in options.reward_env.split(",") if name.strip()]


def build_policy_reward(
    config: ResolvedConfig, task: Task, objective: Objective, learner: Learner | None
) -> PolicyReward | None:
    """Build the reward from the policy for training rollouts; None if there is none. Without a
    learner only the task is checked.

    Raises:
        InputError: if the task has no reference answers, or its responses are episodes.
    """
    source = config.shaping.reward_source
    who = (
        f"--objective {config.objective.objective}"
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
    return PolicyReward(kind, answered, learner, config.rollout.max_new_tokens)


def build_length_penalty(config: ResolvedConfig) -> LengthPenalty | None:
    options = config.shaping
    if not options.overlong_buffer:
        return None
    return LengthPenalty(
        config.rollout.max_new_tokens, options.overlong_buffer, options.overlong_penalty
    )
