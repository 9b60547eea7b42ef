"""The tokens that the loss lp_reg protects, by their log-probs.

Huang et al. 2025, "Low-probability Tokens Sustain Exploration in Reinforcement Learning with Verifiable Reward" (arXiv
2510.03222), and the authors' code.
"""

import math

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import check_number, check_tensor


def lp_reg_proxies(
    log_proxy: Tensor, logprobs: Tensor, advantages: Tensor, mask: Tensor | None = None, *, share: float = 0.01
) -> Tensor:
    """Return the token_statistics of the loss lp_reg: log_proxy for protected tokens, minus infinity for others.

    Of the tokens with a negative advantage the share with the lowest log-probs is protected; of equal log-probs the first ones.

    Args:
        log_proxy: [T], `row_statistics(...).log_proxy(min_p)` of the sampling policy.
        logprobs: [T] of the sampling policy, of the whole batch over which the tokens are to be chosen.
        advantages: [T], one per token.
        mask: [T] bool, False for tokens that do not count, whose other values may be anything.
        share: of the tokens that count and have a negative advantage, above 0 and at most 1, rounded down to a number of
            tokens, which may be 0.

    Returns:
        [T] like log_proxy. On a GPU the host waits for the number of tokens with a negative advantage.

    Raises:
        ValueError, TypeError: if shapes, devices or the share do not fit.
    """
    share = check_number("share", share, "a number above 0 and at most 1", lambda x: 0 < x <= 1)
    check_tensor("log_proxy", log_proxy)
    given = {"logprobs": logprobs, "advantages": advantages} | ({} if mask is None else {"mask": mask})
    for name, values in given.items():
        check_tensor(name, values, log_proxy.device, "log_proxy is")
        if log_proxy.dim() != 1 or values.shape != log_proxy.shape:
            shapes = f"{tuple(values.shape)} and {tuple(log_proxy.shape)}"
            raise ValueError(f"{name} and log_proxy must be [T], got the shapes {shapes}")
    is_negative = advantages < 0
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"mask must be bool, got {mask.dtype}")
        is_negative = is_negative & mask
    count = int(round(share * int(is_negative.sum()), 6))  # .29 x 100 is 28.999999999999996
    lowest = logprobs.detach().masked_fill(~is_negative, math.inf).argsort(stable=True)[:count]
    log_proxy = log_proxy.detach()
    return torch.full_like(log_proxy, -math.inf).index_copy(0, lowest, log_proxy[lowest])
