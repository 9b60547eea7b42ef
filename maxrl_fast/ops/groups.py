"""The layout of groups: rows of [G, N], runs of a flat [S] given by offsets, or equal ids in any order; and as padded rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import is_integer, is_traced


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


@dataclass(frozen=True)
class Rows:
    """The groups as rows of one width W."""

    groups: Groups
    index: Tensor | None  # [G, W], of each rollout in the flat rewards; None where the rewards are [G, W]
    present: Tensor  # [G, W] bool, whether there is a rollout
    exists: Tensor  # [G, W] bool, whether there is a valid one
    too_long: Tensor | None  # [G, 1] bool, whether the group has rollouts that W leaves out

    @classmethod
    def of(cls, groups: Groups, device: torch.device, width: int) -> "Rows":
        """Return the rows.

        Args:
            width: an upper bound of the sizes of uneven groups; 0: the largest size, which is read from the device. Then empty
                groups at the end have no row. Where tensors have no values, 0 is the number of rollouts.
        """
        if groups.offsets is None:
            present = torch.ones(groups.shape, dtype=torch.bool, device=device)
            return cls(groups, None, present, present if groups.valid is None else groups.valid, None)
        total, starts, sizes, too_long = groups.shape[0], groups.offsets[:-1], groups.offsets.diff(), None
        if width or is_traced():
            width = min(width or total, total)
            too_long = (sizes > width)[:, None]
        elif sizes.numel():
            last = ((sizes > 0) * torch.arange(1, len(sizes) + 1, device=device)).max()
            width, num_rows = torch.stack([sizes.max(), last]).tolist()
            starts, sizes = starts[:num_rows], sizes[:num_rows]
        places = torch.arange(width, device=device)
        present = places < sizes[:, None]
        index = (starts[:, None] + places).clamp(0, total - 1)
        index = index if groups.order is None else groups.order[index]
        exists = present if groups.valid is None else present & groups.valid[index]
        return cls(groups, index, present, exists, too_long)

    def pad(self, tensor: Tensor, *leading: int) -> Tensor:
        """Return [*leading, *shape of the rewards] as [*leading, G, W], 0 where there is no valid rollout."""
        tensor = tensor.reshape(*leading, *self.groups.shape)
        return (tensor if self.index is None else tensor[..., self.index]).masked_fill(~self.exists, 0)

    def spread(self, name: str, per_group: Tensor, shape: torch.Size) -> Tensor:
        """Return [G, W] from one value for each group, or for each rollout in `shape`."""
        if per_group.numel() == self.groups.num_groups > 0 and self.groups.order is None:
            return per_group.reshape(-1, 1)[: len(self.exists)].masked_fill(~self.exists, 0)
        if per_group.shape == shape:
            return self.pad(per_group)
        raise ValueError(
            f"{name} must have one value per group, or the shape of rewards, got the shape {tuple(per_group.shape)}"
        )

    def flatten(self, values: Tensor) -> Tensor:
        """Return values [G, W] like the viewed rewards, 0 for rollouts that are not valid, NaN for those that W leaves out."""
        values = torch.where(self.exists, values, 0.0)
        if self.index is None:
            return values
        total = self.groups.shape[0]
        flat = values.new_full((total + 1,), torch.nan)
        return flat.scatter(0, torch.where(self.present, self.index, total).flatten(), values.flatten())[:-1]
