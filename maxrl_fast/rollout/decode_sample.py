"""Sampling of every sample's next token on a GPU, in one launch of csrc/cuda/decode_sample.cu."""

import torch
from torch import Tensor

from maxrl_fast.ops import dispatch
from maxrl_fast.ops.dispatch import DEVICE_DTYPES, KernelLaunch
from maxrl_fast.rollout import Sampling


def has_kernel(sampling: Sampling, dtype: torch.dtype, device: torch.device) -> bool:
    """The kernel has no top-k, top-p or min-p."""
    return (
        not sampling.filters_tokens
        and dtype in DEVICE_DTYPES
        and dispatch.is_gpu(device)
        and dispatch.has_kernels(device)
    )


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
    rows: Tensor | None = None,
) -> None:
    """Sample one token per row as `sampling.sample` does, and append it to rows that are not done.

    logits: [A, V] float32, or [g, V] with `rows`. keys: [A] int64; with length they select the
    random numbers. stops: [V] bool. last, length, done: [A], updated in place. tokens, logprobs:
    [A, limit], written at column `length`. rows: [g n] int64: each n in turn are sampled from the
    same logits. None: all.
    """
    (count, size), (batch, limit), call = logits.shape, tokens.shape, KernelLaunch(logits.device)
    num_rows = batch if rows is None else len(rows)
    if count == 0 or num_rows % count:
        raise ValueError(
            f"the number of rows must be a multiple of the number of logits, got {num_rows} and "
            f"{count}"
        )
    call.launch(
        "decode_sample",
        num_rows=num_rows,
        vocab_size=size,
        limit=limit,
        logits=call.address("logits", logits, torch.float32, (count, size)),
        samples_per_logits=num_rows // count,
        rows=call.address("rows", rows, torch.int64, (num_rows,)),
        temperature=sampling.temperature,
        **call.addresses(torch.int64, batch, keys=keys, last=last, length=length),
        stops=call.address("stops", stops, torch.bool, (size,)),
        done=call.address("done", done, torch.bool, (batch,)),
        tokens=call.address("tokens", tokens, torch.int64, (batch, limit)),
        logprobs=call.address("logprobs", logprobs, torch.float32, (batch, limit)),
    )
