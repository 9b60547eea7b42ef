from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

from maxrl_fast.config.options import Config, RewardOptions, TaskOptions
from maxrl_fast.errors import InputError
from maxrl_fast.job.build_rewards import build_environments
from maxrl_fast.rewards.output import RewardOutput
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.chain import ChainTask
from maxrl_fast.tasks.custom import custom_task, json_object
from maxrl_fast.tasks.dataset import DatasetTask
from maxrl_fast.tasks.guess import GuessTask
from maxrl_fast.tasks.gym import GymTask
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.tasks.names import (
    GYM,
    OBJECT,
    dataset_spec,
    is_plugin,
    is_reward,
    lost_object,
    needs_data,
    unknown_task,
)
from maxrl_fast.tasks.tools import ToolTask

NO_REWARDS = RewardOptions()


def build_run_task(config: Config, environment: type | None = None) -> Task:
    """Build the task; `environment` is a class of this process, by --environment's name."""
    return build_task(
        config.task,
        config.run.seed,
        config.model.directory,
        config.reward,
        environment=environment,
        output=RewardOutput(),
        sft_data=config.warm_start.sft_data,
        max_new_tokens=config.rollout.max_new_tokens,
        needs_reward=config.objective.objective != "distill",
    )


def closing_task(task: Task) -> AbstractContextManager[object]:
    """Return a context after which a task's environments have ended."""
    return closing(task) if isinstance(task, ToolTask) else nullcontext()


def build_task(
    options: TaskOptions,
    seed: int,
    model: Path | None = None,
    rewards: RewardOptions = NO_REWARDS,
    *,
    environment: type | None = None,
    output: RewardOutput | None = None,
    sft_data: Path | None = None,
    max_new_tokens: int | None = None,
    needs_reward: bool = True,
) -> Task:
    """Build the task. `max_new_tokens` is the longest demonstration in `sft_data`, a file for the
    warm start.

    Raises:
        InputError: if the name is unknown, the options do not fit the task, or its files cannot be
        read.
    """
    name, spec = options.task, dataset_spec(options.task)
    if name.startswith(OBJECT):
        raise InputError(lost_object("task", name))
    if name == "maze":
        return MazeTask(options.maze_size, seed)
    if name == "chain":
        return ChainTask(options.chain_length, seed)
    if name == "guess":
        return GuessTask(seed)
    if is_plugin(name):
        return custom_task(name, options.task_args, seed, model)
    if spec is None and not name.startswith(GYM):
        raise InputError(unknown_task(name))
    if spec is not None and options.data is not None and options.hub is not None:
        raise InputError(f"--task {name} takes --data or --hub, got both")
    if is_reward(name) and options.data is None and options.hub is None:
        raise InputError(needs_data(name))
    if spec is not None and options.data is None and options.hub is None and spec.hub is None:
        raise InputError(f"--task {name} needs --data FILE or --hub NAME")
    has_reward = rewards.reward or options.environment
    if needs_reward and spec is not None and not has_reward and spec.reward is None:
        raise InputError(f"--task {name} needs --reward FILE:FUNCTION")
    if spec is None:
        json_object("--gym-config", options.gym_config)
    if model is None:
        raise InputError(f"--task {name} needs --model DIR, whose tokenizer reads text")
    text: dict[str, Any] = {
        "prompt_suffix": options.prompt_suffix,
        "plain_prompts": options.plain_prompts,
        "max_prompt_tokens": options.max_prompt_tokens,
        "allow_special_tokens": options.allow_special_tokens,
    }
    if spec is None:
        return GymTask(name.removeprefix(GYM), seed, model, config=options.gym_config, **text)
    text |= {
        "data": options.data,
        "test_data": options.test_data,
        "hub": options.hub,
        "prompt_key": options.prompt_key,
        "answer_key": options.answer_key,
        "sft_data": sft_data,
        "max_new_tokens": max_new_tokens,
        "needs_reward": needs_reward,
    }
    if options.environment is None:
        return DatasetTask(spec, seed, model, **text)
    workers = build_environments(rewards, options.environment, environment, output)
    try:
        if needs_reward and not (workers.signature["has_reward"] or rewards.reward):
            raise InputError(
                f"--environment {options.environment} needs a method get_reward(), or --reward "
                "FILE:FUNCTION"
            )
        return ToolTask(workers, options.max_turns, spec, seed, model, **text)
    except BaseException:
        workers.drop()
        raise
