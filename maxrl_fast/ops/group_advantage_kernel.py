"""`maxrl_fast::group_advantage`: the operator of the estimators that have a `Kernel`.

Rewards are [G, N], or flat [S] with `offsets` [G+1] and, if a group's rollouts are not adjacent,
`order` [S]. On a GPU nothing is read back, so that a CUDA graph can capture the operator.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.estimators import ESTIMATORS, Estimator
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.dispatch import KernelLaunch, operator, register_fake
from maxrl_fast.ops.groups import PaddedGroups, check_numbers

DTYPES = {
    getattr(torch, name): name
    for name in ("float32", "float64", "bfloat16", "int32", "int64", "bool")
}
_LARGEST_ON_A_GPU = 4096  # kMaxRankedGroupSize of csrc/cuda/group_advantage.cu


@operator()
def group_advantage(
    rewards: Tensor,  # [G, N], or [S] with offsets
    offsets: Tensor | None,  # [G+1]
    order: Tensor | None,  # [S]
    valid: Tensor | None,  # like rewards
    estimator: str,
    size: int,  # 0: the largest that fits
    options: list[float],  # in the order of the estimator's options
    max_group_size: int,  # 0: not known
) -> Tensor:
    if rewards.dtype not in DTYPES:
        raise ValueError(
            f"rewards must be one of {', '.join(DTYPES.values())}, got {rewards.dtype}"
        )
    call, row = KernelLaunch(rewards.device), ESTIMATORS[estimator]
    kernel, numbers = row.kernel, tuple(options)
    groups = kernel_groups(call, rewards, offsets, order, valid)
    assert kernel is not None, f"{estimator} has no kernel"
    given = dict(zip(row.options, numbers, strict=True))
    tables = starts = largest = 0
    if offsets is None and valid is None:
        if kernel.table is not None:
            largest = rewards.shape[1]
            tables = call.keep_cached(_table(row, size, numbers, largest, rewards.device))
    else:
        sizes: tuple[int, ...] = ()
        if not dispatch.is_gpu(rewards.device):
            sizes = read_sizes(call, groups, row, size, max_group_size)
        # sizes are not read back, so tables are needed for all possible ones
        elif kernel.table is not None:
            bound = rewards.shape[1] if offsets is None else rewards.numel()
            most = max_group_size or min(bound, _LARGEST_ON_A_GPU)
            sizes = tuple(range(most + 1))
        largest = sizes[-1] if sizes else 0
        if kernel.table is not None:
            made = _tables(row, size, numbers, sizes, rewards.device)
            tables, starts = map(call.keep_cached, made)
    advantages = _empty_advantages(rewards)
    unusable = call.launch(
        "group_advantage",
        dtype=DTYPES[rewards.dtype],
        rewards=call.keep(rewards),
        **groups,
        tables=tables,
        table_starts=starts,
        largest_table=largest,
        kind="moments" if kernel.table is None else "binary" if kernel.binary else "rank",
        centred=kernel.centred,
        scale=kernel.scale,
        eps=given.get("eps", 0.0),
        ddof=int(given.get("ddof", 0)),
        advantages=call.keep(advantages),
    )
    if unusable is not None and unusable >= 0:
        padded = PaddedGroups.of(rewards, offsets, order, valid, 0)
        values = (rewards if padded.index is None else rewards[padded.index]).double()
        check_numbers(row, {"rewards": values}, padded, torch.finfo(torch.float64).max)
    return advantages


@register_fake(group_advantage)
def _(rewards: Tensor, *_: Any) -> Tensor:
    return _empty_advantages(rewards)


def _empty_advantages(rewards: Tensor) -> Tensor:
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    return torch.empty_like(rewards, dtype=dtype)


def kernel_groups(
    call: KernelLaunch,
    rewards: Tensor,
    offsets: Tensor | None,
    order: Tensor | None,
    valid: Tensor | None,
) -> dict[str, int]:
    if rewards.dim() != (2 if offsets is None else 1) or not rewards.is_contiguous():
        raise ValueError(
            "rewards must be contiguous [G, N], or [S] with offsets, got the shape "
            f"{tuple(rewards.shape)} with strides {rewards.stride()}"
        )
    num_groups, group_size = rewards.shape if offsets is None else (offsets.numel() - 1, 0)
    return {
        "num_groups": num_groups,
        "group_size": group_size,
        "num_rewards": rewards.numel(),
        "offsets": call.address("offsets", offsets, torch.int64, (max(num_groups, 0) + 1,)),
        "order": call.address("order", order, torch.int64, rewards.shape),
        "valid": call.address("valid", valid, torch.bool, rewards.shape),
    }


def read_sizes(
    call: KernelLaunch, groups: dict[str, int], row: Estimator, size: int, max_group_size: int
) -> tuple[int, ...]:
    """Return the distinct numbers of valid rollouts of groups on a CPU, ascending."""
    sizes = tuple(call.launch("distinct_group_sizes", **groups))
    largest = max(sizes, default=0)
    if max_group_size and largest > max_group_size:
        raise ValueError(
            f"a group has {largest} rollouts, more than max_group_size = {max_group_size}"
        )
    if row.size is not None and size and largest > 1:
        row.size.check(row.name, size, largest)
    return sizes


# Other threads may drop cached tensors, and other streams may read them: see
# KernelLaunch.keep_cached. A copy from pageable host memory is complete when `to` returns, so that
# every stream may read it.


@lru_cache(maxsize=256)
def _table(
    row: Estimator, size: int, options: tuple[float, ...], n: int, device: torch.device
) -> Tensor:
    """Return float64 [2, n] by rank, or [2, n+1] by number of correct rollouts."""
    assert row.kernel is not None
    assert row.kernel.table is not None
    if row.size is not None:
        size = size or n - row.size.below_n
        if not row.size.smallest <= size <= n - row.size.below_n:
            return torch.zeros(2, n + row.kernel.binary, dtype=torch.float64, device=device)
    return row.kernel.table(n, size, *options).to(device)


@lru_cache(maxsize=16)
def _tables(
    row: Estimator,
    size: int,
    options: tuple[float, ...],
    sizes: tuple[int, ...],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return the tables of `sizes`, end to end, and where each n's starts, int64 [largest + 1]."""
    nothing = torch.zeros(0, dtype=torch.float64)
    cpu = nothing.device
    tables = [_table(row, size, options, n, cpu).flatten() if n else nothing for n in sizes]
    starts = torch.zeros(max(sizes, default=0) + 1, dtype=torch.int64)
    starts[list(sizes)] = torch.tensor([0, *map(len, tables)]).cumsum(0)[:-1]
    return torch.cat([*tables, nothing]).to(device), starts.to(device)


def forget_tables() -> None:
    _table.cache_clear()
    _tables.cache_clear()
