"""The initial policy of a run: a new decoder, or a checkpoint that fits the task."""

from pathlib import Path

import torch

from maxrl_fast.errors import InputError
from maxrl_fast.hardware import memory_bytes
from maxrl_fast.model.checkpoint import load_checkpoint
from maxrl_fast.model.decoder import Decoder, DecoderConfig


def new_policy(
    *,
    vocab_size: int,
    positions: int,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    rope_theta: float,
    seed: int,
) -> Decoder:
    """Return a new decoder of the Qwen2 architecture, on the CPU in float32.

    Raises:
        InputError: if the sizes are invalid or the weights exceed this machine's memory.
    """
    try:
        sizes = DecoderConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=hidden_size // heads,
            max_position_embeddings=positions,
            rope_theta=rope_theta,
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    wanted, memory = 4 * Decoder.count(sizes), memory_bytes(torch.device("cpu"))
    if wanted > memory:
        raise InputError(
            f"a new policy of these sizes has {wanted / 1e9:,.0f} GB of weights, this machine {memory / 1e9:,.0f} GB"
        )
    model = Decoder(sizes)
    model.initialise(seed)
    return model


def load_policy(directory: Path, *, task: str, vocab_size: int, prompt_length: int, max_new_tokens: int) -> Decoder:
    """Return the policy of a checkpoint directory, on the CPU in float32.

    Args:
        task: name of the task, for error messages.
        prompt_length: length of the longest prompt, in tokens.

    Raises:
        InputError: if it cannot be read, its vocabulary is not the task's, or it has too few positions.
    """
    model = load_checkpoint(directory)
    if model.config.vocab_size != vocab_size:
        raise InputError(f"task {task} needs a vocabulary of {vocab_size}, {directory} has {model.config.vocab_size}")
    longest = prompt_length + max_new_tokens
    if model.config.max_position_embeddings < longest:
        raise InputError(
            f"prompts of {prompt_length} and responses of {max_new_tokens} tokens need {longest} "
            f"positions, {directory} has {model.config.max_position_embeddings}"
        )
    return model
