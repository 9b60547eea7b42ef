"""Sampling from logits, in PyTorch and in csrc/cuda/decode_sample.cu; csrc/cpu/sample.h does the
same."""

import torch
from torch import Tensor

from maxrl_fast.ops import dispatch
from maxrl_fast.ops.dispatch import DEVICE_DTYPES, KernelLaunch
from maxrl_fast.rollout import Sampling

# rows that are filtered at a time on a GPU, and the bytes for each of their logits, with the sort's
ROWS, LOGIT_BYTES = 128, 48


def sample(logits: Tensor, u: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Sample tokens by inverting the CDF of each row of logits [A, V] float32 in vocabulary order,
    for numbers u [A, n] in [0, 1); does not wait for the device. Returns tokens [A, n] int64 and
    their log-probs under the whole distribution at the temperature; 0 at temperature 0."""
    if sampling.temperature == 0:
        token = logits.argmax(-1, keepdim=True).expand_as(u)
        log_p = torch.log_softmax(logits, -1).gather(-1, token)
        # logits that are not finite must show
        return token, torch.where(log_p.isfinite(), 0.0, log_p)
    logits = logits if sampling.temperature == 1 else logits / sampling.temperature
    log_p = torch.log_softmax(logits, -1)
    kept = filtered_logprobs(log_p, sampling) if sampling.filters_tokens else log_p
    cdf = kept.exp().cumsum(-1)  # [A, V]
    token = torch.searchsorted(cdf, u * cdf[:, -1:], right=True).clamp_max(logits.shape[-1] - 1)
    return token, log_p.gather(-1, token)


def filtered_logprobs(log_p: Tensor, sampling: Sampling) -> Tensor:
    """Apply top-k, top-p and min-p to log-probs [A, V]; excluded tokens get -inf."""
    ordered, order = log_p.sort(dim=-1, descending=True, stable=True)  # [A, V]
    p = ordered.exp()
    rank = torch.arange(p.shape[-1], device=p.device)  # [V]
    kept = rank < sampling.top_k if sampling.top_k else rank >= 0
    p = p * kept
    before = p.cumsum(-1) - p  # [A, V], the probability of more probable tokens
    kept = kept & ((before < sampling.top_p * p.sum(-1, keepdim=True)) | (rank == 0))
    kept = kept & (p >= sampling.min_p * p[:, :1])
    mask = torch.zeros_like(kept).scatter(-1, order, kept)
    return torch.log_softmax(log_p.masked_fill(~mask, float("-inf")), -1)


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
    """`sample` one token per row in a kernel, and append it to rows that are not done. logits: [A,
    V] float32, or [g, V] with `rows` [g n] int64, of which each n share logits. keys [A] int64 and
    length select the random numbers. stops: [V] bool. last, length, done: [A], and tokens, logprobs
    [A, limit] at column `length` are updated in place."""
    (count, size), (batch, limit), call = logits.shape, tokens.shape, KernelLaunch(logits.device)
    num_rows = batch if rows is None else len(rows)
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
