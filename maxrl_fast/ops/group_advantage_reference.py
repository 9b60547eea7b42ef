"""The group advantages in plain PyTorch: for tests, and for devices without a kernel."""

import torch
from torch import Tensor

from maxrl_fast.ops.estimators import KERNEL_ROWS, Estimator
from maxrl_fast.ops.groups import padded

_RATIOS = ("std", "length_std", "mean")  # scales that are 1 over a moment


def result_dtype(rewards: Tensor) -> torch.dtype:
    """Return the dtype of the advantages: the dtype of the rewards if it is floating, else float32."""
    return rewards.dtype if rewards.is_floating_point() else torch.float32


def group_advantage_reference(
    rewards: Tensor,
    offsets: Tensor | None,
    order: Tensor | None,
    valid: Tensor | None,
    lengths: Tensor | None,
    estimator: str,
    parameter: float,
    eps: float,
    ddof: int,
    gain: float,
    bias: float,
    max_group_size: int,
) -> Tensor:
    """Return what the operator returns, computed in float64, for all groups of one size at a time."""
    row = KERNEL_ROWS[estimator]
    flat = rewards.flatten().double()
    index, exists = padded(tuple(rewards.shape), offsets, order, valid, rewards.device)
    index = index.gather(1, (~exists).to(torch.uint8).argsort(dim=1, stable=True))  # valid rollouts first
    counts = exists.sum(1)
    out = torch.zeros_like(flat)
    for n in counts.unique().tolist():
        if n:
            places = index[counts == n, :n]
            weights = None if lengths is None else lengths.flatten()[places].double()
            out[places] = _evaluate(row, flat[places], weights, parameter, eps, ddof, gain) + bias
    return out.to(result_dtype(rewards)).view(rewards.shape)


def _safe_scale(row: Estimator, r: Tensor, eps: float) -> Tensor:
    """Return the power of two for each group [G, 1] that safe_scale of csrc/group_advantage.h returns."""
    largest = r.abs().amax(1, keepdim=True)
    scale = torch.ones_like(largest)
    if row.value == "rank" or (row.value == "reward" and (row.baseline != "zero" or row.scale in _RATIOS)):
        scale = torch.where(largest > 2.0**480, 2.0**-544, scale)
        scale = torch.where((largest > 0) & (largest < 2.0**-400) & (eps < 1), 2.0**600, scale)
    return scale


def _evaluate(
    row: Estimator, r: Tensor, lengths: Tensor | None, parameter: float, eps: float, ddof: int, gain: float
) -> Tensor:
    """Return gain (v - baseline) multiplier of rewards [G, n], float64; NaN in groups with unusable rewards."""
    n = r.shape[1]
    unusable = (~r.isfinite() | ((r != 0) & (r != 1) & row.binary)).any(1, keepdim=True)
    scale = _safe_scale(row, r, eps)
    value = r = r * scale
    if row.value == "order":
        value = (r[:, :, None] > r[:, None, :]).sum(-1).double()
    elif row.table is not None:
        table = row.table_of(n, parameter).to(r.device)
        if row.binary:
            value = table[(r == 1).long(), (r == 1).sum(1, keepdim=True)]
        else:
            ordered, order = r.sort(-1)
            gaps = torch.cat([ordered[:, :1], ordered.diff(dim=-1)], -1)
            value = torch.zeros_like(r).scatter(-1, order, gaps @ table[0][:, None] + (gaps * table[1]).cumsum(-1))
            # The transform can leave out the largest reward, and the squares of what remains would underflow.
            is_ordinary_again = (scale < 1) & (value.abs().amax(1, keepdim=True) < 2.0**480 * scale)
            value, scale = value / torch.where(is_ordinary_again, scale, 1.0), torch.where(is_ordinary_again, 1.0, scale)
    distance = value - value.amin(1, keepdim=True)  # exactly 0 for equal values
    mean = distance.mean(1, keepdim=True)
    token_mean, tokens = mean, torch.full_like(mean, n)
    if lengths is not None:
        lengths = torch.where(lengths.sum(1, keepdim=True) > 0, lengths, 1.0)
        tokens = lengths.sum(1, keepdim=True)
        token_mean = (lengths * distance).sum(1, keepdim=True) / tokens
    multiplier = torch.ones_like(mean)
    if row.scale == "size":
        multiplier = torch.full_like(mean, 1 / n)
    elif row.scale == "leave_one_out":
        multiplier = torch.full_like(mean, n / (n - 1) if n > 1 else 0.0)
    elif row.scale == "mean":
        divisor = value.mean(1, keepdim=True) + eps * scale
        multiplier = torch.where(divisor == 0, 0.0, 1 / divisor)
    elif row.scale in _RATIOS:
        weights, count, centre = torch.ones_like(distance), torch.full_like(mean, n), mean
        if row.scale == "length_std":
            assert lengths is not None
            weights, count, centre = lengths, tokens, token_mean
        squares = (weights * (distance - centre).square()).sum(1, keepdim=True)
        divisor = (squares / (count - ddof).clamp_min(1)).sqrt() + eps * scale
        multiplier = torch.where((divisor == 0) | (count <= ddof), 0.0, 1 / divisor)
    centred = value
    if row.baseline != "zero":
        centred = distance - (mean if row.baseline == "mean" else token_mean)
    result = centred * (gain * multiplier) / (1.0 if row.scale in _RATIOS else scale)
    return torch.where(unusable, torch.nan, result)
