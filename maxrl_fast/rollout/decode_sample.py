"""The next token of every row on a GPU, sampled and written down in one launch of csrc/cuda/decode_sample.cu."""

import torch
from torch import Tensor

from maxrl_fast.ops import _gate
from maxrl_fast.ops._gate import address
from maxrl_fast.rollout import Sampling


def has_kernel(sampling: Sampling, device: torch.device) -> bool:
    """Whether it samples so: from all of the vocabulary."""
    return not sampling.leaves_out and _gate.is_gpu(device) and _gate.has_kernels(device)


def sample_and_take(
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
    """Sample from logits [A, V] float32 as `sampling.sample` does with the uniform numbers of keys [A] at length [A], and
    change last, length, done [A] and number `length` of tokens and logprobs [A, limit] where done is False.

    stops [V] bool: the tokens that end a row.
    """
    (rows, size), limit, device = logits.shape, tokens.shape[1], logits.device
    _gate.launch(
        "decode_sample",
        device,
        num_rows=rows,
        vocab_size=size,
        limit=limit,
        logits=address("logits", logits, torch.float32, (rows, size), device),
        temperature=sampling.temperature,
        keys=address("keys", keys, torch.int64, (rows,), device),
        stops=address("stops", stops, torch.bool, (size,), device),
        last=address("last", last, torch.int64, (rows,), device),
        length=address("length", length, torch.int64, (rows,), device),
        done=address("done", done, torch.bool, (rows,), device),
        tokens=address("tokens", tokens, torch.int64, (rows, limit), device),
        logprobs=address("logprobs", logprobs, torch.float32, (rows, limit), device),
    )
