"""The statistics of rows of logits in plain PyTorch: for tests, and for devices without a kernel."""

import math

import torch
from torch import Tensor

from maxrl_fast.ops.token_batch import real_dtype
from maxrl_fast.ops.token_loss_reference import token_logprobs_reference


def row_statistics_reference(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, top_k: int, min_p: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of ops.RowStatistics."""
    logprobs, entropy = token_logprobs_reference(logits, targets, temperature)
    tau = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    log_p = torch.log_softmax(logits.to(real_dtype(logits.dtype)) / tau, -1)
    # Not topk, which may return any of equal logits; sort with `stable` returns the lower token first.
    top_tokens = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_k]
    top_logprobs = log_p.gather(-1, top_tokens)
    is_kept = ~(log_p < top_logprobs[:, :1] + math.log(min_p))  # NaN too
    log_mass = torch.where(is_kept, log_p, -math.inf).logsumexp(-1).clamp_max(0)
    return logprobs, entropy, top_tokens, top_logprobs, log_mass
