"""Small models for the tests."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.model.checkpoint import SHARD_BYTES, new_files, write_policy
from maxrl_fast.model.decoder import Decoder, DecoderConfig
from maxrl_fast.model.linear import add_adapters
from maxrl_fast.training.packing import MicroBatch
from maxrl_fast.training.passes import run_batch

TINY = DecoderConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    rope_theta=100.0,
)
ADAPTED = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
# of a short stream
TOKENS, POSITIONS = torch.tensor([3, 9, 0, 31, 7, 7]), torch.tensor([0, 4, 5, 6, 100, 511])


def save_checkpoint(
    directory: Path,
    config: DecoderConfig,
    weights: Iterable[tuple[str, Tensor]],
    files: Mapping[str, Any],
    stop_ids: tuple[int, ...],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_policy(
        directory, config.dtype, weights, {**new_files(config, stop_ids), **files}, shard_bytes
    )


def tiny_decoder(seed: int = 0, **changes: object) -> Decoder:
    """Return a decoder whose outputs are far from uniform: weights from N(0, 0.3^2), biases and
    norms from N(0.7, 0.2^2).
    """
    model = Decoder(dataclasses.replace(TINY, **changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise if parameter.dim() == 2 else 0.7 + 0.2 * noise)
    return model


def adapted(model: Decoder, targets: str = ADAPTED) -> Decoder:
    add_adapters(model, 3, 6.0, targets, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def response_logits(model: Decoder, batch: MicroBatch, dtype: torch.dtype) -> Tensor:
    """Return the logits [T, V] float32 that predict the batch's targets."""
    return model.logits(run_batch(model, batch, dtype))


def updated(learner, samples, advantages, sequences, *, when="step 1", lr, draw=(0, 0)):
    learner.forward_backward(samples, advantages, sequences, draw)
    return learner.optim_step(when=when, lr=lr)


def on_threads(*counts):
    """Yield for each number of threads, which PyTorch uses meanwhile."""
    threads = torch.get_num_threads()
    try:
        for count in counts:
            torch.set_num_threads(count)
            yield count
    finally:
        torch.set_num_threads(threads)
