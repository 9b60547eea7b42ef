"""From a checked configuration and its task to the resolved one, in which every default is worked
out.
"""

import itertools
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from maxrl_fast.config.changes import ended_before_first_step
from maxrl_fast.config.options import Config, Model
from maxrl_fast.config.parts import loss_of, short_name
from maxrl_fast.config.read import absolute_function
from maxrl_fast.config.rules import objective_of
from maxrl_fast.errors import InputError
from maxrl_fast.model.hub import HUB
from maxrl_fast.model.policy import backend_of, read_sizes
from maxrl_fast.runtime.device import resolve_device, resolve_dtype
from maxrl_fast.runtime.files import is_locked, temporary_path
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task, held_out_sets
from maxrl_fast.tasks.dataset import DatasetTask
from maxrl_fast.tasks.text_codec import TextTask
from maxrl_fast.training.objectives.registry import objective_defaults

# of the default evaluations between the first step and the last: their samples, relative to those
# of training, and the prompts below which pass@k is too noisy to be worth them
EVALUATION_SHARE, FEWEST_EVALUATED = 0.05, 32
# options that may name a file of the user's
NAMES_CODE = (
    *("objective", "loss", "task", "rollout", "environment", "teacher_prompt", "schedule"),
    *("reward", "log_to"),
)


def resolve(
    config: Config,
    task: Task,
    ranks: Ranks | None = None,
    has_gpus: bool = False,
    warn: Callable[[str], None] = warnings.warn,
) -> Config:
    """Return the checked configuration with every default worked out.

    Args:
        has_gpus: it is for another machine, with GPUs that compute in bfloat16.
    """
    ranks = ranks or Ranks()
    prompts, number = config.sampling.prompts, tensor_parallel(config)
    processes = f"the number of processes, {ranks.size}"
    if prompts < ranks.size:
        raise InputError(f"prompts must be at least {processes}, got {prompts}", "prompts")
    if ranks.size % number:
        option = "vllm_tensor_parallel"
        raise InputError(f"{option} must divide {processes}, got {number}", option)
    config = config.replace(**_absolute(config))
    # a run that resumes has its own checkpoint and response limit
    model = None if config.run.resume is not None else config.model.directory
    limit = response_limit(config.sampling.max_new_tokens, task, model, warn)
    backend = _backend(config.model)
    if (buffer := config.reward.overlong_buffer) > limit:
        wanted = f"overlong_buffer must be at most max_new_tokens, got {buffer} and {limit}"
        raise InputError(wanted, "overlong_buffer", "max_new_tokens")
    objective, loss = objective_of(config), loss_of(config.chosen.loss)
    own = objective_defaults(config.chosen.objective, config.sampling.rollouts)
    sft_lr, lr = default_rates(config.model)
    defaults = {
        **{name: own.get(name) for name in config.parts["objective"]},
        "critic_lr": sft_lr,
        "sft_lr": sft_lr,
        "lr": lr,
        "sft_beta2": config.optimizer.beta2,
        "aggregation": loss.aggregation or objective.aggregation,
        "threads": torch.get_num_threads(),  # what affinity and OMP_NUM_THREADS leave
    }
    values = config.values()
    derived = {name: x for name, x in defaults.items() if values.get(name) is None} | {
        "max_new_tokens": limit,
        "sft_steps": _sft_steps(config, task),
        "model_backend": backend,
        "eval_prompts": num_held_out(config.evaluation.eval_prompts, task),
        "out": _new_folder(config, ranks),
    }
    if isinstance(task, TextTask):
        derived["template_date"] = task.conversation.clock
    if has_gpus and config.run.device == "cpu":
        wanted = f"--dry-run {config.run.dry_run} is for GPUs, got --device cpu"
        raise InputError(wanted, "device")
    of_gpus = "cuda", "bfloat16" if config.run.dtype == "auto" else config.run.dtype
    place = of_gpus if has_gpus else resolve_place(config.run.device, config.run.dtype)
    return config.replace(**derived, device=place[0], dtype=place[1])


def tensor_parallel(config: Config) -> int:
    return int(config.parts["rollout"].get("vllm_tensor_parallel", 1))


def _backend(model: Model) -> str:
    directory = model.directory
    # a run that resumes has its own checkpoint
    if directory is not None and (directory / "config.json").exists():
        return backend_of(directory, model.model_backend)
    return "native" if model.model_backend == "auto" else model.model_backend


def response_limit(
    wanted: int | None, task: Task, directory: Path | None, warn: Callable[[str], None]
) -> int:
    """Return the response limit in tokens: --max-new-tokens, or the task's, or what the positions
    of the policy in `directory` leave of it (None: enough), after a sentence to `warn`."""
    limit = wanted or task.max_new_tokens
    if directory is None:
        return limit
    positions, longest = read_sizes(directory).max_position_embeddings, task.prompt_length
    if limit <= (room := positions - longest):
        return limit
    why = (
        f"{directory} has {positions} positions, and prompts have up to {longest} tokens (a lower "
        "--max-prompt-tokens leaves more)"
    )
    if wanted or room < 1:
        most = f"--max-new-tokens must be at most {room}, got {limit}"
        raise InputError(f"{most}: {why}", "max_new_tokens")
    warn(f"responses end after {room} tokens instead of the task's {limit}: {why}")
    return room


