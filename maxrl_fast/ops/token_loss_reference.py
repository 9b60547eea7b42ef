"""Log-probs of tokens in plain PyTorch: for tests, and for devices without a kernel."""

import torch
from torch import Tensor

from maxrl_fast.ops.token_batch import real_dtype


def token_logprobs_reference(
    logits: Tensor, targets: Tensor, temperature: float | Tensor
) -> tuple[Tensor, Tensor]:
    tau = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    log_p = torch.log_softmax(logits.to(real_dtype(logits.dtype)) / tau, -1)
    # A token masked out by -inf logits has p log p = 0, not NaN.
    entropy = -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy
