"""Numbers of tokens for the losses that take token_statistics, in tests that run every loss."""

import math

import torch

from maxrl_fast.ops import LOSSES


def statistics_for(loss: str, num_tokens: int, chosen: bool = True) -> dict[str, torch.Tensor]:
    """Return the arguments token_statistics and top_tokens of the losses that take them.

    Args:
        chosen: whether every third token is treated differently, or none.
    """
    if LOSSES[loss].statistic is None:
        return {}
    is_chosen = torch.arange(num_tokens) % 3 == (1 if chosen else 3)
    statistics = torch.where(is_chosen, -1.0, -math.inf) if loss == "lp_reg" else is_chosen.float()
    top_tokens = {"top_tokens": torch.zeros(num_tokens, 3, dtype=torch.int64)} if LOSSES[loss].top_tokens else {}
    return {"token_statistics": statistics, **top_tokens}
