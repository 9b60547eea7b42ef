"""The group advantages in plain PyTorch: for tests, and for devices without a kernel."""

import torch
from torch import Tensor

from maxrl_fast.ops.estimators import KERNEL_ROWS, Estimator


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
    if offsets is None:
        index = torch.arange(flat.numel(), device=rewards.device).view(rewards.shape)  # [G, N]
        exists = torch.ones_like(index, dtype=torch.bool)
    else:
        sizes = offsets.diff()
        column = torch.arange(int(sizes.max()) if sizes.numel() else 0, device=rewards.device)
        exists = column < sizes[:, None]
        index = (offsets[:-1, None] + column).clamp_max(max(flat.numel() - 1, 0))
        index = index if order is None or not flat.numel() else order[index]
    if valid is not None and index.numel():
        exists = exists & valid.flatten()[index]
    index = index.gather(1, (~exists).to(torch.uint8).argsort(dim=1, stable=True))  # valid rollouts first
    counts = exists.sum(1)
    out = torch.zeros_like(flat)
    for n in counts.unique().tolist():
        if n:
            places = index[counts == n, :n]
            weights = None if lengths is None else lengths.flatten()[places].double()
            out[places] = _evaluate(row, flat[places], weights, parameter, eps, ddof) * gain + bias
    return out.to(result_dtype(rewards)).view(rewards.shape)


def _evaluate(row: Estimator, r: Tensor, lengths: Tensor | None, parameter: float, eps: float, ddof: int) -> Tensor:
    """Return (v - baseline) multiplier of rewards [G, n], float64; NaN in groups with unusable rewards."""
    n = r.shape[1]
    unusable = (~r.isfinite() | ((r != 0) & (r != 1) & row.binary)).any(1, keepdim=True)
    value = r
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
    distance = value - value.amin(1, keepdim=True)  # exactly 0 for equal values
    mean = distance.mean(1, keepdim=True)
    centre = mean
    if row.baseline == "length_mean":
        assert lengths is not None
        total = lengths.sum(1, keepdim=True)
        centre = torch.where(total > 0, (lengths * distance).sum(1, keepdim=True) / total, mean)
    multiplier = torch.ones_like(mean)
    if row.scale == "size":
        multiplier = torch.full_like(mean, 1 / n)
    elif row.scale == "leave_one_out":
        multiplier = torch.full_like(mean, n / (n - 1) if n > 1 else 0.0)
    elif row.scale in ("std", "mean"):
        divisor = value.mean(1, keepdim=True) + eps
        if row.scale == "std":
            divisor = ((distance - mean).square().sum(1, keepdim=True) / max(n - ddof, 1)).sqrt() + eps
        multiplier = torch.where((divisor == 0) | ((row.scale == "std") & (n <= ddof)), 0.0, 1 / divisor)
    result = (value if row.baseline == "zero" else distance - centre) * multiplier
    return torch.where(unusable, torch.nan, result)
