"""Group advantages by any estimator: argument checks, then the kernel or the function."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import (
    check_finite,
    check_flag,
    check_integer,
    check_tensor,
    is_host_readable,
    is_integer,
)
from maxrl_fast.algorithms.estimator import INPUTS, OBJECTS
from maxrl_fast.algorithms.estimators import Estimator, Group, find_estimator
from maxrl_fast.algorithms.options import check_options
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.group_advantage_kernel import DTYPES, kernel_groups, read_sizes
from maxrl_fast.ops.group_advantage_kernel import group_advantage as _kernel
from maxrl_fast.ops.groups import PaddedGroups, check_numbers, uneven_groups

_LARGEST = 1e150  # limit on the inputs of functions: squares and differences in float64 stay finite
# Kinds of the tensors with the rewards' shape; greedy_correct may also have one value per group.
_KINDS = {
    **{"valid": "bool", "greedy_correct": "bool", "group_ids": "integers", "lengths": "integers"},
    **{"logprobs": "floating", "log_ratios": "floating"},
}


def group_advantage(
    rewards: Tensor,
    estimator: str | Estimator,
    *,
    k: int | None = None,
    order: int | None = None,
    offsets: Tensor | None = None,
    group_ids: Tensor | None = None,
    valid: Tensor | None = None,
    lengths: Tensor | None = None,
    logprobs: Tensor | None = None,
    greedy_correct: Tensor | None = None,
    greedy_rewards: Tensor | None = None,
    reward_parts: Tensor | None = None,
    reward_weights: Sequence[float] | None = None,
    prompts: Sequence[Any] | None = None,
    log_ratios: Tensor | None = None,
    texts: Sequence[Any] | None = None,
    components: Sequence[Any] | None = None,
    scale_by_k: bool = False,
    max_group_size: int | None = None,
    **options: float,
) -> Tensor:
    """Return the advantages of rollouts within their groups (formulas: `ESTIMATORS`).

    Args:
        rewards: [..., N], each row a group, or flat [S] with offsets or group_ids; any real dtype.
        estimator: a name in `ESTIMATORS`, or an `Estimator`.
        k: size of the max@k objective, for estimators that have it.
        order: truncation of MaxRL, 1 <= order <= N-1. Default: N-1, the full order of each group.
        offsets: [G+1] int64 from 0 to S: group g is rewards[offsets[g] : offsets[g+1]].
        group_ids: [S] integers in any order; equal ids form a group.
        valid: bool, like rewards. Invalid rollouts are left out of their groups, and get 0.
        lengths, logprobs: like rewards: tokens of each response, and their mean log-prob.
        greedy_correct, greedy_rewards: of the prompt's greedy response, [G] or like rewards.
        reward_parts: [R, *rewards.shape], whose weighted sum is `rewards`; NaN: does not apply.
        reward_weights: R weights of the parts, default 1.
        prompts, texts, components: given to a custom function that asks for them as they are.
        log_ratios: like rewards: log pi(y_i) - log mu(y_i) of whole responses sampled by the policy
            mu, clamped to [-20, 20]; the gradient is that of pi.
        scale_by_k: multiply by k, so that the mean gradient is that of max@k (maxpo, EI, L2O).
        max_group_size: an upper bound of the sizes of uneven groups. On a GPU, rank estimators keep
            tables of all sizes up to it (default: min(S, 4096)), 8 bytes times its square.
            Estimators without a kernel pad groups to it; by default they read the largest size from
            the GPU, or pad to S in torch.compile.
        options: further options of the estimator, such as eps, ddof, quantile, tau.

    Returns:
        Advantages like rewards, float32 if these are not floating; not differentiable. In groups
        of one, centred estimators give 0. Uneven groups with too few rollouts for k get 0. A custom
        function of rewards [G, N] with `lengths` may return one for each of their tokens, [T].

    Raises:
        ValueError: if an argument is unknown, missing, unexpected, out of range or does not fit. On
            the CPU also if a number is not finite, not allowed for the estimator or, without a
            kernel, beyond 1e150, or an advantage exceeds its dtype. A GPU would wait for these
            checks: such a group's advantages become NaN (the batch's, if the estimator scales by
            it), and an advantage that exceeds its dtype infinite.
        TypeError: if an argument that must be a tensor is something else.
    """
    check_tensor("rewards", rewards)
    shape, is_flat = rewards.shape, offsets is not None or group_ids is not None
    if not shape or (is_flat and len(shape) != 1):
        wanted = "flat [S] with offsets or group_ids" if is_flat else "[..., N]"
        raise ValueError(f"rewards must be {wanted}, got the shape {tuple(shape)}")
    row = find_estimator(estimator)
    asked = (row, None if is_flat else shape[-1], k, order, scale_by_k, tuple(options.items()))
    try:
        # a compiler cannot trace a cache
        size, numbers = (_resolve if torch.compiler.is_compiling() else _resolved)(*asked)
    except TypeError:  # an argument is not hashable: _resolve raises an error that names it
        size, numbers = _resolve(*asked)
    given = lengths, logprobs, greedy_correct, greedy_rewards, reward_parts, prompts, log_ratios
    known = dict(zip(INPUTS, (*given, texts, components), strict=True))
    inputs = _inputs(row, known, reward_weights)
    _check_tensors(rewards, inputs | {"offsets": offsets, "group_ids": group_ids, "valid": valid})
    width = 0
    if max_group_size is not None:
        wanted = "an integer of at least 0"
        width = check_integer("max_group_size", max_group_size, wanted, lambda x: x >= 0)
        width = min(width, torch.iinfo(torch.int64).max)
    if reward_parts is not None:
        inputs["reward_weights"] = _weights(reward_weights, len(reward_parts))
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    if rewards.numel() == 0:
        return torch.zeros_like(rewards, dtype=dtype)
    offsets, places = uneven_groups(offsets, group_ids)
    viewed = rewards.detach().contiguous()
    valid = None if valid is None else valid.contiguous()
    if not is_flat and len(shape) != 2:
        viewed = viewed.view(-1, shape[-1])
        valid = None if valid is None else valid.view(viewed.shape)
    has_kernel = row.kernel is not None and isinstance(estimator, str)
    if has_kernel and dispatch.has_kernels(rewards.device):
        if viewed.dtype not in DTYPES:  # large integers do not fit into float32
            viewed = viewed.float() if viewed.element_size() <= 2 else viewed.double()
        advantages: Tensor = _kernel(
            viewed, offsets, places, valid, row.name, size, list(numbers.values()), width
        )
    else:
        if not row.takes_valid:
            if valid is not None:
                raise ValueError(f"{row.name} has no parameter valid, so all rewards must be there")
            width = 0  # wider rows would not be full
        if is_host_readable(viewed) and (offsets is not None or valid is not None):
            call = dispatch.KernelLaunch(viewed.device)
            read_sizes(call, kernel_groups(call, viewed, offsets, places, valid), row, size, width)
        padded = PaddedGroups.of(viewed, offsets, places, valid, width)
        inputs = {"rewards": viewed} | inputs
        advantages = _by_function(row, padded, shape, inputs, dtype, size, numbers)
    if scale_by_k:
        advantages = advantages * size
    if advantages.dtype != dtype:
        advantages = advantages.to(dtype)
    _check_fit(row.name, advantages)
    # of tokens, or flat as the rewards
    return (
        advantages if advantages.shape == shape or advantages.dim() == 1 else advantages.view(shape)
    )


def _resolve(
    row: Estimator,
    n: int | None,
    k: int | None,
    order: int | None,
    scale_by_k: bool,
    options: tuple[tuple[str, float], ...],
) -> tuple[int, dict[str, float]]:
    """Return the size, 0 for the largest that fits, and all options."""
    check_flag("scale_by_k", scale_by_k)
    numbers = check_options(row.name, row.options, dict(options))
    if scale_by_k and not row.scales_by_k:
        raise ValueError(f"{row.name} does not use scale_by_k")
    is_alone = n == 1 and row.centred  # its advantage is 0, whatever the size
    return row.resolve_size(None if is_alone else n, k, order), numbers


_resolved = lru_cache(maxsize=1024, typed=True)(_resolve)  # typed: k = 2.0 is not k = 2


def _inputs(
    row: Estimator, given: dict[str, Any], reward_weights: Sequence[float] | None
) -> dict[str, Any]:
    for name, value in given.items():
        if (value is None) == (name in row.inputs):
            raise ValueError(f"{row.name} {'needs' if value is None else 'does not use'} {name}")
    if reward_weights is not None and "reward_parts" not in row.inputs:
        raise ValueError(f"{row.name} does not use reward_weights")
    return {name: value for name, value in given.items() if value is not None}


def _weights(given: Sequence[float] | None, num_parts: int) -> tuple[float, ...]:
    given = [1.0] * num_parts if given is None else given
    weights = tuple(check_finite("each of reward_weights", weight) for weight in given)
    if len(weights) != num_parts:
        wanted = f"a number for each of the {num_parts} rewards"
        raise ValueError(f"reward_weights must be {wanted}, got {len(weights)}")
    return weights


def _check_tensors(rewards: Tensor, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is None or name in OBJECTS:
            continue
        check_tensor(name, value, rewards.device, "the rewards are")
        kind = _KINDS.get(name)
        is_kind = {
            "floating": value.is_floating_point(),
            "integers": is_integer(value),
            "bool": value.dtype == torch.bool,
        }
        if kind is not None and not is_kind[kind]:
            raise ValueError(f"{name} must be {kind}, got {value.dtype}")
        if kind is not None and name != "greedy_correct" and value.shape != rewards.shape:
            wanted = f"the shape of rewards, {tuple(rewards.shape)}"
            raise ValueError(f"{name} must have {wanted}, got {tuple(value.shape)}")
        if name == "reward_parts" and (
            value.dim() == 0 or value.shape[1:] != rewards.shape or not len(value)
        ):
            wanted = ", ".join(["R", *map(str, rewards.shape)])
            raise ValueError(
                f"reward_parts must have the shape ({wanted}), got {tuple(value.shape)}"
            )


@torch.no_grad()
def _by_function(
    row: Estimator,
    padded: PaddedGroups,
    shape: torch.Size,
    given: dict[str, Any],
    dtype: torch.dtype,
    size: int,
    options: dict[str, float],
) -> Tensor:
    if not row.takes_valid and padded.index is not None and not bool(padded.exists.all()):
        sizes = padded.present.sum(1)[:8].tolist()
        raise ValueError(f"{row.name} takes groups of equal size, got the sizes {sizes}")
    values = {}
    for name, x in given.items():
        if isinstance(x, Tensor):
            if name == "rewards" or x.is_floating_point():
                x = x.double()
            elif x.dtype != torch.bool:
                x = x.long()
            if name.startswith("greedy") and x.numel() == padded.num_groups:  # one for each group
                x = x.reshape(-1, 1)[: len(padded.exists)]
            elif name.startswith("greedy") and x.shape != shape:
                wanted = "one value per group, or the shape of rewards"
                raise ValueError(f"{name} must have {wanted}, got the shape {tuple(x.shape)}")
            else:
                if x.shape != padded.shape:
                    x = x.reshape(*x.shape[:1] if name == "reward_parts" else (), *padded.shape)
                x = x if padded.index is None else x[..., padded.index]
            x = x.masked_fill(~padded.exists, 0)
        values[name] = x
    unusable = check_numbers(row, values, padded, _LARGEST)
    rewards = values.pop("rewards")
    usable = rewards if unusable is None else rewards.masked_fill(unusable, 0.0)
    group = Group(usable, padded.exists, dtype)
    if row.size is not None and size:
        values[row.size.name] = size
    advantages = row.compute(group, **values, **options)
    if not isinstance(advantages, Tensor):
        raise ValueError(f"{row.name} must return a tensor, got {type(advantages).__name__}")
    shapes = [rewards.shape]
    if advantages.shape != rewards.shape and "lengths" in values and padded.index is None:
        shapes.append(torch.Size([int(values["lengths"].sum())]))  # waits for the device
    is_like = advantages.shape in shapes and advantages.device == rewards.device
    if not is_like or not advantages.is_floating_point():
        either = " or, for the tokens of its lengths, ".join(str(tuple(x)) for x in shapes)
        raise ValueError(
            f"{row.name} must return a floating tensor of shape {either} on {rewards.device}, got "
            f"{advantages.dtype} of shape {tuple(advantages.shape)} on {advantages.device}"
        )
    advantages = advantages.double()
    if advantages.shape != rewards.shape:
        return advantages if unusable is None else advantages.masked_fill(unusable.any(), torch.nan)
    if row.size is not None and size:
        advantages = advantages.masked_fill(group.n < size + row.size.below_n, 0.0)
    if unusable is not None:
        advantages = advantages.masked_fill(unusable, torch.nan)
    advantages = torch.where(padded.exists, advantages, 0.0)
    if padded.index is None:
        return advantages
    total = padded.shape[0]
    # NaN stays where a group is too long; absent rollouts go to the last slot
    flat = advantages.new_full((total + 1,), torch.nan)
    slots = torch.where(padded.present, padded.index, total)  # [G, W]
    return flat.scatter(0, slots.flatten(), advantages.flatten())[:-1]


def _check_fit(name: str, advantages: Tensor) -> None:
    """Raise ValueError if an advantage is not finite; a GPU would wait."""
    if not is_host_readable(advantages):
        return
    # float8 has no sums
    values = advantages if advantages.element_size() > 1 else advantages.float()
    if math.isfinite(values.sum()):  # much faster than checking every number
        return
    beyond = (~values.isfinite()).flatten().nonzero()
    if len(beyond):
        got = f"{float(values.flatten()[beyond[0]])} at index {int(beyond[0])}"
        dtype = advantages.dtype
        raise ValueError(f"the advantages of {name} must be finite in {dtype}, got {got}")


def maxpo_advantage(rewards: Tensor, k: int, **layout: Any) -> Tensor:
    """Return S_i - S_-i of rewards [..., N], 1 <= k <= N-1 (MaxPO, section 4.1).

    Its mean gradient is (1/k) grad max@k. This and the next functions also take offsets, group_ids
    and valid, as in `group_advantage`.
    """
    return group_advantage(rewards, "maxpo", k=k, **layout)


def expected_improvement(rewards: Tensor, k: int, **layout: Any) -> Tensor:
    """Return EI_i = S_i - M_-i of rewards [..., N], 2 <= k <= N (MaxPO, eq. 5)."""
    return group_advantage(rewards, "expected_improvement", k=k, **layout)


def leave_two_out_baseline(rewards: Tensor, k: int, **layout: Any) -> Tensor:
    """Return L2O_i of rewards [..., N], 2 <= k <= N-1 (MaxPO, eq. 6)."""
    return group_advantage(rewards, "leave_two_out", k=k, **layout)


def maxrl_advantage(rewards: Tensor, order: int | None = None, **layout: Any) -> Tensor:
    """Return the sum of maxpo_advantage over k = 1..order, default N-1, of rewards [..., N].

    For rewards 0 or 1 and order N-1 it is (r - mean)/mean, 0 if mean = 0 (MaxRL, Algorithm 1).
    """
    return group_advantage(rewards, "maxrl", order=order, **layout)


def grpo_advantage(rewards: Tensor, *, eps: float = 1e-6, ddof: int = 1, **layout: Any) -> Tensor:
    """Return (r - mean)/(std + eps) of rewards [..., N] (Shao et al. 2024); 0 if they are equal."""
    return group_advantage(rewards, "grpo", eps=eps, ddof=ddof, **layout)


def rloo_advantage(rewards: Tensor, **layout: Any) -> Tensor:
    """Return r minus the mean of the other rewards, of rewards [..., N] (Ahmadian et al. 2024)."""
    return group_advantage(rewards, "rloo", **layout)
