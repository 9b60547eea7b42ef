"""Groups padded to one width, and checks of the numbers that an estimator gets."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import is_host_readable, is_traced
from maxrl_fast.algorithms.estimators import Estimator


def uneven_groups(
    offsets: Tensor | None, group_ids: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return offsets [G+1] int64, and the index [S] that sorts by group; None for equal groups."""
    if offsets is not None:
        if group_ids is not None:
            raise ValueError("give offsets or group_ids, not both")
        is_vector = offsets.dim() == 1 and offsets.numel() > 0
        if not is_vector or offsets.dtype not in (torch.int32, torch.int64):
            got = f"{offsets.dtype} of shape {tuple(offsets.shape)}"
            raise ValueError(f"offsets must be int64 [G+1], got {got}")
        return offsets.long().contiguous(), None
    if group_ids is None:
        return None, None
    # The number of groups is not read from the device: S groups are made, the last ones empty.
    ids, places = group_ids.long().sort(stable=True)
    # [S], 0, 0, 1, ...: the group of each sorted rollout
    group = torch.cat([ids.new_zeros(1), (ids[1:] != ids[:-1]).long().cumsum(0)])
    return torch.searchsorted(group, torch.arange(len(ids) + 1, device=ids.device)), places


@dataclass(frozen=True)
class PaddedGroups:
    shape: tuple[int, ...]  # of the rewards: (G, W), or (S,) with offsets
    # including empty groups at the end, which may be cut; None: a group's rollouts are not adjacent
    num_groups: int | None
    # [G, W] index of each rollout in the flat rewards; None if the rewards are [G, W]
    index: Tensor | None
    present: Tensor  # [G, W] bool, whether there is a rollout
    exists: Tensor  # [G, W] bool, whether there is a valid rollout
    too_long: Tensor | None  # [G, 1] bool, whether the group has rollouts that W leaves out

    @classmethod
    def of(
        cls,
        rewards: Tensor,
        offsets: Tensor | None,
        order: Tensor | None,
        valid: Tensor | None,
        width: int,
    ) -> "PaddedGroups":
        """Pad the operator's layout.

        `width`: an upper bound of the sizes of uneven groups. 0: the largest size, read from the
        device, and empty groups at the end are cut; when tracing, the number of rollouts.
        """
        if offsets is None:
            exists = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
            return cls(tuple(rewards.shape), len(rewards), None, exists, exists, None)
        total, num_groups, too_long = len(rewards), len(offsets) - 1, None
        starts, sizes = offsets[:-1], offsets.diff()  # [G], [G]
        if width or is_traced():
            width = min(width or total, total)
            too_long = (sizes > width)[:, None]
        elif num_groups:
            last = ((sizes > 0) * torch.arange(1, num_groups + 1, device=rewards.device)).max()
            width, num_rows = torch.stack([sizes.max(), last]).tolist()
            starts, sizes = starts[:num_rows], sizes[:num_rows]
        places = torch.arange(width, device=rewards.device)  # [W]
        present = places < sizes[:, None]  # [G, W]
        index = (starts[:, None] + places).clamp(0, total - 1)  # [G, W]
        index = index if order is None else order[index]
        exists = present if valid is None else present & valid[index]
        known = num_groups if order is None else None
        return cls((total,), known, index, present, exists, too_long)


def check_numbers(
    row: Estimator, values: Mapping[str, Any], padded: PaddedGroups, largest: float
) -> Tensor | None:
    """Raise ValueError for the first number [..., G, W] that the estimator cannot take.

    If the check would wait for the device, return which groups must become NaN: [G, 1] bool, or [1,
    1] if the batch scales all groups; None if none.
    """
    unusable = padded.too_long
    for name, x in values.items():
        if not isinstance(x, Tensor) or x.dtype == torch.bool:
            continue
        if name == "lengths":
            wanted, wrong = "at least 0", x < 0
        elif name == "log_ratios":
            wanted, wrong = "numbers", x.isnan()  # they are clamped
        elif name == "reward_parts":
            # NaN is allowed: a part that does not apply
            wanted, wrong = "finite", x.abs() > largest
        elif name == "rewards" and row.binary:
            wanted, wrong = "finite", (x != 0) & (x != 1)
        else:
            wanted, wrong = "finite", ~(x.abs() <= largest)
        wrong = wrong & padded.exists
        if not is_host_readable(wrong):
            # [..., G, W] -> [G, 1]
            groups = wrong.any(-1, keepdim=True).view(-1, wrong.shape[-2], 1).any(0)
            groups = groups.any(0, keepdim=True) if row.over_batch else groups
            unusable = groups if unusable is None else unusable | groups
        elif bool(wrong.any()):
            place = wrong.nonzero()[0].tolist()
            number, (group, rollout) = float(x[tuple(place)]), place[-2:]
            if wanted == "finite" and math.isfinite(number):
                is_binary = name == "rewards" and row.binary
                limit = "0 or 1" if is_binary else f"at most {largest:g} in magnitude"
                wanted = f"{limit} for {row.name}"
            index = "" if padded.index is None else f" (index {int(padded.index[group, rollout])})"
            got = repr(number).removesuffix(".0")
            raise ValueError(
                f"{name} must be {wanted}, got {got} in group {group}, rollout {rollout}{index}"
            )
    return unusable
