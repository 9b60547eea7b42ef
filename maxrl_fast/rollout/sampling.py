"""Sampling of tokens from logits in plain PyTorch; csrc/cpu/sample.h does the same in C++."""

import torch
from torch import Tensor

from maxrl_fast.rollout import Sampling

# rows that are filtered at a time on a GPU, and the bytes for each of their logits, with the sort's
ROWS, LOGIT_BYTES = 128, 48


def sample(logits: Tensor, u: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Sample tokens of each row by inverting its CDF in vocabulary order; does not wait for the
    device.

    logits: [A, V] float32. u: [A, n] uniform random numbers in [0, 1). Returns tokens [A, n] int64
    and their log-probs [A, n] under the whole distribution at the temperature, before the filters;
    0 at temperature 0.
    """
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
    """Apply top-k, top-p and min-p to log-probs [A, V] and renormalise; excluded tokens get
    -inf."""
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
