"""Group advantages by any estimator: argument checks, then the kernel or the function."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import check_finite, check_tensor, is_host_readable, is_integer
from maxrl_fast.algorithms.estimator import INPUTS, OBJECTS
from maxrl_fast.algorithms.estimators import Estimator, Group, find_estimator
from maxrl_fast.algorithms.options import check_options
from maxrl_fast.errors import InputError
from maxrl_fast.ops.dispatch import eager, has_kernels
from maxrl_fast.ops.group_advantage_kernel import group_advantage as _kernel
from maxrl_fast.ops.groups import PaddedGroups, check_numbers

# Up to it squares and differences stay finite: kLargestReward of csrc/group_advantage.h.
_LARGEST = 1e150
# Kinds of the tensors with the rewards' shape; greedy_correct may also have one value per group.
_KINDS = {
    **{"valid": "bool", "greedy_correct": "bool", "group_ids": "integers", "lengths": "integers"},
    **{"logprobs": "floating", "log_ratios": "floating", "truncated": "bool"},
}


@eager
def group_advantage(
    rewards: Tensor | list[Any],
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
    truncated: Tensor | None = None,
    **options: float,
) -> Tensor:
    """Return the advantages of rollouts within their groups (formulas: `ESTIMATORS`).

    Args:
        rewards: [G, N] or [..., N], each row a group; or flat [S] with offsets or group_ids. Any
            real dtype, or lists of numbers.
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
        truncated: bool, like rewards: responses that the length limit ended.
        prompts, texts, components: given to a custom function that asks for them as they are.
        log_ratios: like rewards: log pi(y_i) - log mu(y_i) of whole responses sampled by the policy
            mu, clamped to [-20, 20]; the gradient is that of pi.
        options: further options of the estimator, such as eps, ddof, quantile, tau.

    Returns:
        Advantages like rewards, float32 if these are not floating; not differentiable. Groups of
        one with centred estimators, and uneven groups with too few rollouts for k, get 0. A custom
        function of rewards [G, N] with `lengths` may return one for each of their tokens, [T].

    Uneven groups are padded to the largest, whose size is read from the device. On the CPU numbers
    that are not finite, not allowed for the estimator or beyond 1e150 are errors. A GPU would wait:
    there the advantages of the group, or the batch, become NaN."""
    if isinstance(rewards, list):
        rewards = torch.tensor(rewards)
    check_tensor("rewards", rewards)
    shape, is_flat = rewards.shape, offsets is not None or group_ids is not None
    if (len(shape) == 1) != is_flat or not shape:
        wanted = "[..., N], or flat [S] with offsets or group_ids"
        raise InputError(f"rewards must be {wanted}, got the shape {tuple(shape)}")
    row = find_estimator(estimator)
    is_alone = not is_flat and shape[-1] == 1 and row.centred  # its advantage is 0, for any size
    size = row.resolve_size(None if is_flat or is_alone else shape[-1], k, order)
    numbers = check_options(row.name, row.options, options)
    given = lengths, logprobs, greedy_correct, greedy_rewards, reward_parts, prompts, log_ratios
    known = dict(zip(INPUTS, (*given, texts, components, truncated), strict=True))
    inputs = _inputs(row, known, reward_weights)
    _check_tensors(rewards, inputs | {"offsets": offsets, "group_ids": group_ids, "valid": valid})
    if reward_parts is not None:
        inputs["reward_weights"] = _weights(reward_weights, len(reward_parts))
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    if rewards.numel() == 0:
        return torch.zeros_like(rewards, dtype=dtype)
    if valid is not None and not row.takes_valid:
        raise ValueError(f"{row.name} has no parameter valid, so all rewards must be there")
    groups = PaddedGroups.of(rewards, offsets, group_ids, valid)
    if size and groups.valid is not None and is_host_readable(groups.valid):
        largest = int(groups.valid.sum(1).max())
        if row.size is not None and largest > 1:
            row.size.check(row.name, size, largest)
    padded = groups.pad(rewards.detach())  # [G, N]
    if row.kernel is not None and isinstance(estimator, str) and has_kernels(rewards.device):
        is_small = padded.dtype == torch.float32 or padded.element_size() <= 2
        padded = padded.to(torch.float32 if is_small else torch.float64).contiguous()
        mask = None if groups.valid is None else groups.valid.contiguous()
        advantages: Tensor = _kernel(padded, mask, row.name, size, list(numbers.values()))
    else:
        inputs = {"rewards": rewards.detach()} | inputs
        advantages = _by_function(row, groups, inputs, dtype, size, numbers)
    if advantages.dim() == 2:  # otherwise of tokens
        advantages = groups.unpad(advantages)
    advantages = advantages.to(dtype)
    if is_host_readable(advantages) and not math.isfinite(_sum(advantages)):
        check_numbers(row, "rewards", padded.double(), groups, _LARGEST)
        beyond = (~advantages.double().isfinite()).flatten().nonzero()
        if len(beyond):
            got = f"{float(advantages.flatten()[beyond[0]])} at index {int(beyond[0])}"
            raise ValueError(f"the advantages of {row.name} must be finite in {dtype}, got {got}")
    return advantages


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
    groups: PaddedGroups,
    given: dict[str, Any],
    dtype: torch.dtype,
    size: int,
    options: dict[str, float],
) -> Tensor:
    """Return float64 advantages [G, N], or [T] of tokens, by the estimator's function."""
    valid = groups.valid
    if valid is not None and not row.takes_valid and not bool(valid.all()):
        sizes = valid.sum(1)[:8].tolist()
        raise ValueError(f"{row.name} takes groups of equal size, got the sizes {sizes}")
    unusable, values = None, {}
    for name, x in given.items():
        if isinstance(x, Tensor):
            if name.startswith("greedy") and x.numel() == groups.num_groups:
                x = x.reshape(-1, 1)  # one for each group
            elif name.startswith("greedy") and x.shape != groups.shape:
                wanted = "one value per group, or the shape of rewards"
                raise ValueError(f"{name} must have {wanted}, got the shape {tuple(x.shape)}")
            else:
                x = groups.pad(x)
            if name == "rewards" or x.is_floating_point():
                x = x.double()
            elif x.dtype != torch.bool:
                x = x.long()
            x = x if valid is None else x.masked_fill(~valid, 0)
            if x.dtype != torch.bool:
                wrong = check_numbers(row, name, x, groups, _LARGEST)
                if wrong is not None:
                    unusable = wrong if unusable is None else unusable | wrong
        values[name] = x
    rewards = values.pop("rewards")
    usable = rewards if unusable is None else rewards.masked_fill(unusable, 0.0)
    exists = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    group = Group(usable, exists, dtype)
    if row.size is not None and size:
        values[row.size.name] = size
    advantages = row.compute(group, **values, **options)
    if not isinstance(advantages, Tensor):
        raise ValueError(f"{row.name} must return a tensor, got {type(advantages).__name__}")
    shapes = [rewards.shape]
    if advantages.shape != rewards.shape and "lengths" in values and groups.index is None:
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
    return torch.where(exists, advantages, 0.0)


