"""Builds the task, the policy, its teacher and its rollout engine."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from maxrl_fast.config.options import Config, EvaluationConfig
from maxrl_fast.errors import InputError
from maxrl_fast.job.run_files import Saved
from maxrl_fast.model import checkpoint
from maxrl_fast.model.checkpoint import HUB, directory_of, find_model
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.linear import add_adapters
from maxrl_fast.model.policy import backend_of, check_positions, load_policy, new_policy
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.model.tokenizer import load_tokenizer
from maxrl_fast.rewards.options import Reward
from maxrl_fast.rollout import CheckedEngine, Engine
from maxrl_fast.rollout.native import native_engine
from maxrl_fast.rollout.vllm import vllm_engine
from maxrl_fast.runtime.files import read_json
from maxrl_fast.runtime.loading import OBJECT, build_from_code, lost_object
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.dataset import DatasetTask
from maxrl_fast.tasks.dataset_specs import GYM, is_plugin
from maxrl_fast.tasks.gym import GymTask
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.tasks.text_codec import TextTask
from maxrl_fast.tasks.tools import ToolTask
from maxrl_fast.training.teacher import names_asked


def find_policy(config: Config, ranks: Ranks, warn: Callable[[str], None]) -> Config:
    """Return the configuration with --model and --reference resolved to a folder or a hub commit,
    the same on all ranks."""
    if not ranks.is_first:  # which alone shows a download's progress
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    found, model = dict[str, str](), config.model.model
    if model and config.run.resume is not None and not model.startswith(HUB):
        # a resumed run has its own checkpoints
        found["model"], model = str(Path(model).absolute()), None
    for option, name in (("model", model), ("reference", config.loss.reference)):
        if name is not None:
            what = f"--{option} must be the folder of a checkpoint"
            found[option] = ranks.values(find_model(name, warn, what) if ranks.is_first else "")[0]
    return config.replace(**found)


def build_policy(
    config: Config, task: Task, saved: Saved | None = None, is_empty: bool = False
) -> PolicyModel:
    """Build the policy on the CPU, in float32, with adapters if requested; with `is_empty` its
    weights stay on the meta device. Of `saved` our decoder loads the weights later."""
    options, limit = config.model, config.sampling.max_new_tokens
    start = saved.directory if saved else options.directory
    model: PolicyModel
    if start is None:
        positions = max(512, task.prompt_length + limit)
        model = new_policy(options, task.vocab_size, positions, config.run.seed, is_empty)
    elif saved and backend_of(start, options.model_backend) == "native":
        model = Decoder.empty(checkpoint.read_config(start / "config.json"))
        check_positions(model, start, task.prompt_length, limit)
    else:
        if options.model is not None and not (saved or is_empty):
            start = directory_of(options.model, with_weights=True)
        model = load_model(start, config, task, backend=options.model_backend, is_empty=is_empty)
    if options.lora_rank:
        adapters = options.lora_rank, options.lora_alpha, options.lora_targets
        add_adapters(model, *adapters, config.run.seed)
    # checkpoints have the weights that were sampled from, not their rounding to a narrower dtype
    dtype = torch.promote_types(checkpoint.DTYPES[model.config.dtype], config.run.where[1])
    model.config = dataclasses.replace(model.config, dtype=str(dtype).removeprefix("torch."))
    model.checkpoint_activations = config.optimizer.checkpoint_activations
    return model


def build_reference(config: Config, task: Task, is_empty: bool = False) -> PolicyModel | None:
    """Return the frozen checkpoint of --reference, on the CPU in the compute dtype, if there is
    one; on the meta device if `is_empty`."""
    if config.loss.reference is None:
        return None
    directory = directory_of(config.loss.reference, with_weights=not is_empty)
    model = load_model(directory, config, task, is_empty=is_empty)
    if isinstance(task, TextTask):
        tokens, own = load_tokenizer(directory).get_vocab(), task.tokenizer.get_vocab()
    else:
        file, own = directory / "tokenizer.json", task.tokenizer_files().get("tokenizer.json")
        own = json.loads(own) if isinstance(own, bytes) else own
        tokens = read_json(file) if file.exists() else None
    if tokens != own:
        wanted = "must have the policy's tokenizer, got other tokens in"
        raise InputError(f"--reference {wanted} {directory}")
    for weight in model.parameters():
        if weight.dim() == 2:  # matrices; norms are computed in float32
            weight.data = weight.data.to(config.run.where[1])
    return model.requires_grad_(False)


def load_model(
    directory: Path, config: Config | EvaluationConfig, task: Task, **how: Any
) -> PolicyModel:
    how |= {"vocab_size": task.vocab_size, "prompt_length": task.prompt_length}
    limit = config.sampling.max_new_tokens
    return load_policy(directory, task=config.chosen.task, max_new_tokens=limit, **how)


def build_engine(
    config: Config | EvaluationConfig,
    model: PolicyModel,
    task: Task,
    dtype: torch.dtype,
    max_batch: int,
    ranks: Ranks | None = None,
) -> Engine:
    """Build the engine, with the model's weights. vLLM samples `max_batch` responses at once."""
    name, sampling = config.chosen.rollout, config.sampling
    offered: dict[str, Any] = {"model": model, "dtype": dtype, "max_batch": max_batch}
    offered["ranks"], cache = ranks or Ranks(), dict[str, Any]()
    if sampling.kv_cache_gb is not None:  # an engine of the user's may refuse it
        cache["cache_bytes"] = int(sampling.kv_cache_gb * 1e9)
    if name == "native":
        engine = native_engine(model, dtype, **cache)
        # refuses a cache that is too small
        engine.check_fits(task.prompt_length, sampling.max_new_tokens)
        return engine
    own = {**config.parts["rollout"], **cache}
    if name == "vllm":
        made: Engine = vllm_engine(filters_tokens=sampling.top_p < 1, **offered, **own)
    else:
        hint = "; it may have model, dtype, max_batch, ranks and cache_bytes"
        made = build_from_code("rollout", name, Engine, offered, own, hint)
    is_shared = own.get("vllm_tensor_parallel", 1) > 1
    return CheckedEngine(made, name, model.config.vocab_size, is_shared)


NO_REWARDS = Reward()


def build_run_task(config: Config, environment: type | None = None) -> Task:
    """Build the task; `environment` is a class of this process, by --environment's name."""
    return build_task(
        config.chosen.task,
        config.parts["task"],
        config.run.seed,
        config.model.directory,
        config.reward,
        environment=environment,
        max_new_tokens=config.sampling.max_new_tokens,
        needs_reward=config.chosen.objective != "distill"
        or bool(names_asked(config.loss.teacher_prompt)),
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
        raise lost_object("task", name)
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
    others |= {**own, "needs_reward": needs_reward and not rewards.reward}
    if own.get("environment"):
        return ToolTask(name, seed, model, rewards, environment, **others)
    return DatasetTask(name, seed, model, **others)