def _sft_steps(config: Config, task: Task) -> int:
    options, steps = config.warm_start, config.warm_start.sft_steps
    if steps is None and config.parts["task"].get("sft_data") and isinstance(task, DatasetTask):
        steps = math.ceil(task.num_demonstrations / options.sft_batch)
    elif steps is None:
        steps = 100 if config.model.model is None and task.has_demonstrations else 0
    if steps and not task.has_demonstrations:
        advice = " without --sft-data" if isinstance(task, DatasetTask) else ""
        why = f"as {task.name} has no solutions to learn from"
        raise InputError(f"sft_steps must be 0{advice}, {why}, got {steps}", "sft_steps")
    return steps


def default_rates(model: Model) -> tuple[float, float]:
    """Return the default learning rates of the warm start and of reinforcement learning.

    That of a new policy was found on mazes; a checkpoint has that of publications, and adapters ten
    times that (docs/models.md). The critic of ppo has the rate of the warm start, as in verl.
    """
    if model.model is None:
        return 2e-3, 3e-4
    return (1e-4, 1e-5) if model.lora_rank else (1e-5, 1e-6)


def num_held_out(wanted: int | None, task: Task) -> int:
    """Return the number of held-out prompts of a set to evaluate on: by default 256, or all."""
    available = max(size for size, _ in held_out_sets(task, 2**63, 1).values())
    number = wanted or min(256, available)
    if number > available:
        most = f"the {available} prompts that are held out"
        raise InputError(f"eval_prompts must be at most {most}, got {number}", "eval_prompts")
    return number


@dataclass(frozen=True)
class EvaluationSchedule:
    """When a run evaluates between its first step and its last."""

    every: int  # steps; 0: never
    num_prompts: int  # of each held-out set

    def __str__(self) -> str:
        between = f", and every {self.every} steps on {self.num_prompts} prompts"
        return f"evaluations before the first step and after the last{between * bool(self.every)}"


def evaluation_schedule(config: Config, task: Task) -> EvaluationSchedule:
    """Return the schedule of --eval-every, or the default one, whose cost is counted in samples: a
    sample of training costs more than one of an evaluation, because it is also learned from.
    """
    options, steps = config.evaluation, config.optimizer.steps
    if options.eval_every is not None:
        return EvaluationSchedule(options.eval_every, options.eval_prompts)
    trained = steps * config.sampling.prompts * config.sampling.rollouts
    samples = sum(n for _, n in held_out_sets(task, 1, options.eval_samples).values())
    affordable = int(EVALUATION_SHARE * trained / (3 * samples))
    if affordable < min(FEWEST_EVALUATED, options.eval_prompts):
        return EvaluationSchedule(0, 0)
    return EvaluationSchedule(math.ceil(steps / 4), min(affordable, options.eval_prompts))


def resolve_place(device: str, dtype: str) -> tuple[str, str]:
    chosen = resolve_device(device)
    return chosen.type, str(resolve_dtype(dtype, chosen)).removeprefix("torch.")


def _absolute(config: Config) -> dict[str, Any]:
    """Return the options with the absolute paths of the files that a run reads again when it is
    resumed, perhaps from another folder."""

    def absolute(name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(absolute(name, x) for x in value)
        if isinstance(value, Path):
            return value.absolute()
        if name == "model" and value and not value.startswith(HUB):
            return str(Path(value).absolute())
        return absolute_function(value) if name in NAMES_CODE and value else value

    others = ("out", "resume", "config")
    return {name: absolute(name, x) for name, x in config.values().items() if name not in others}


def _new_folder(config: Config, ranks: Ranks) -> Path:
    """Return the folder of the run; raise InputError where a new run would write over another."""
    if config.run.resume is not None:
        return config.run.resume
    name = f"{short_name(config.chosen.objective)}-{time.strftime('%Y%m%d-%H%M%S')}"
    # with a number where a run of the same second has the folder
    free = (Path("runs", f"{name}-{i}" if i else name) for i in itertools.count())
    out = config.run.out or next(path for path in free if not path.exists())
    if not ranks.is_first:  # the first alone writes; the others may come after it has begun
        return out
    try:
        left_by_a_kill = {"lock", temporary_path(out / "config.json").name}
        is_free = not out.exists() or (ended_before_first_step(out) and not is_locked(out))
        if is_free or {path.name for path in out.iterdir()} <= left_by_a_kill:
            return out
    except OSError as error:  # of what is no folder, or cannot be read
        raise InputError(f"--out must be a folder that can be read: {error}", "out") from error
    is_run = (out / "config.json").exists()
    what = f"another run; --resume {out} resumes it" if is_run else "something else"
    raise InputError(f"--out must be a new or empty folder, got {out}, which holds {what}", "out")
