"""Builds the policy, its teacher and its rollout engine."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from maxrl_fast.config.options import Config, Decoding
from maxrl_fast.config.resolve import tensor_parallel
from maxrl_fast.config.rules import own_options
from maxrl_fast.errors import InputError
from maxrl_fast.job.build_task import make_part
from maxrl_fast.job.resume import Saved
from maxrl_fast.model.checkpoint import (
    DTYPES,
    StoredTensor,
    carried_tensors,
    kept_files,
    new_files,
)
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.hub import HUB, directory_of, find_model
from maxrl_fast.model.huggingface import HuggingFacePolicy
from maxrl_fast.model.linear import add_adapters
from maxrl_fast.model.policy import check_positions, load_policy, new_policy
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.model.tokenizer import load_tokenizer
from maxrl_fast.rollout import Engine, Sampling
from maxrl_fast.rollout.native import native_engine
from maxrl_fast.rollout.validation import CheckedEngine
from maxrl_fast.runtime.files import read_json
from maxrl_fast.runtime.loading import build_from_code
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.text_codec import TextTask, end_of
from maxrl_fast.training.logprob_parity import check_engine

CPU = torch.device("cpu")


def build_policy(
    config: Config, task: Task, saved: Saved | None = None, is_empty: bool = False
) -> PolicyModel:
    """Build the policy on the CPU, in float32, with adapters if requested.

    A resumed run loads the weights of `saved` later. With `is_empty` the weights stay on the meta
    device.
    """
    options, limit = config.model, config.sampling.max_new_tokens
    start = saved.directory if saved is not None else options.directory
    if options.model is not None and saved is None and not is_empty:
        start = directory_of(options.model, with_weights=True)
    model: PolicyModel
    if saved is not None and saved.decoder is not None:
        model = Decoder.empty(saved.decoder, "meta" if is_empty else CPU)
        check_positions(model, saved.directory, task.prompt_length, limit)
    elif start is not None:
        model = _load(start, config, task, backend=options.model_backend, is_empty=is_empty)
    else:
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
    if options.lora_rank:
        add_adapters(
            model, options.lora_rank, options.lora_alpha, options.lora_targets, config.run.seed
        )
    # checkpoints have the weights that were sampled from, not their rounding to a narrower dtype
    dtype = torch.promote_types(DTYPES[model.config.dtype], dtype_of(config))
    model.config = dataclasses.replace(model.config, dtype=str(dtype).removeprefix("torch."))
    model.checkpoint_activations = config.optimizer.checkpoint_activations
    return model


def build_reference(config: Config, task: Task, is_empty: bool = False) -> PolicyModel | None:
    """Return the frozen checkpoint of --reference, on the CPU in the compute dtype, if there is
    one; on the meta device if `is_empty`.
    """
    if config.loss.reference is None:
        return None
    directory = directory_of(config.loss.reference, with_weights=not is_empty)
    model = _load(directory, config, task, is_empty=is_empty)
    if _vocabulary(task) != _vocabulary(task, directory):
        raise InputError(
            f"--reference must have the policy's tokenizer, got other tokens in {directory}"
        )
    for weight in model.parameters():
        if weight.dim() == 2:  # matrices; norms are computed in float32
            weight.data = weight.data.to(dtype_of(config))
    return model.requires_grad_(False)


def _load(directory: Path, config: Config, task: Task, **how: Any) -> PolicyModel:
    how |= {"vocab_size": task.vocab_size, "prompt_length": task.prompt_length}
    limit = config.sampling.max_new_tokens
    return load_policy(directory, task=config.chosen.task, max_new_tokens=limit, **how)


def _vocabulary(task: Task, directory: Path | None = None) -> Any:
    """Return the tokens of a task, or of a checkpoint for it, in a form that can be compared."""
    if isinstance(task, TextTask):
        return (load_tokenizer(directory) if directory else task.tokenizer).get_vocab()
    name = "tokenizer.json"
    if directory is not None:
        return read_json(directory / name) if (directory / name).exists() else None
    content = task.tokenizer_files().get(name)
    return json.loads(content) if isinstance(content, bytes) else content


def build_policy_files(
    task: Task, model: PolicyModel, start: Path | None
) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return what checkpoints have besides the policy's weights: files by name, JSON contents or
    bytes, and tensors by name. The configuration is that of the checkpoint `start`; None: of a new
    policy."""
    files = task.tokenizer_files()
    if start is None:
        return {**files, **new_files(model.config, task.stop_ids)}, {}
    files = {**files, **kept_files(start, task.stop_ids, model.config.dtype)}
    return files, carried_tensors(start, model) if model.backend != "native" else {}