def _sum(x: Tensor) -> float:
    return float((x if x.element_size() > 1 else x.float()).sum())  # float8 has no sums


def maxpo_advantage(rewards: Tensor, k: int, **layout: Any) -> Tensor:
    """Return S_i - S_-i of rewards [..., N], 1 <= k <= N-1 (MaxPO, section 4.1).

    Its mean gradient is (1/k) grad max@k. This and the next functions also take offsets, group_ids
    and valid, as in `group_advantage`."""
    return group_advantage(rewards, "maxpo", k=k, **layout)


def expected_improvement(rewards: Tensor, k: int, **layout: Any) -> Tensor:
    """Return EI_i = S_i - M_-i of rewards [..., N], 2 <= k <= N (MaxPO, eq. 5)."""
    return group_advantage(rewards, "expected_improvement", k=k, **layout)


def leave_two_out_baseline(rewards: Tensor, k: int, **layout: Any) -> Tensor:
    """Return L2O_i of rewards [..., N], 2 <= k <= N-1 (MaxPO, eq. 6)."""
    return group_advantage(rewards, "leave_two_out", k=k, **layout)


def maxrl_advantage(rewards: Tensor, order: int | None = None, **layout: Any) -> Tensor:
    """Return the sum of maxpo_advantage over k = 1..order, default N-1, of rewards [..., N].

    For rewards 0 or 1 and order N-1 it is (r - mean)/mean, 0 if mean = 0 (MaxRL, Algorithm 1)."""
    return group_advantage(rewards, "maxrl", order=order, **layout)


def grpo_advantage(rewards: Tensor, *, eps: float = 1e-6, ddof: int = 1, **layout: Any) -> Tensor:
    """Return (r - mean)/(std + eps) of rewards [..., N] (Shao et al. 2024); 0 if they are equal."""
    return group_advantage(rewards, "grpo", eps=eps, ddof=ddof, **layout)


def rloo_advantage(rewards: Tensor, **layout: Any) -> Tensor:
    """Return r minus the mean of the other rewards, of rewards [..., N] (Ahmadian et al. 2024)."""
    return group_advantage(rewards, "rloo", **layout)
