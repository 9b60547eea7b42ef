"""Group advantages by any estimator of `ESTIMATORS`: the gate that checks what is given, in front of functions and kernel."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import can_look_at, check_finite, check_flag, check_integer, check_tensor, is_integer
from maxrl_fast.algorithms.estimator import INPUTS
from maxrl_fast.algorithms.estimators import ESTIMATORS, Estimator, Group
from maxrl_fast.ops import _gate
from maxrl_fast.ops.group_advantage_kernel import DTYPES, check_sizes, group_sizes
from maxrl_fast.ops.group_advantage_kernel import group_advantage as _kernel
from maxrl_fast.ops.groups import Groups, Rows

_LARGEST = 1e150  # of the numbers that functions take: squares and differences in float64 stay finite


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
    scale_by_k: bool = False,
    max_group_size: int | None = None,
    **options: float,
) -> Tensor:
    """Return the advantages of rollouts within their groups (formulas: `ESTIMATORS`, `python -m maxrl_fast.objectives`).

    Args:
        rewards: [..., N], each row a group; or flat [S] with `offsets` or `group_ids`. Any real dtype.
        estimator: a name in `ESTIMATORS`, or a row of one's own, an `Estimator`.
        k: size of the max@k objective, for estimators that have it.
        order: truncation of MaxRL, 1 <= order <= N-1. Default: N-1, the full order of each group.
        offsets: [G+1] int64 from 0 to S: group g is rewards[offsets[g] : offsets[g+1]]. Groups may be empty.
        group_ids: [S], integers in any order; equal ids form a group.
        valid: bool, of the shape of `rewards`. Rollouts that are not valid are left out of their groups, and get 0.
        lengths, logprobs: of the shape of `rewards`, the tokens of each response and the mean of their log-probabilities.
        greedy_correct, greedy_rewards: whether the greedy response of the prompt is correct, and its reward: one per group, or
            of the shape of `rewards`.
        reward_parts: [R, *rewards.shape], the rewards whose weighted sum `rewards` is; NaN where one does not apply.
        reward_weights: R numbers, the weights of the parts, by default 1.
        prompts: one per group, for a function of one's own that asks for them.
        log_ratios: of the shape of `rewards`, log pi(y_i) - log mu(y_i) of whole responses that the policy mu sampled, clamped
            to [-20, 20]; the gradient is that of pi.
        scale_by_k: multiply by k, so that the mean gradient is that of max@k itself (maxpo, EI, L2O); MaxPO's eq. 13
            leaves the factor out.
        max_group_size: an upper bound of the sizes of uneven groups. On a GPU, with offsets or ids, estimators by rank keep
            tables of all sizes up to it, by default up to min(S, 4096): 8 bytes times its square. Estimators without a kernel
            pad the groups to it; by default they read the largest size from the GPU, or in torch.compile pad to S.
        options: further options of the estimator, such as eps, ddof, quantile, tau; defaults are in `ESTIMATORS`.

    Returns:
        Advantages of the shape and device of `rewards`, of its dtype if floating, else float32; not differentiable. In a group
        of one, every centred estimator gives 0. If groups are uneven, groups with too few rollouts for k get 0.

    Raises:
        ValueError: if the estimator is unknown, k or order is outside its range (of the largest group), or anything given is
            missing, not wanted, or does not fit; on the CPU also if a number of a rollout is not finite or, without a kernel,
            beyond 1e150, or not what the estimator takes, or if an advantage is beyond its dtype. On a GPU, where the check
            would wait for the device, the advantages of a group with such a number become NaN, for estimators that scale by
            the whole batch all advantages, and an advantage beyond its dtype becomes infinite.
        TypeError: if an argument that must be a tensor is something else.
    """
    check_tensor("rewards", rewards)
    shape, uneven = rewards.shape, offsets is not None or group_ids is not None
    if not shape or (uneven and len(shape) != 1):
        wanted = "flat [S] with offsets or group_ids" if uneven else "[..., N]"
        raise ValueError(f"rewards must be {wanted}, got the shape {tuple(shape)}")
    asked = (estimator, None if uneven else shape[-1], k, order, scale_by_k, tuple(options.items()))
    try:
        plan = _plan(*asked) if torch.compiler.is_compiling() else _cached_plan(*asked)  # a compiler traces no cache
    except TypeError:  # an argument that cannot be hashed is refused by name
        plan = _plan(*asked)
    given: dict[str, Any] = {"lengths": lengths, "logprobs": logprobs, "greedy_correct": greedy_correct}
    given |= {"greedy_rewards": greedy_rewards, "reward_parts": reward_parts, "prompts": prompts, "log_ratios": log_ratios}
    if tuple(value is not None for value in given.values()) != plan.inputs:
        _complain_of_inputs(plan, given)
    _check_tensors(rewards, offsets, group_ids, valid, given)
    if max_group_size is not None:
        check_integer("max_group_size", max_group_size, "an integer of at least 0", lambda x: x >= 0)
        max_group_size = min(max_group_size, torch.iinfo(torch.int64).max)
    if reward_parts is not None:
        weights = [1.0] * len(reward_parts) if reward_weights is None else reward_weights
        given["reward_weights"] = checked = tuple(check_finite("each of reward_weights", weight) for weight in weights)
        if len(checked) != len(reward_parts):
            raise ValueError(f"reward_weights must be a number for each of the {len(reward_parts)} rewards, got {len(checked)}")
    elif reward_weights is not None:
        raise ValueError(f"{plan.name} takes no reward_weights")

    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    if rewards.numel() == 0:
        return torch.zeros_like(rewards, dtype=dtype)
    rewards = rewards.detach()
    groups = Groups.of(rewards, offsets, group_ids, valid)
    if plan.by_kernel and _gate.has_kernels(rewards.device):
        if rewards.dtype not in DTYPES:  # large integers do not fit into float32
            rewards = rewards.float() if rewards.element_size() <= 2 else rewards.double()
        advantages: Tensor = _kernel(
            *(groups.view(rewards), groups.offsets, groups.order, groups.valid),
            *(plan.name, plan.size, list(plan.options.values()), max_group_size or 0),
        )
    else:
        advantages = _by_function(plan, groups, rewards, dtype, given, max_group_size or 0)
    if scale_by_k:
        advantages = advantages * plan.size
    if advantages.dtype != dtype:
        advantages = advantages.to(dtype)
    _check_fit(plan.name, advantages)
    return advantages if advantages.shape == shape else advantages.view(shape)


@dataclass(frozen=True)
class _Plan:
    """The checked numbers of a call."""

    name: str
    row: Estimator
    by_kernel: bool
    inputs: tuple[bool, ...]  # which of INPUTS it needs
    options: dict[str, float]
    size: int  # 0: the largest that fits


def _plan(
    estimator: str | Estimator,
    n: int | None,
    k: int | None,
    order: int | None,
    scale_by_k: bool,
    given: tuple[tuple[str, float], ...],
) -> _Plan:
    row = estimator_of(estimator)
    name = row.name
    check_flag("scale_by_k", scale_by_k)
    options = row.resolve_options(name, dict(given))
    if scale_by_k and not row.scales_by_k:
        raise ValueError(f"{name} takes no scale_by_k")
    is_alone = n == 1 and row.centred  # its advantage is 0, whatever the size
    size = row.resolve_size(name, None if is_alone else n, k, order)
    by_kernel = row.kernel is not None and isinstance(estimator, str)
    return _Plan(name, row, by_kernel, tuple(input_name in row.inputs for input_name in INPUTS), options, size)


_cached_plan = lru_cache(maxsize=1024, typed=True)(_plan)  # typed: k = 2.0 is not k = 2


def forget_plans() -> None:
    """Forget what was computed from the rows of estimators, after one has changed."""
    _cached_plan.cache_clear()


def estimator_of(estimator: str | Estimator) -> Estimator:
    """Return the row of an estimator; raise ValueError where there is none of this name."""
    row = ESTIMATORS.get(estimator) if isinstance(estimator, str) else estimator
    if not isinstance(row, Estimator):
        raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r:.80}")
    return row


def _by_function(
    plan: _Plan, groups: Groups, rewards: Tensor, dtype: torch.dtype, given: dict[str, Any], max_group_size: int
) -> Tensor:
    """Return the advantages, like the viewed rewards, from the estimator's function."""
    row, name, device = plan.row, plan.name, rewards.device
    if not row.takes_valid:
        if groups.valid is not None:
            raise ValueError(f"{name} has no parameter valid, so all rewards must be there")
        max_group_size = 0  # wider rows would not be full
    if can_look_at(rewards) and (groups.offsets is not None or groups.valid is not None):
        sizes = group_sizes(groups.view(rewards), groups.offsets, groups.order, groups.valid)
        check_sizes(row, name, plan.size, sizes[-1], max_group_size)
    rows = Rows.of(groups, device, max_group_size)
    if not row.takes_valid and groups.offsets is not None and not bool(rows.exists.all()):
        raise ValueError(f"{name} takes groups of equal size, got the sizes {rows.present.sum(1)[:8].tolist()}")
    values = _padded(rows, rewards, given)
    unusable = _unusable_groups(row, values, rows)
    if unusable is not None:
        values["rewards"] = values["rewards"].masked_fill(unusable, 0.0)
    group = Group(values.pop("rewards"), rows.exists, dtype)
    if row.size is not None and plan.size:
        values[row.size.name] = plan.size
    with torch.no_grad():
        advantages = row.function(group, **values, **plan.options)
    _check_result(name, advantages, group)
    advantages = advantages.double()
    if plan.size and row.size is not None:
        advantages = advantages.masked_fill(group.n < plan.size + row.size.below_n, 0.0)
    if unusable is not None:
        advantages = advantages.masked_fill(unusable, torch.nan)
    return rows.flatten(advantages)


