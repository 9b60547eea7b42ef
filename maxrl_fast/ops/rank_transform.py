"""The rank transform: one kernel for the family of group advantages that weigh the gaps between sorted rewards.

For a group's rewards in ascending order r_(1) <= ... <= r_(N) and weights omega_1 .. omega_{N-1},

    T_(1) = 0,   T_(i) = sum_{j < i} omega_j (r_(j+1) - r_(j)),   A = T - mean(T) if centred, else T.

An estimator is a choice of omega. Every table is made once per (N, K), in float64, by recurrence.
"""

from functools import lru_cache

import torch
from torch import Tensor

from maxrl_fast import _C
from maxrl_fast.ops._gate import address, has_cuda_kernels

_SUFFIX = {torch.float32: "float32", torch.float64: "float64"}


def _subset_ratios(n: int, k: int) -> Tensor:
    """q_j = C(j, k) / C(n, k) for j = 0..n, float64: q_n = 1, q_{j-1} = q_j (j - k) / j. Underflow to 0 is harmless."""
    j = torch.arange(1, n + 1, dtype=torch.float64)
    factors = ((j - k).clamp_min(0) / j).flip(0)  # from q_n down
    return torch.cat([factors.new_ones(1), factors.cumprod(0)]).flip(0)


@lru_cache(maxsize=256)
def rank_weights(kind: str, n: int, k: int, device: torch.device) -> Tensor:
    """omega_1 .. omega_{n-1}, float64 [n-1] on `device`.

    kind: "mean" (r - mean), "rloo", "maxpo" (size k), "ei" (size k), "maxrl" (order k). The caller checks k.
    """
    j = torch.arange(1, n, dtype=torch.float64)
    if kind == "mean":
        weights = torch.ones_like(j)
    elif kind == "rloo":
        weights = torch.full_like(j, n / (n - 1)) if n > 1 else j
    elif kind == "maxpo":
        weights = n / j * _subset_ratios(n - 1, k)[1:]
    elif kind == "ei":
        weights = _subset_ratios(n - 1, k - 1)[1:]
    elif kind == "maxrl":
        weights = n / j * (n / (n - j) * (1 - _subset_ratios(n, k + 1)[1:n]) - 1)
    else:
        raise ValueError(f"unknown rank weights {kind!r}")
    return weights.to(device)


def rank_transform_reference(rewards: Tensor, weights: Tensor, centred: bool) -> Tensor:
    """`rank_transform` in plain PyTorch, in float64."""
    ordered, order = rewards.double().sort(dim=-1)
    prefix = torch.zeros_like(ordered)
    prefix[..., 1:] = (weights * ordered.diff(dim=-1)).cumsum(-1)
    if centred:
        prefix = prefix - prefix.mean(-1, keepdim=True)
    return torch.zeros_like(prefix).scatter(-1, order, prefix).to(rewards.dtype)


@torch.library.custom_op("maxrl_fast::rank_transform", mutates_args=(), device_types="cpu")
def rank_transform(rewards: Tensor, weights: Tensor, centred: bool) -> Tensor:
    """Advantages [G, N] of rewards [G, N], float32 or float64, with weights [N-1] float64. Sums are taken in float64."""
    advantages = torch.empty_like(rewards)
    getattr(_C, f"rank_transform_cpu_{_dtype_name(rewards)}")(**_arguments(rewards, weights, advantages, centred))
    return advantages


@rank_transform.register_kernel("cuda")
def _(rewards: Tensor, weights: Tensor, centred: bool) -> Tensor:
    if not has_cuda_kernels(rewards.device):
        return rank_transform_reference(rewards, weights, centred)
    advantages = torch.empty_like(rewards)
    kernel = getattr(_C, f"rank_transform_cuda_{_dtype_name(rewards)}")
    with torch.cuda.device(rewards.device):
        kernel(**_arguments(rewards, weights, advantages, centred), stream=torch.cuda.current_stream().cuda_stream)
    return advantages


@rank_transform.register_fake
def _(rewards: Tensor, weights: Tensor, centred: bool) -> Tensor:
    return torch.empty_like(rewards)


def _dtype_name(rewards: Tensor) -> str:
    if rewards.dtype not in _SUFFIX:
        raise ValueError(f"rewards must be torch.float32 or torch.float64, got {rewards.dtype}")
    return _SUFFIX[rewards.dtype]


def _arguments(rewards: Tensor, weights: Tensor, advantages: Tensor, centred: bool) -> dict[str, int]:
    if rewards.dim() != 2:
        raise ValueError(f"rewards must have shape [G, N], got {tuple(rewards.shape)}")
    num_groups, group_size = rewards.shape
    shape = (max(group_size - 1, 0),)
    return {
        "rewards": address("rewards", rewards, rewards.dtype, (num_groups, group_size), rewards.device),
        "weights": address("weights", weights, torch.float64, shape, rewards.device),
        "advantages": advantages.data_ptr(),
        "num_groups": num_groups,
        "group_size": group_size,
        "centred": centred,
    }
