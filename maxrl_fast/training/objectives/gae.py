"""Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438)."""

import torch
from torch import Tensor

_EPS = 1e-8  # added to the variance, as in verl
_ROUNDING = 1e-12  # relative, of sums of squares in float64


def gae_advantages(
    values: Tensor, rewards: Tensor, cu_seqlens: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Return the advantage of every token, float64 [T].

    The reward r is given at each response's last token. The value after it is 0, also if the
    response was truncated:

        delta_t = r_t + gamma V_{t+1} - V_t,  A_t = sum_l (gamma gae_lambda)^l delta_{t+l}  (eqs. 11
        and 16).

    Args:
        values: [T], V of the state before each token.
        rewards: [S].
        cu_seqlens: int64 [S+1] of the responses, which may be empty.
        gamma, gae_lambda: in [0, 1].
    """
    lengths, size = cu_seqlens.diff(), len(values)
    # [T] number of later tokens in the same response
    tokens_left = (
        cu_seqlens[1:].repeat_interleave(lengths, output_size=size)
        - 1
        - torch.arange(size, device=values.device)
    )
    values, is_last = values.double(), tokens_left == 0
    given = rewards.double().repeat_interleave(lengths, output_size=size)
    sums = torch.where(is_last, given, gamma * values.roll(-1)) - values  # [T], delta_t
    # Each round doubles the terms of a token's sum by adding the sum of the token `shift` places
    # later.
    longest = int(lengths.max()) if size else 0
    shift, factor = 1, gamma * gae_lambda
    while shift < longest:
        sums = sums + torch.where(tokens_left >= shift, factor * sums.roll(-shift), 0.0)
        shift, factor = 2 * shift, factor * factor
    return sums


def whitened(advantages: Tensor, counts: Tensor) -> Tensor:
    """Scale advantages [T] to mean 0 and sample variance 1 over the tokens in `counts`, bool [T].
    Other tokens get 0, and so does a single counted token."""
    number = counts.sum()
    mean = torch.where(counts, advantages, 0.0).sum() / number.clamp_min(1)
    centred = torch.where(counts, advantages - mean, 0.0)
    return centred * (centred.square().sum() / (number - 1).clamp_min(1) + _EPS).rsqrt()


def explained_variance(values: Tensor, returns: Tensor, counts: Tensor) -> Tensor:
    """Return 1 - Var(returns - values) / Var(returns), float64, over the tokens in `counts`, bool
    [T]; 0 if the returns are equal up to rounding."""
    number = counts.sum().clamp_min(1)

    def squares(x: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        return torch.where(counts, x.double() - shift, 0.0).square().sum()

    def deviations(x: Tensor) -> Tensor:
        return squares(x, torch.where(counts, x.double(), 0.0).sum() / number)

    total = deviations(returns)
    explained = 1 - deviations(returns.double() - values.double()) / total
    return torch.where(total > _ROUNDING * squares(returns), explained, 0.0)