def dtype_of(config: Config) -> torch.dtype:
    return getattr(torch, config.run.dtype)


def find_policy(config: Config, ranks: Ranks, warn: Callable[[str], None]) -> Config:
    """Return the configuration with --model and --reference resolved to a folder or a hub commit,
    the same on all ranks.
    """
    found, wanted = {}, {"model": config.model.model, "reference": config.loss.reference}
    # a resumed run has its own checkpoints
    if wanted["model"] and config.run.resume is not None and not wanted["model"].startswith(HUB):
        wanted["model"] = None
    for option, name in wanted.items():
        if name is None:
            continue
        if not ranks.is_first:  # only the first rank shows a download's progress
            os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        what = f"--{option} must be the folder of a checkpoint"
        found[option] = ranks.values(find_model(name, warn, what) if ranks.is_first else "")[0]
    return config.replace(**found)


def _native(
    model: PolicyModel,
    dtype: torch.dtype,
    longest: tuple[int, int],
    cache_bytes: int | None = None,
) -> Engine:
    engine = native_engine(model, dtype, cache_bytes=cache_bytes)
    engine.check_fits(*longest)  # refuses a cache that is too small
    return engine


def _vllm(
    model: PolicyModel,
    dtype: torch.dtype,
    ranks: Ranks,
    filters_tokens: bool,
    max_batch: int,
    vllm_url: str | None,
    vllm_tensor_parallel: int,
    cache_bytes: int | None = None,
) -> Engine:
    how: dict[str, Any] = {"ranks": ranks, "filters_tokens": filters_tokens}
    if vllm_url is not None:
        from maxrl_fast.rollout.vllm_server import VllmServerEngine

        return VllmServerEngine(model, dtype, vllm_url, **how)
    from maxrl_fast.rollout.vllm import VllmEngine  # not installed everywhere

    how |= {"max_batch": max(max_batch, 256), "tensor_parallel": vllm_tensor_parallel}
    return VllmEngine(model, dtype, cache_bytes=cache_bytes, **how)


ENGINES: dict[str, Callable[..., Engine]] = {"native": _native, "vllm": _vllm}


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
    if sampling.kv_cache_gb is not None:  # an engine of the user's may refuse it
        own = {**own, "cache_bytes": int(sampling.kv_cache_gb * 1e9)}
    offered = {"model": model, "dtype": dtype, "max_batch": max_batch, "ranks": ranks or Ranks()}
    if name not in ENGINES:
        hint = "; it may have model, dtype, max_batch, ranks and cache_bytes"
        engine = build_from_code("rollout", name, Engine, offered, own, hint)
    else:
        offered |= {"filters_tokens": sampling.top_p < 1}
        offered |= {"longest": (task.prompt_length, sampling.max_new_tokens)}
        engine = make_part(ENGINES[name], offered, own)
    return engine if name == "native" else CheckedEngine(engine, name, model.config.vocab_size)


def compare_engine(model: PolicyModel, engine: Engine, name: str) -> str:
    """Return a sentence on how far an engine's log-probs are from the policy's; "" for engines that
    tests cover.

    vLLM is compared only for transformers policies, a custom engine always.
    """
    if name not in ENGINES:
        engine.load_weights(model)
    elif name == "native" or not isinstance(model, HuggingFacePolicy):
        return ""
    return check_engine(model, engine, name)


def build_run_engine(
    config: Config, model: PolicyModel, task: Task, ranks: Ranks | None = None
) -> Engine:
    processes = 1 if ranks is None else ranks.size
    max_batch = config.sampling.samples_of_engine(processes, tensor_parallel(config))
    name, own = config.chosen.rollout, own_options(config, "rollout")
    how = dtype_of(config), max_batch, ranks
    return build_engine(name, own, config.sampling, model, task, *how)


def build_sampling(config: Config, task: Task) -> Sampling:
    options = config.sampling
    limits = options.temperature, options.max_new_tokens, task.stop_ids
    return Sampling(*limits, top_p=options.top_p, end_of=end_of(task))
