"""`maxrl_fast::group_advantage`: the operator of the estimators that have a `Kernel`.

On a GPU nothing is read back, so that a CUDA graph can capture the operator.
"""

from functools import lru_cache

import torch
from torch import Tensor

from maxrl_fast.algorithms.estimators import ESTIMATORS, Estimator, Group
from maxrl_fast.ops.dispatch import KernelLaunch, is_gpu

DTYPES = {torch.float32: "float32", torch.float64: "float64"}


def group_advantage(
    rewards: Tensor,  # [G, N]
    valid: Tensor | None,  # [G, N]; None: all are
    estimator: str,
    size: int,  # 0: the largest that fits
    options: list[float],  # in the order of the estimator's options
) -> Tensor:
    if rewards.dtype not in DTYPES or rewards.dim() != 2:
        got = f"{rewards.dtype} of shape {tuple(rewards.shape)}"
        raise ValueError(f"rewards must be float32 or float64 [G, N], got {got}")
    call, row = KernelLaunch(rewards.device), ESTIMATORS[estimator]
    kernel, given = row.kernel, dict(zip(row.options, options, strict=True))
    assert kernel is not None, f"{estimator} has no kernel"
    tables, num_tables = 0, 0
    if kernel.table is None:
        pass
    elif valid is None:
        tables = call.keep_cached(_table_of_full_groups(row, size, rewards.shape[1], call.device))
        num_tables = 1
    else:
        sizes, of_group = valid.sum(1), slice(None)  # [G]
        if not is_gpu(call.device):  # a GPU would wait
            sizes, of_group = sizes.unique(return_inverse=True)
        group = Group.of_sizes(sizes, rewards.shape[1])
        tables = call.keep(_table(row, size, group)[of_group])
        num_tables = len(rewards)
    advantages = torch.empty_like(rewards)
    call.launch(
        "group_advantage",
        dtype=rewards.dtype,
        num_groups=rewards.shape[0],
        group_size=rewards.shape[1],
        rewards=call.address("rewards", rewards, rewards.dtype, rewards.shape),
        valid=call.address("valid", valid, torch.bool, rewards.shape),
        tables=tables,
        num_tables=num_tables,
        centred=kernel.centred,
        scale=kernel.scale,
        eps=given.get("eps", 0.0),
        ddof=int(given.get("ddof", 0)),
        advantages=advantages,
    )
    return advantages


def _table(row: Estimator, size: int, group: Group) -> Tensor:
    """Return the rank tables [G, 2, N]; 0 for groups that are too small for the size."""
    assert row.kernel is not None
    assert row.kernel.table is not None
    if row.size is None:
        return row.kernel.table(group, 0)
    sizes = size or group.n - row.size.below_n
    fits = (row.size.smallest <= sizes) & (sizes <= group.n - row.size.below_n)  # [G, 1]
    return row.kernel.table(group, sizes).masked_fill(~fits[:, None], 0.0)


# Other threads may drop cached tables, and other streams may read them: see
# KernelLaunch.keep_cached.
@lru_cache(maxsize=256)
def _table_of_full_groups(row: Estimator, size: int, n: int, device: torch.device) -> Tensor:
    group = Group.of_sizes(torch.tensor([n]), n)
    # A copy from pageable host memory is complete when `to` returns: every stream may read it.
    return _table(row, size, group).contiguous().to(device)


forget_tables = _table_of_full_groups.cache_clear