def _padded(rows: Rows, rewards: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """Return rewards and inputs by name, tensors as [..., G, W]: float64, int64 or bool."""
    values: dict[str, Any] = {"rewards": rows.pad(rewards.double())}
    for key, value in given.items():
        if isinstance(value, Tensor):
            value = value.detach().double() if value.is_floating_point() else value
            value = value if value.dtype in (torch.float64, torch.bool) else value.long()
            is_greedy, leading = key.startswith("greedy"), value.shape[: value.dim() - rewards.dim()]
            values[key] = rows.spread(key, value, rewards.shape) if is_greedy else rows.pad(value, *leading)
        elif value is not None:
            values[key] = value
    return values


def _unusable_groups(row: Estimator, values: dict[str, Any], rows: Rows) -> Tensor | None:
    """Raise ValueError for the first number that the function cannot take. Where the device would have to be waited for, return
    which groups must become NaN, [G, 1] bool."""
    unusable = rows.too_long
    for key, value in values.items():
        if isinstance(value, Tensor) and value.dtype != torch.bool:
            wrong = _is_unusable(key, value, row.binary) & rows.exists
            if not can_look_at(wrong):
                unusable = _any(wrong, row.over_batch) | (False if unusable is None else unusable)
            elif bool(wrong.any()):
                _refuse(row, key, value, wrong, rows)
    return unusable


def _is_unusable(key: str, x: Tensor, binary: bool) -> Tensor:
    if key == "lengths":
        return x < 0
    if key == "rewards" and binary:
        return (x != 0) & (x != 1)
    if key == "log_ratios":
        return x.isnan()  # they are clamped
    return x.abs() > _LARGEST if key == "reward_parts" else ~(x.abs() <= _LARGEST)  # NaN: a part that does not apply


def _any(wrong: Tensor, over_batch: bool) -> Tensor:
    """Return whether something is wrong in each group, [G, 1], or over the batch, [1, 1], of [..., G, W]."""
    wrong = wrong.any(-1, keepdim=True).view(-1, wrong.shape[-2], 1).any(0)
    return wrong.any(0, keepdim=True) if over_batch else wrong


def _refuse(row: Estimator, key: str, values: Tensor, wrong: Tensor, rows: Rows) -> None:
    place = wrong.nonzero()[0].tolist()
    number, (group, rollout) = float(values[tuple(place)]), place[-2:]
    wanted = {"log_ratios": "numbers", "lengths": "at least 0"}.get(key, "finite")
    if math.isfinite(number) and key != "lengths":
        is_binary = key == "rewards" and row.binary
        wanted = f"0 or 1 for {row.name}" if is_binary else f"at most {_LARGEST:g} in magnitude for {row.name}"
    index = "" if rows.index is None else f" (index {int(rows.index[group, rollout])})"
    raise ValueError(f"{key} must be {wanted}, got {number} in group {group}, rollout {rollout}{index}")


def _check_result(name: str, advantages: Any, group: Group) -> None:
    """Raise ValueError where a function has not returned advantages."""
    if not isinstance(advantages, Tensor):
        raise ValueError(f"{name} must return a tensor, got {type(advantages).__name__}")
    shape, device = group.rewards.shape, group.rewards.device
    if advantages.shape != shape or not advantages.is_floating_point() or advantages.device != device:
        raise ValueError(
            f"{name} must return a floating tensor of shape {tuple(shape)} on {device}, got {advantages.dtype} of shape "
            f"{tuple(advantages.shape)} on {advantages.device}"
        )


def _check_fit(name: str, results: Tensor) -> None:
    """Raise ValueError where an advantage is NaN or beyond its dtype. On a GPU, where the check would wait, it stays."""
    if not can_look_at(results):
        return
    values = results if results.element_size() > 1 else results.float()  # float8 has no sums
    if math.isfinite(values.sum()):  # much faster than to look at every number
        return
    beyond = ~values.isfinite()
    if bool(beyond.any()):
        index = int(beyond.flatten().nonzero()[0])
        value = float(values.flatten()[index])
        raise ValueError(f"the advantages of {name} must be finite in {results.dtype}, got {value} at index {index}")


def _complain_of_inputs(plan: _Plan, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if (value is None) == (name in plan.row.inputs):
            raise ValueError(f"{plan.name} {'needs' if value is None else 'takes no'} {name}")


def _check_tensors(
    rewards: Tensor, offsets: Tensor | None, group_ids: Tensor | None, valid: Tensor | None, inputs: dict[str, Any]
) -> None:
    layout = {"offsets": offsets, "group_ids": group_ids, "valid": valid}
    for name, kind in _KINDS.items():
        tensor = layout[name] if name in layout else inputs[name]
        if tensor is not None:
            check_tensor(name, tensor, rewards.device, "the rewards are")
            if kind is not None:
                _check_kind(name, tensor, kind)
                if name != "greedy_correct" and tensor.shape != rewards.shape:  # it may have one value per group
                    raise ValueError(
                        f"{name} must have the shape of rewards, {tuple(rewards.shape)}, got {tuple(tensor.shape)}"
                    )
    parts = inputs["reward_parts"]
    if parts is not None and (parts.dim() != rewards.dim() + 1 or parts.shape[1:] != rewards.shape or not len(parts)):
        wanted = ", ".join(["R", *map(str, rewards.shape)])
        raise ValueError(f"reward_parts must have the shape ({wanted}), got {tuple(parts.shape)}")


# None: any real dtype, and a shape that is checked elsewhere.
_KINDS = {"offsets": None, "group_ids": "integers", "valid": "bool", "lengths": "integers", "logprobs": "floating"}
_KINDS |= {"greedy_correct": "bool", "greedy_rewards": None, "reward_parts": None, "log_ratios": "floating"}


def _check_kind(name: str, tensor: Tensor, kind: str) -> None:
    is_kind = {"floating": tensor.is_floating_point(), "integers": is_integer(tensor), "bool": tensor.dtype == torch.bool}
    if not is_kind[kind]:
        raise ValueError(f"{name} must be {kind}, got {tensor.dtype}")


def maxpo_advantage(rewards: Tensor, k: int, **layout: Any) -> Tensor:
    """Return S_i - S_-i of rewards [..., N], 1 <= k <= N-1 (MaxPO, section 4.1); its mean gradient is (1/k) grad max@k.

    This function and the functions below also take offsets, group_ids and valid, as in `group_advantage`.
    """
    return group_advantage(rewards, "maxpo", k=k, **layout)


def expected_improvement(rewards: Tensor, k: int, **layout: Any) -> Tensor:
    """Return EI_i = S_i - M_-i of rewards [..., N], 2 <= k <= N (MaxPO, eq. 5)."""
    return group_advantage(rewards, "expected_improvement", k=k, **layout)


def leave_two_out_baseline(rewards: Tensor, k: int, **layout: Any) -> Tensor:
    """Return L2O_i of rewards [..., N], 2 <= k <= N-1 (MaxPO, eq. 6); expected_improvement minus this is maxpo_advantage."""
    return group_advantage(rewards, "leave_two_out", k=k, **layout)


def maxrl_advantage(rewards: Tensor, order: int | None = None, **layout: Any) -> Tensor:
    """Return the MaxRL advantage of rewards [..., N]: the sum of maxpo_advantage over k = 1..order, by default N-1.

    For rewards 0 or 1 and order N-1 it is (r - mean)/mean, and 0 where mean = 0 (MaxRL, Algorithm 1).
    """
    return group_advantage(rewards, "maxrl", order=order, **layout)


def grpo_advantage(rewards: Tensor, *, eps: float = 1e-6, ddof: int = 1, **layout: Any) -> Tensor:
    """Return (r - mean)/(std + eps) of rewards [..., N] (Shao et al. 2024); exactly 0 in a group of equal rewards."""
    return group_advantage(rewards, "grpo", eps=eps, ddof=ddof, **layout)


def rloo_advantage(rewards: Tensor, **layout: Any) -> Tensor:
    """Return r minus the mean of the others, of rewards [..., N] (Ahmadian et al. 2024)."""
    return group_advantage(rewards, "rloo", **layout)
