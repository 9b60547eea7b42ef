"""`maxrl_fast::group_advantage`: the operator behind the estimators that have a `Kernel`, on the CPU and on CUDA.

Rewards are [G, N], or flat [S] with `offsets` [G+1] and, where the rollouts of a group are not adjacent, `order` [S]. On a CPU
the sizes of uneven groups are read first. On a GPU nothing is read back, so that a CUDA graph can capture the operator.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.estimators import ESTIMATORS, Estimator, Kernel
from maxrl_fast.ops import _gate
from maxrl_fast.ops._gate import Call, operator, register_fake

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
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
    options: list[float],  # in the order of the estimator's
    max_group_size: int,  # 0 where it is not known
) -> Tensor:
    """Return the advantages, like the rewards."""
    device = rewards.device
    if rewards.dtype not in DTYPES:
        raise ValueError(f"rewards must be one of {', '.join(DTYPES.values())}, got {rewards.dtype}")
    call = Call(device)
    groups = _groups(call, rewards, offsets, order, valid)
    numbers = tuple(options)
    formula, has_table = _formula(estimator, numbers)
    tables = starts = largest = 0
    if offsets is None and valid is None:
        if has_table:
            largest = rewards.shape[1]
            tables = call.keep_cached(_table(estimator, size, numbers, largest, device))
    else:
        sizes: tuple[int, ...] = ()
        if not _gate.is_gpu(device):
            sizes = tuple(call.launch("distinct_group_sizes", **groups))
            largest = sizes[-1] if sizes else 0
            check_sizes(ESTIMATORS[estimator], estimator, size, largest, max_group_size)
        elif has_table:  # the sizes are not read back, so there are tables of all that may come
            largest = max_group_size or min(rewards.numel() if offsets is not None else rewards.shape[1], _LARGEST_ON_A_GPU)
            sizes = tuple(range(largest + 1))
        if has_table:
            tables, starts = map(call.keep_cached, _tables(estimator, size, numbers, sizes, device))
    advantages = _empty_advantages(rewards)
    unusable = call.launch(
        "group_advantage",
        dtype=DTYPES[rewards.dtype],
        rewards=call.keep(rewards),
        **groups,
        tables=tables,
        table_starts=starts,
        largest_table=largest,
        **formula,
        advantages=call.keep(advantages),
    )
    if unusable is not None and unusable >= 0:
        _refuse(unusable, rewards, offsets, order, estimator)
    return advantages


@register_fake(group_advantage)
def _(rewards: Tensor, *_: Any) -> Tensor:
    return _empty_advantages(rewards)


def _empty_advantages(rewards: Tensor) -> Tensor:
    return torch.empty_like(rewards) if rewards.is_floating_point() else torch.empty_like(rewards, dtype=torch.float32)


def _groups(call: Call, rewards: Tensor, offsets: Tensor | None, order: Tensor | None, valid: Tensor | None) -> dict[str, int]:
    """Return the layout for the kernel; raise ValueError if a tensor does not fit."""
    if rewards.dim() != (2 if offsets is None else 1) or not rewards.is_contiguous():
        raise ValueError(
            "rewards must be contiguous [G, N], or [S] with offsets, got the shape "
            f"{tuple(rewards.shape)} with strides {rewards.stride()}"
        )
    if offsets is None:
        (num_groups, group_size), starts = rewards.shape, 0
    else:
        num_groups, group_size = offsets.numel() - 1, 0
        starts = call.address("offsets", offsets, torch.int64, (max(num_groups, 0) + 1,))
    return {
        "num_groups": num_groups,
        "group_size": group_size,
        "num_rewards": rewards.numel(),
        "offsets": starts,
        "order": call.address("order", order, torch.int64, rewards.shape),
        "valid": call.address("valid", valid, torch.bool, rewards.shape),
    }


def group_sizes(rewards: Tensor, offsets: Tensor | None, order: Tensor | None, valid: Tensor | None) -> tuple[int, ...]:
    """Return the different numbers of valid rollouts of groups on a CPU, ascending; raise ValueError if offsets do not fit."""
    call = Call(rewards.device)
    return tuple(call.launch("distinct_group_sizes", **_groups(call, rewards, offsets, order, valid)))


@lru_cache(maxsize=1024)
def _formula(estimator: str, options: tuple[float, ...]) -> tuple[dict[str, Any], bool]:
    """Return the formula of an estimator for the kernel, and whether it takes tables."""
    row, kernel = ESTIMATORS[estimator], _kernel_of(estimator)
    given = dict(zip(row.options, options, strict=True))
    kind = "moments" if kernel.table is None else "binary" if kernel.binary else "rank"
    eps, ddof = given.get("eps", 0.0), int(given.get("ddof", 0.0))
    formula = {"kind": kind, "centred": kernel.centred, "scale": kernel.scale, "eps": eps, "ddof": ddof}
    return formula, kernel.table is not None


def _kernel_of(estimator: str) -> Kernel:
    kernel = ESTIMATORS[estimator].kernel
    assert kernel is not None, f"{estimator} has no kernel"
    return kernel


# Other threads may drop what these caches hold, and other streams may read it: see Call.keep_cached. A copy from pageable
# memory of the host is complete when `to` returns, so that every stream may read it.


@lru_cache(maxsize=256)
def _table(estimator: str, size: int, options: tuple[float, ...], n: int, device: torch.device) -> Tensor:
    """Return the table of groups of n: float64 [2, n] by rank, or [2, n+1] by the number of correct rollouts."""
    return _kernel_of(estimator).table_of(n, ESTIMATORS[estimator].size, size, options).to(device)


@lru_cache(maxsize=16)
def _tables(
    estimator: str, size: int, options: tuple[float, ...], sizes: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the concatenated tables of groups of `sizes`, and the start of the table of each n, int64 [largest size + 1]."""
    cpu = torch.device("cpu")
    nothing = torch.zeros(0, dtype=torch.float64)
    tables = [_table(estimator, size, options, n, cpu).flatten() if n else nothing for n in sizes]
    starts = torch.zeros(max(sizes, default=0) + 1, dtype=torch.int64)
    starts[list(sizes)] = torch.tensor([0, *(len(table) for table in tables)]).cumsum(0)[:-1]
    return torch.cat([*tables, nothing]).to(device), starts.to(device)


def forget_tables() -> None:
    """Forget what was computed from the rows of estimators, after one has changed."""
    for cache in (_formula, _table, _tables):
        cache.cache_clear()


def check_sizes(row: Estimator, name: str, size: int, largest: int, max_group_size: int) -> None:
    """Raise ValueError where the largest group has more rollouts than `max_group_size`, or too few for k or the order."""
    if max_group_size and largest > max_group_size:
        raise ValueError(f"a group has {largest} rollouts, more than max_group_size = {max_group_size}")
    if row.size is not None and size and largest > 1:
        row.size.check(name, size, largest)


def _refuse(position: int, rewards: Tensor, offsets: Tensor | None, order: Tensor | None, estimator: str) -> None:
    """Raise ValueError for the reward at `position` in the order of groups."""
    index = position if order is None else int(order[position])
    reward = rewards.flatten()[index].item()
    if offsets is None:
        group, rollout = divmod(position, rewards.shape[1])
        where = f"in group {group}, rollout {rollout}"
    else:
        group = int(torch.searchsorted(offsets, position, right=True)) - 1
        where = f"in group {group}, rollout {position - int(offsets[group])} (index {index})"
    raise ValueError(f"rewards must be {f'0 or 1 for {estimator}' if reward - reward == 0 else 'finite'}, got {reward} {where}")
