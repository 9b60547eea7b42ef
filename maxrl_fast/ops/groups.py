"""The layout of groups: rows of [G, N], runs of a flat [S] given by offsets, or equal ids in any order."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import is_integer


@dataclass(frozen=True)
class Groups:
    """The layout that the kernel takes: [G, N] without offsets, otherwise flat [S]."""

    shape: tuple[int, ...]  # of the viewed rewards: (G, N) or (S,)
    num_groups: int
    offsets: Tensor | None  # [G+1] int64
    order: Tensor | None  # [S] int64, where the rollouts of a group are not adjacent
    valid: Tensor | None  # bool, like the viewed rewards

    @classmethod
    def of(cls, rewards: Tensor, offsets: Tensor | None, group_ids: Tensor | None, valid: Tensor | None) -> "Groups":
        """Return the layout; raise ValueError if offsets or ids do not fit. The kernel checks the values of the offsets."""
        if offsets is not None and group_ids is not None:
            raise ValueError("give offsets or group_ids, not both")
        if offsets is None and group_ids is None:
            n = rewards.shape[-1]
            shape = tuple(rewards.shape) if rewards.dim() == 2 else (rewards.numel() // n, n)
            return cls(shape, shape[0], None, None, None if valid is None else valid.contiguous().view(shape))
        valid = None if valid is None else valid.contiguous()
        if offsets is not None:
            if offsets.dim() != 1 or offsets.numel() == 0 or offsets.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"offsets must be int64 [G+1], got {offsets.dtype} of shape {tuple(offsets.shape)}")
            return cls(tuple(rewards.shape), offsets.numel() - 1, offsets.long().contiguous(), None, valid)
        assert group_ids is not None
        if not is_integer(group_ids):
            raise ValueError(f"group_ids must be integers, got {group_ids.dtype}")
        # The number of groups is not read back from the device: there are S, and the last ones are empty.
        ids, order = group_ids.long().sort(stable=True)
        group = torch.cat([ids.new_zeros(1, dtype=torch.int64), (ids[1:] != ids[:-1]).long().cumsum(0)])
        starts = torch.searchsorted(group, torch.arange(len(ids) + 1, device=ids.device))
        return cls(tuple(rewards.shape), len(ids), starts, order, valid)

    def view(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the shape of the rewards as [G, N] or [S], contiguous."""
        tensor = tensor.contiguous()
        return tensor if tensor.shape == self.shape else tensor.view(self.shape)

    def spread(self, name: str, per_group: Tensor, shape: torch.Size) -> Tensor:
        """Return a tensor like the viewed rewards, from one value per group, or from one per rollout in `shape`."""
        if per_group.numel() == self.num_groups > 0 and self.order is None:
            return per_group.flatten()[self._index(per_group.device)]
        if per_group.shape == shape:
            return self.view(per_group)
        raise ValueError(
            f"{name} must have one value per group, or the shape of rewards, got the shape {tuple(per_group.shape)}"
        )

    def extreme(self, values: Tensor, largest: bool, bucket: Tensor, num_buckets: int) -> Tensor:
        """Return the largest or smallest value among the rollouts of the same group and bucket, like the viewed values.

        Args:
            values: floating, like the viewed rewards; rollouts that are not valid are left out.
            bucket: int64 like the viewed rewards, from 0 to num_buckets - 1.
        """
        none = -torch.inf if largest else torch.inf
        if self.valid is not None:
            values = values.masked_fill(~self.valid, none)
        place = (self._index(values.device) * num_buckets + bucket).flatten()
        found = values.new_full((self.num_groups * num_buckets,), none)
        found = found.scatter_reduce(0, place, values.flatten(), "amax" if largest else "amin")
        return found[place].view(self.shape)

    def _index(self, device: torch.device) -> Tensor:
        """Return the group index of each rollout, int64, like the viewed rewards."""
        if self.offsets is None:
            return torch.arange(self.num_groups, device=device)[:, None].expand(self.shape)
        groups = torch.searchsorted(self.offsets, torch.arange(self.shape[0], device=device), right=True) - 1
        groups = groups.clamp(0, self.num_groups - 1)  # the kernel will refuse offsets that are out of range
        return groups if self.order is None else torch.zeros_like(groups).scatter(0, self.order, groups)


def padded(
    shape: tuple[int, ...],
    offsets: Tensor | None,
    order: Tensor | None,
    valid: Tensor | None,
    device: torch.device,
    width: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the groups as rows: the index [G, W] of each rollout in the flattened rewards, and whether there is a valid one.

    Args:
        shape: of the viewed rewards.
        width: an upper bound of the sizes of uneven groups; 0: the largest size, which is read from the device. Then empty
            groups at the end have no row.
    """
    total = math.prod(shape)
    if offsets is None:
        index = torch.arange(total, device=device).view(shape)
        exists = torch.ones_like(index, dtype=torch.bool)
    else:
        starts, sizes = offsets[:-1], offsets.diff()
        if not width and sizes.numel():
            last = ((sizes > 0) * torch.arange(1, len(sizes) + 1, device=device)).max()
            width, num_rows = torch.stack([sizes.max(), last]).tolist()
            starts, sizes = starts[:num_rows], sizes[:num_rows]
        exists = torch.arange(min(width, total), device=device) < sizes[:, None]
        index = (starts[:, None] + torch.arange(exists.shape[1], device=device)).clamp_max(max(total - 1, 0))
        index = index if order is None or not total else order[index]
    if valid is not None and index.numel():
        exists = exists & valid.flatten()[index]
    return index, exists
