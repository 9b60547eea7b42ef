"""Groups padded to one width, and checks of the numbers that an estimator gets."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import is_host_readable
from maxrl_fast.algorithms.estimators import Estimator


@dataclass(frozen=True)
class PaddedGroups:
    """Where the rollouts of rewards [..., N], or [S] in uneven groups, stand in [G, N]."""

    shape: torch.Size  # of the rewards
    num_groups: int | None  # None: group_ids have no order
    index: Tensor | None = None  # [G, N] of each rollout in [S]; None: the rewards are [..., N]
    present: Tensor | None = None  # [G, N] bool, whether there is a rollout; None: everywhere
    valid: Tensor | None = None  # [G, N] bool, whether it is there and valid; None: everywhere

    @classmethod
    def of(
        cls, rewards: Tensor, offsets: Tensor | None, group_ids: Tensor | None, valid: Tensor | None
    ) -> "PaddedGroups":
        """Pad to the largest group, whose size is read from the device."""
        shape, total, device = rewards.shape, rewards.numel(), rewards.device
        if offsets is None and group_ids is None:
            valid = None if valid is None else valid.reshape(-1, shape[-1])
            return cls(shape, total // shape[-1], valid=valid)
        order = None
        if offsets is not None:
            if group_ids is not None:
                raise ValueError("give offsets or group_ids, not both")
            bounds = _bounds(offsets, total)
        else:
            assert group_ids is not None
            ids, order = group_ids.long().sort(stable=True)
            group = (ids.diff(prepend=ids[:1]) != 0).long().cumsum(0)  # [S], 0, 0, 1, ...
            num_groups = int(group[-1]) + 1
            bounds = torch.searchsorted(group, torch.arange(num_groups + 1, device=device))
        sizes = bounds.diff()
        width = int(sizes.max())
        place = torch.arange(width, device=device)  # [N]
        present = place < sizes[:, None]  # [G, N]
        index = (bounds[:-1, None] + place).clamp(0, total - 1)
        index = index if order is None else order[index]
        valid = present if valid is None else present & valid[index]
        return cls(shape, len(sizes) if order is None else None, index, present, valid)

    def pad(self, x: Tensor) -> Tensor:
        """Return [..., G, N] of [..., *shape]."""
        if self.index is not None:
            return x[..., self.index]
        return x.reshape(*x.shape[: x.dim() - len(self.shape)], -1, self.shape[-1])

    def unpad(self, x: Tensor) -> Tensor:
        """Return [*shape] of [G, N]."""
        if self.index is None or self.present is None:
            return x.reshape(self.shape)
        total = self.shape[0]  # one more number takes what is written for absent rollouts
        index = torch.where(self.present, self.index, total).flatten()
        return x.new_zeros(total + 1).scatter(0, index, x.flatten())[:-1]


def _bounds(offsets: Tensor, total: int) -> Tensor:
    if offsets.dim() != 1 or not len(offsets) or offsets.dtype not in (torch.int32, torch.int64):
        got = f"{offsets.dtype} of shape {tuple(offsets.shape)}"
        raise ValueError(f"offsets must be int64 [G+1], got {got}")
    bounds = offsets.long()
    listed = bounds.cpu().tolist()
    falls = [g for g, (a, b) in enumerate(pairwise(listed)) if b < a]
    if falls or listed[0] != 0 or listed[-1] != total:
        got = f"from {listed[0]} to {listed[-1]}"
        if falls:
            got = f"{listed[falls[0]]} followed by {listed[falls[0] + 1]} at group {falls[0]}"
        raise ValueError(f"offsets must rise from 0 to {total}, got {got}")
    return bounds


def check_numbers(
    row: Estimator, name: str, x: Tensor, groups: PaddedGroups, largest: float
) -> Tensor | None:
    """Raise ValueError for the first of the numbers [..., G, N] that the estimator cannot take.

    Where the check would wait for the device, return which groups must become NaN: [G, 1] bool, or
    [1, 1] if the batch scales all groups. Otherwise None.
    """
    if name == "lengths":
        wanted, wrong = "at least 0", x < 0
    elif name == "log_ratios":
        wanted, wrong = "numbers", x.isnan()  # they are clamped
    elif name == "reward_parts":
        wanted, wrong = "finite", x.abs() > largest  # NaN is allowed: a part that does not apply
    elif name == "rewards" and row.binary:
        wanted, wrong = "finite", (x != 0) & (x != 1)
    else:
        wanted, wrong = "finite", ~(x.abs() <= largest)
    wrong = wrong if groups.valid is None else wrong & groups.valid
    if not is_host_readable(wrong):
        unusable = wrong.any(-1, keepdim=True).view(-1, wrong.shape[-2], 1).any(0)
        return unusable.any(0, keepdim=True) if row.over_batch else unusable
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        number, (group, rollout) = float(x[tuple(place)]), place[-2:]
        if wanted == "finite" and math.isfinite(number):
            is_binary = name == "rewards" and row.binary
            limit = "0 or 1" if is_binary else f"at most {largest:g} in magnitude"
            wanted = f"{limit} for {row.name}"
        index = "" if groups.index is None else f" (index {int(groups.index[group, rollout])})"
        got = repr(number).removesuffix(".0")
        raise ValueError(
            f"{name} must be {wanted}, got {got} in group {group}, rollout {rollout}{index}"
        )
    return None
