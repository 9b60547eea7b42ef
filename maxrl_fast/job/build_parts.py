"""Builds the task and what scores it, the policy, its teacher and its rollout engine."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from maxrl_fast.config.options import Config, Decoding, EvaluationConfig
from maxrl_fast.errors import InputError
from maxrl_fast.job.run_files import Saved
from maxrl_fast.model import checkpoint
from maxrl_fast.model.checkpoint import HUB, directory_of, find_model
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.linear import add_adapters
from maxrl_fast.model.policy import backend_of, check_positions, load_policy, new_policy
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.model.tokenizer import load_tokenizer
from maxrl_fast.rewards import RewardSource, WeightedRewards
from maxrl_fast.rewards.models import Classifier
from maxrl_fast.rewards.options import Reward
from maxrl_fast.rewards.pool import RewardOutput, RewardPool, UserCode
from maxrl_fast.rollout import CheckedEngine, Engine
from maxrl_fast.rollout.native import native_engine
from maxrl_fast.runtime.files import read_json
from maxrl_fast.runtime.loading import CLASSIFIER, build_from_code
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.dataset import DatasetTask
from maxrl_fast.tasks.dataset_specs import GYM, OBJECT, is_plugin, lost_object
from maxrl_fast.tasks.gym import GymTask
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.tasks.text_codec import TextTask
from maxrl_fast.tasks.tools import ToolTask
from maxrl_fast.training.teacher import names_asked

PolicyFiles = tuple[dict[str, Any], dict[str, checkpoint.StoredTensor]]


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
        model = new_policy(
            vocab_size=task.vocab_size,
            max_position_embeddings=max(512, task.prompt_length + limit),
            hidden_size=options.hidden_size,
            intermediate_size=options.intermediate_size,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            num_key_value_heads=options.kv_heads,
            head_dim=options.hidden_size // options.heads,
            rope_theta=options.rope_theta,
            seed=config.run.seed,
            is_empty=is_empty,
        )
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


def build_policy_files(task: Task, model: PolicyModel, start: Path | None) -> PolicyFiles:
    """Return files by name, JSON contents or bytes, and tensors by name. The configuration is that
    of the checkpoint `start`; None: of a new policy."""
    files = task.tokenizer_files()
    if start is None:
        return {**files, **checkpoint.new_files(model.config, task.stop_ids)}, {}
    files = {**files, **checkpoint.kept_files(start, task.stop_ids, model.config.dtype)}
    return files, checkpoint.carried_tensors(start, model) if model.backend != "native" else {}


def build_engine(
    name: str,
    own: Mapping[str, Any],
    sampling: Decoding,
    model: PolicyModel,
    task: Task,
    dtype: torch.dtype,
    max_batch: int,
    ranks: Ranks | None = None,
) -> Engine:
    """Build the engine `name`, with its own options and the model's weights. vLLM samples
    `max_batch` responses at once."""
    cache, number = dict[str, Any](), 1
    if sampling.kv_cache_gb is not None:  # an engine of the user's may refuse it
        cache["cache_bytes"] = int(sampling.kv_cache_gb * 1e9)
    how: dict[str, Any] = {"ranks": ranks or Ranks()}
    if name == "native":
        engine = native_engine(model, dtype, **cache)
        # refuses a cache that is too small
        engine.check_fits(task.prompt_length, sampling.max_new_tokens)
        return engine
    if name != "vllm":
        offered = {"model": model, "dtype": dtype, "max_batch": max_batch, **how}
        hint = "; it may have model, dtype, max_batch, ranks and cache_bytes"
        made = build_from_code("rollout", name, Engine, offered, {**own, **cache}, hint)
    else:
        from maxrl_fast.rollout import vllm  # of which few runs need anything

        how["filters_tokens"] = sampling.top_p < 1
        if (url := own["vllm_url"]) is not None:
            made = vllm.VllmServerEngine(model, dtype, url, **how)
        else:
            how |= {"max_batch": max(max_batch, 256), **cache}
            number = own["vllm_tensor_parallel"]
            made = vllm.VllmEngine(model, dtype, tensor_parallel=number, **how)
    return CheckedEngine(made, name, model.config.vocab_size, number > 1)


CPU, NO_REWARDS = torch.device("cpu"), Reward()


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
