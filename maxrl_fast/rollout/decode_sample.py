"""Sampling of the next token of every sample on a GPU, in one launch of csrc/cuda/decode_sample.cu."""

import torch
from torch import Tensor

from maxrl_fast.ops import _gate
from maxrl_fast.ops._gate import Call
from maxrl_fast.rollout import Sampling


def has_kernel(sampling: Sampling, device: torch.device) -> bool:
    """Return whether the CUDA kernel can sample so; it supports no top-k, top-p or min-p."""
    return not sampling.filters_tokens and _gate.is_gpu(device) and _gate.has_kernels(device)


def sample_and_append(
    logits: Tensor,
    sampling: Sampling,
    keys: Tensor,
    stops: Tensor,
    last: Tensor,
    length: Tensor,
    done: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
) -> None:
    """Sample one token per row as `sampling.sample` does, and append it to the rows that are not done.

    Args:
        logits: [A, V] float32.
        keys: [A] int64; with length they select the uniform random numbers.
        stops: [V] bool, the tokens that end a response.
        last, length, done: [A], updated in place: newest token, number of tokens, whether the response has ended.
        tokens, logprobs: [A, limit], written in place at column `length`.
    """
    (batch, size), limit, call = logits.shape, tokens.shape[1], Call(logits.device)
    call.launch(
        "decode_sample",
        num_rows=batch,
        vocab_size=size,
        limit=limit,
        logits=call.address("logits", logits, torch.float32, (batch, size)),
        temperature=sampling.temperature,
        keys=call.address("keys", keys, torch.int64, (batch,)),
        stops=call.address("stops", stops, torch.bool, (size,)),
        last=call.address("last", last, torch.int64, (batch,)),
        length=call.address("length", length, torch.int64, (batch,)),
        done=call.address("done", done, torch.bool, (batch,)),
        tokens=call.address("tokens", tokens, torch.int64, (batch, limit)),
        logprobs=call.address("logprobs", logprobs, torch.float32, (batch, limit)),
    )
