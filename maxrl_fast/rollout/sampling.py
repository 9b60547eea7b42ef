"""Tokens sampled from rows of logits in plain PyTorch; csrc/cpu/sample.cpp does the same for the C++ decoder."""

import torch
from torch import Tensor

from maxrl_fast.rollout import Sampling


def sample(logits: Tensor, u: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling in the order of the vocabulary.

    Shapes: logits [A, V] float32, u [A] in [0, 1) -> tokens [A] int64, their log-probs [A] under what they were sampled from,
    0 at temperature 0. Waits for nothing on the device.
    """
    if sampling.temperature == 0:
        token = logits.argmax(-1)
        log_p = torch.log_softmax(logits, -1).gather(-1, token[:, None])[:, 0]
        return token, torch.where(log_p.isfinite(), 0.0, log_p)  # logits that are not finite must show
    log_p = torch.log_softmax(logits / sampling.temperature, -1)
    if sampling.leaves_out:
        log_p = _renormalised(log_p, sampling)
    cdf = log_p.exp().cumsum(-1)
    token = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True).clamp_max(logits.shape[-1] - 1)
    return token[:, 0], log_p.gather(-1, token)[:, 0]


def _renormalised(log_p: Tensor, sampling: Sampling) -> Tensor:
    """log_p [A, V] of the tokens that the sampling keeps, normalised again, and -inf for the others."""
    ordered, order = log_p.sort(dim=-1, descending=True, stable=True)
    p = ordered.exp()
    rank = torch.arange(p.shape[-1], device=p.device)
    kept = rank < sampling.top_k if sampling.top_k else rank >= 0
    p = p * kept
    before = p.cumsum(-1) - p
    kept = kept & ((before < sampling.top_p * p.sum(-1, keepdim=True)) | (rank == 0))
    kept = kept & (p >= sampling.min_p * p[:, :1])
    mask = torch.zeros_like(kept).scatter(-1, order, kept)
    return torch.log_softmax(log_p.masked_fill(~mask, float("-inf")), -1)
