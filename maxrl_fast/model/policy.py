"""The initial policy of a run: a new decoder, or a checkpoint that fits the task."""

import importlib.util
from pathlib import Path
from typing import Any

import torch

from maxrl_fast.errors import InputError, UnsupportedModelError
from maxrl_fast.model.checkpoint import load_checkpoint, read_config
from maxrl_fast.model.decoder import Decoder, DecoderConfig
from maxrl_fast.model.huggingface_checkpoint import load_huggingface, read_huggingface
from maxrl_fast.model.policy_model import PolicyModel, PolicySizes, find_nonfinite
from maxrl_fast.runtime.device import memory_bytes


def new_policy(*, seed: int, is_empty: bool = False, **sizes: Any) -> Decoder:
    """Return a decoder of the Qwen2 architecture, on the CPU in float32, or the meta device."""
    try:
        config = DecoderConfig(**sizes)
    except ValueError as error:
        raise InputError(str(error)) from error
    if is_empty:
        return Decoder.empty(config, "meta")
    wanted, memory = 4 * Decoder.count(config), memory_bytes(torch.device("cpu"))
    if wanted > memory:
        raise InputError(
            f"a new policy of these sizes has {wanted / 1e9:,.0f} GB of weights, this machine "
            f"{memory / 1e9:,.0f} GB"
        )
    model = Decoder(config)
    model.initialise(seed)
    return model


def backend_of(directory: Path, wanted: str = "auto") -> str:
    if wanted != "auto":
        return wanted
    try:
        read_config(directory / "config.json")
    except UnsupportedModelError as error:
        if importlib.util.find_spec("transformers") is None:
            raise InputError(f"{error}; for other models: pip install transformers") from error
        read_huggingface(directory)
        return "transformers"
    return "native"


def read_sizes(directory: Path) -> PolicySizes:
    if backend_of(directory) == "native":
        return read_config(directory / "config.json")
    return read_huggingface(directory)[1]


def load_policy(
    directory: Path,
    *,
    task: str,
    vocab_size: int,
    prompt_length: int,
    max_new_tokens: int,
    backend: str = "auto",
    is_empty: bool = False,
) -> PolicyModel:
    """Return the policy of a checkpoint directory, on the CPU in float32, or the meta device if
    `is_empty`, for which it need not have weights. prompt_length: of the longest prompt."""
    if backend_of(directory, backend) == "native":
        model: PolicyModel = load_checkpoint(directory, is_empty)
    else:
        model = load_huggingface(directory, prompt_length + max_new_tokens, is_empty)
    if not is_empty and (name := find_nonfinite(dict(model.named_parameters()))):
        raise InputError(f"{directory} has NaN or infinite numbers in the weight {name}")
    if model.config.vocab_size != vocab_size:
        raise InputError(
            f"task {task} needs a vocabulary of {vocab_size}, {directory} has "
            f"{model.config.vocab_size}"
        )
    check_positions(model, directory, prompt_length, max_new_tokens)
    return model


def check_positions(
    model: PolicyModel, directory: Path, prompt_length: int, max_new_tokens: int
) -> None:
    positions, longest = model.config.max_position_embeddings, prompt_length + max_new_tokens
    if positions < longest:
        raise InputError(
            f"prompts of {prompt_length} and responses of {max_new_tokens} tokens need {longest} "
            f"positions, {directory} has {positions} (--max-prompt-tokens, --max-new-tokens)"
        )
