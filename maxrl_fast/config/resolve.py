"""From a checked configuration and its task to one in which every default is worked out."""

import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from maxrl_fast.config.options import Config, Place
from maxrl_fast.config.rules import View, objective_of, part, refuse
from maxrl_fast.errors import InputError
from maxrl_fast.model.policy import backend_of, read_sizes
from maxrl_fast.runtime.device import resolve_device, resolve_dtype
from maxrl_fast.tasks import Task, held_out_sets
from maxrl_fast.tasks.dataset import DatasetTask
from maxrl_fast.tasks.text_codec import TextTask
from maxrl_fast.training.objectives.registry import objective_defaults

# of the default evaluations between the first step and the last: their share of the training
# samples, and the prompts below which pass@k is too noisy to be worth them
EVALUATION_SHARE, FEWEST_EVALUATED = 0.05, 32


def resolve(
    config: Config, task: Task, processes: int = 1, warn: Callable[[str], None] = warnings.warn
) -> Config:
    """Return the configuration with every default but --out worked out, with --dry-run 8x80 for
    that machine, whose GPUs compute in bfloat16."""
    # a run that resumes has its own checkpoint and response limit
    directory = None if config.run.resume else config.model.directory
    limit = response_limit(config.sampling.max_new_tokens, task, directory, warn)
    given: dict[str, Any] = {"max_new_tokens": limit, "processes": processes}
    given |= {"size": getattr(task, "num_train_prompts", None), "task": task.name}
    refuse({**config.values, **given}, _wrong)
    objective, loss = objective_of(config), part("loss", config.chosen.loss)
    own = objective_defaults(config.chosen.objective, config.sampling.rollouts)
    start, backend = config.model.directory, str(config.model.model_backend)
    if start is not None and (start / "config.json").exists():  # one that resumes needs it no more
        backend = backend_of(start, backend)
    # of the warm start and of reinforcement learning (docs/models.md)
    sft_lr, lr = (1e-4, 1e-5) if config.model.lora_rank else (1e-5, 1e-6)
    if config.model.model is None:
        sft_lr, lr = 2e-3, 3e-4
    defaults = {
        **{flag: own.get(name) for name, flag in config.flags["objective"].items()},
        "critic_lr": sft_lr,
        "sft_lr": sft_lr,
        "lr": lr,
        "sft_beta2": config.optimizer.beta2,
        "aggregation": loss.aggregation or objective.aggregation,
        "threads": torch.get_num_threads(),  # what affinity and OMP_NUM_THREADS leave
    }
    derived = {name: x for name, x in defaults.items() if config.values.get(name) is None} | {
        "max_new_tokens": limit,
        "sft_steps": _sft_steps(config, task),
        "model_backend": backend.replace("auto", "native"),
        "eval_prompts": num_held_out(config.evaluation.eval_prompts, task),
    }
    if isinstance(task, TextTask):
        derived["template_date"] = task.conversation.clock
    of_gpus = {"device": "cuda", "dtype": str(config.run.dtype).replace("auto", "bfloat16")}
    return config.replace(**derived, **(of_gpus if config.run.dry_run else place_of(config.run)))


def _wrong(c: View) -> Iterator[str]:
    if c.prompts < c.processes:
        yield "prompts must be at least the number of processes, {processes}, got {prompts}"
    if c.draw_prompts not in (None, "uniform") and (c.size is None or c.size < c.prompts):
        yield (
            "--draw-prompts needs a task with at least the --prompts {prompts} as "
            "num_train_prompts, got {size} of task {task}"
        )
    if c.processes % (c.vllm_tensor_parallel or 1):
        yield (
            "vllm_tensor_parallel must divide the number of processes, {processes}, got "
            "{vllm_tensor_parallel}"
        )
    if c.overlong_buffer > c.max_new_tokens:
        yield (
            "overlong_buffer must be at most max_new_tokens, got {overlong_buffer} and "
            "{max_new_tokens}"
        )
    if c.dry_run and c.device == "cpu":
        yield "--dry-run {dry_run} is for GPUs, got --device {device}"


def response_limit(
    wanted: int | None, task: Task, directory: Path | None, warn: Callable[[str], None]
) -> int:
    """Return the tokens that are `wanted`, or the task's, or with a warning what the positions of
    the policy in `directory` leave of these."""
    limit = wanted or task.max_new_tokens
    if directory is None:
        return limit
    positions, longest = read_sizes(directory).max_position_embeddings, task.prompt_length
    if limit <= (room := positions - longest):
        return limit
    why = f"{directory} has {positions} positions, and prompts have up to {longest} tokens"
    why += " (a lower --max-prompt-tokens leaves more)"
    if wanted or room < 1:
        most = f"--max-new-tokens must be at most {room}, got {limit}"
        raise InputError(f"{most}: {why}")
    warn(f"responses end after {room} tokens instead of the task's {limit}: {why}")
    return room


def _sft_steps(config: Config, task: Task) -> int:
    steps, is_dataset = config.warm_start.sft_steps, isinstance(task, DatasetTask)
    if steps is None and config.parts["task"].get("sft_data") and isinstance(task, DatasetTask):
        steps = math.ceil(task.num_demonstrations / config.warm_start.sft_batch)
    elif steps is None:
        steps = 100 if config.model.model is None and task.has_demonstrations else 0
    if steps and not task.has_demonstrations:
        why = f"as {task.name} has no solutions to learn from, got {steps}"
        raise InputError(f"sft_steps must be 0{' without --sft-data' * is_dataset}, {why}")
    return steps


def num_held_out(wanted: int | None, task: Task) -> int:
    available = max(size for size, _ in held_out_sets(task, 2**63, 1).values())
    number = wanted or min(256, available)
    if number > available:
        most = f"the {available} prompts that are held out"
        raise InputError(f"eval_prompts must be at most {most}, got {number}")
    return number


def evaluation_schedule(config: Config, task: Task) -> tuple[int, int]:
    """Return after how many steps, 0: never, on how many prompts of each held-out set, between the
    first step and the last. A sample of training costs three of an evaluation, because it is
    learned from."""
    options, steps = config.evaluation, config.optimizer.steps
    if options.eval_every is not None:
        return options.eval_every, options.eval_prompts
    trained = steps * config.sampling.prompts * config.sampling.rollouts
    samples = sum(n for _, n in held_out_sets(task, 1, options.eval_samples).values())
    affordable = int(EVALUATION_SHARE * trained / (3 * samples))
    if affordable < min(FEWEST_EVALUATED, options.eval_prompts):
        return 0, 0
    return math.ceil(steps / 4), min(affordable, options.eval_prompts)


def place_of(place: Place) -> dict[str, str]:
    device = resolve_device(place.device)
    dtype = str(resolve_dtype(place.dtype, device)).removeprefix("torch.")
    return {"device": device.type, "dtype": dtype}
