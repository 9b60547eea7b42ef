"""Group advantages by any estimator of `ESTIMATORS`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import can_look_at, check_finite, check_flag, check_integer, check_tensor, is_integer
from maxrl_fast.ops.custom_advantage import CustomAdvantage
from maxrl_fast.ops.estimators import ESTIMATORS, Estimator, Inputs
from maxrl_fast.ops.group_advantage_kernel import DTYPES
from maxrl_fast.ops.group_advantage_kernel import group_advantage as _kernel
from maxrl_fast.ops.group_advantage_reference import result_dtype
from maxrl_fast.ops.groups import Groups

# What estimators take beside the rewards.
INPUTS = ("lengths", "logprobs", "greedy_correct", "greedy_rewards", "reward_parts", "prompts", "log_ratios")


def group_advantage(
    rewards: Tensor,
    estimator: str,
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
        estimator: a name in `ESTIMATORS`.
        k: size of the max@k objective, for estimators that have it.
        order: truncation of MaxRL, 1 <= order <= N-1. Default: N-1, the full order of each group.
        offsets: [G+1] int64 from 0 to S: group g is rewards[offsets[g] : offsets[g+1]]. Groups may be empty.
        group_ids: [S], integers in any order; equal ids form a group.
        valid: bool, of the shape of `rewards`. Rollouts that are not valid are left out of their groups, and get 0.
        lengths: integers of the shape of `rewards`, tokens of each response, for opo and reinforce_pp_tokens.
        logprobs: of the shape of `rewards`, mean log-probability of the tokens of each response, for differential_smoothing and
            unlikeliness.
        greedy_correct: bool, whether the greedy response of the prompt is correct, for self: one per group, or of the shape of
            `rewards`.
        greedy_rewards: reward of the greedy response of the prompt, for remax: one per group, or of the shape of `rewards`.
        reward_parts: [R, *rewards.shape], the rewards whose weighted sum `rewards` is, for gdpo and hero, which take them one
            by one, and `rewards` not at all. NaN where a reward does not apply to a rollout.
        reward_weights: R numbers, the weights of the parts, by default 1.
        prompts: one per group, for a registered function that asks for them.
        log_ratios: of the shape of `rewards`, log pi(y_i) - log mu(y_i) of whole responses, for the estimators whose rollouts
            the policy mu sampled and whose gradient is that of pi: bon_off_policy, maxpo_off_policy, maxrl_off_policy. Clamped
            to [-20, 20].
        scale_by_k: multiply by k, so that the mean gradient is that of max@k itself (maxpo, EI, L2O); MaxPO's eq. 13
            leaves the factor out.
        max_group_size: an upper bound of the sizes of uneven groups. On a GPU, with offsets or ids, estimators by rank keep
            tables of all sizes up to it, by default up to min(S, 4096): 8 bytes times its square.
        options: further options of the estimator, such as eps, ddof, quantile, tau; defaults are in `ESTIMATORS`.

    Returns:
        Advantages of the shape and device of `rewards`, of its dtype if floating, else float32; not differentiable. In a group
        of one, every centred estimator gives 0. If groups are uneven, groups with too few rollouts for k get 0.

    Raises:
        ValueError: if the estimator is unknown; if k or order is outside its range (of the largest group); if an input or
            option is missing, or the estimator does not take it; if shapes, dtypes, devices or offsets do not fit; on the CPU
            also if a reward is not finite, or not 0 or 1 where it must be, a length is below 0, a log-ratio is NaN, or an
            advantage is beyond its dtype. On a GPU, where the check would wait for the device, the advantages of a group with
            such a reward or log-ratio become NaN, for estimators that scale by the whole batch all advantages, and an
            advantage beyond its dtype becomes infinite.
        TypeError: if an argument that must be a tensor is something else.
    """
    check_tensor("rewards", rewards)
    shape, uneven = rewards.shape, offsets is not None or group_ids is not None
    if not shape or (uneven and len(shape) != 1):
        wanted = "flat [S] with offsets or group_ids" if uneven else "[..., N]"
        raise ValueError(f"rewards must be {wanted}, got the shape {tuple(shape)}")
    plan = _plan_of(estimator, None if uneven else shape[-1], k, order, scale_by_k, tuple(options.items()))
    given: dict[str, Any] = {"lengths": lengths, "logprobs": logprobs, "greedy_correct": greedy_correct}
    given |= {"greedy_rewards": greedy_rewards, "reward_parts": reward_parts, "prompts": prompts, "log_ratios": log_ratios}
    if tuple(value is not None for value in given.values()) != plan.inputs:
        _complain_of_inputs(estimator, plan.row, given)
    _check_tensors(rewards, offsets, group_ids, valid, given)
    if max_group_size is not None:
        check_integer("max_group_size", max_group_size, "an integer of at least 0", lambda x: x >= 0)
        max_group_size = min(max_group_size, torch.iinfo(torch.int64).max)

    dtype = result_dtype(rewards)
    if rewards.numel() == 0:
        return torch.zeros_like(rewards, dtype=dtype)
    if rewards.requires_grad:
        rewards = rewards.detach()
    groups = Groups.of(rewards, offsets, group_ids, valid)
    inputs = _inputs_of(estimator, plan, groups, rewards, given, reward_weights, max_group_size or 0)
    if plan.row.custom is not None:
        advantages = _by_function(plan.row.custom, inputs, k)
    else:
        advantages = _by_kernel(estimator, plan, inputs)
    if advantages.dtype != dtype:
        advantages = advantages.to(dtype)
    if plan.row.custom is None:
        _check_fit(f"the advantages of {estimator}", advantages)
    return advantages if advantages.shape == shape else advantages.view(shape)


def _inputs_of(
    estimator: str,
    plan: "_Plan",
    groups: Groups,
    rewards: Tensor,
    given: dict[str, Any],
    reward_weights: Sequence[float] | None,
    max_group_size: int,
) -> Inputs:
    """Return what the steps around the kernel take, in the layout of the groups."""
    lengths, logprobs, parts = given["lengths"], given["logprobs"], given["reward_parts"]
    log_ratios = given["log_ratios"]
    greedy_correct, greedy_rewards, shape = given["greedy_correct"], given["greedy_rewards"], rewards.shape
    return Inputs(
        groups=groups,
        rewards=groups.view(_kernel_dtype(rewards)),
        lengths=None if lengths is None else groups.view(lengths.long()),
        logprobs=None if logprobs is None else groups.view(_kernel_dtype(logprobs.detach())),
        greedy_correct=None if greedy_correct is None else groups.spread("greedy_correct", greedy_correct, shape),
        greedy_rewards=None if greedy_rewards is None else _spread_rewards(groups, greedy_rewards, shape),
        prompts=given["prompts"],
        reward_parts=None if parts is None else _kernel_dtype(parts.detach()).contiguous().view(-1, *groups.shape),
        reward_weights=_weights(estimator, parts, reward_weights),
        log_ratios=None if log_ratios is None else groups.view(log_ratios.detach()),
        size=int(plan.parameter) if plan.row.size is not None else 0,
        max_group_size=max_group_size,
    )


def _by_kernel(estimator: str, plan: "_Plan", inputs: Inputs) -> Tensor:
    """Return the advantages, [G, N] or [S], from the kernel and the steps around it."""
    row, groups, rewards = plan.row, inputs.groups, inputs.rewards
    if row.before is not None:
        rewards = row.before(inputs, plan.options)
        _check_fit(f"the rewards of {estimator} with its options", rewards, given=inputs.rewards)
    advantages: Tensor = _kernel(
        rewards,
        groups.offsets,
        groups.order,
        groups.valid,
        inputs.lengths,
        estimator,
        plan.parameter,
        plan.eps,
        plan.ddof,
        plan.gain,
        plan.bias,
        inputs.max_group_size,
    )
    if row.after is not None:
        advantages = row.after(advantages, inputs, plan.options)
        if groups.valid is not None:
            advantages = advantages.masked_fill(~groups.valid, 0.0)
    return advantages


def _check_fit(what: str, results: Tensor, given: Tensor | None = None) -> None:
    """Raise ValueError where a result is beyond its dtype, though the number `given` for it is finite.

    On a GPU, where the check would wait for the device, the result stays infinite.
    """
    if not can_look_at(results):
        return
    values = results if results.element_size() > 1 else results.float()  # float8 has no sums
    if math.isfinite(values.sum()):  # much faster than to look at every number
        return
    beyond = ~values.isfinite() if given is None else ~values.isfinite() & given.isfinite()
    if bool(beyond.any()):
        index = int(beyond.flatten().nonzero()[0])
        value = float(values.flatten()[index])
        why = "rewards, logprobs or options are too large"
        raise ValueError(f"{what} must be finite in {results.dtype}, got {value} at index {index}: {why}")


def _by_function(custom: CustomAdvantage, inputs: Inputs, k: int | None) -> Tensor:
    """Return the advantages, [G, N] or [S], from a user's function, which takes groups of equal size."""
    groups = inputs.groups
    order = groups.order
    if groups.valid is not None and "valid" not in custom.inputs:
        raise ValueError(f"{custom.name} has no parameter valid, so all rewards must be there")
    if groups.offsets is None:
        shape = groups.shape
    else:
        sizes = groups.offsets.diff()
        sizes = sizes if order is None else sizes[sizes > 0]  # equal ids leave empty groups at the end
        size = int(sizes[0]) if len(sizes) else 0
        if not size or bool((sizes != size).any()) or int(groups.offsets[0]) or len(sizes) * size != groups.shape[0]:
            raise ValueError(f"{custom.name} takes groups of equal size, got the sizes {sizes[:8].tolist()}")
        shape = (len(sizes), size)

    def even(values: Tensor | None) -> Tensor | None:
        return None if values is None else (values if order is None else values[order]).view(shape)

    rewards, valid = even(inputs.rewards), even(groups.valid)
    assert rewards is not None
    advantages = custom(
        rewards if rewards.is_floating_point() else rewards.float(),
        k=k,
        lengths=even(inputs.lengths),
        logprobs=even(inputs.logprobs),
        valid=valid,
        prompts=inputs.prompts,
    )
    if valid is not None:
        advantages = advantages.masked_fill(~valid, 0.0)
    advantages = advantages.view(groups.shape)
    return advantages if order is None else torch.zeros_like(advantages).scatter(0, order, advantages)


@dataclass(frozen=True)
class _Plan:
    """The checked numbers of a call."""

    row: Estimator
    inputs: tuple[bool, ...]  # which of INPUTS it needs
    options: dict[str, float]
    parameter: float  # the size (0: the largest that fits) or the quantile
    eps: float
    ddof: int
    gain: float
    bias: float


def _plan(
    estimator: str,
    n: int | None,
    k: int | None,
    order: int | None,
    scale_by_k: bool,
    given: tuple[tuple[str, float], ...],
) -> _Plan:
    row = estimator_of(estimator)
    check_flag("scale_by_k", scale_by_k)
    options = row.resolve_options(estimator, dict(given))
    if scale_by_k and not row.scales_by_k:
        raise ValueError(f"{estimator} takes no scale_by_k")
    is_alone = n == 1 and row.is_centred  # its advantage is 0, whatever the size
    size = row.resolve_size(estimator, None if is_alone else n, k, order)
    gain, bias = row.affine(options)
    return _Plan(
        row=row,
        inputs=tuple(name in row.inputs for name in INPUTS),
        options=options,
        parameter=float(size) if row.size is not None else options.get("quantile", 0.0),
        eps=options.get("eps", 0.0),
        ddof=int(options.get("ddof", 0.0)),
        gain=gain * size if scale_by_k else gain,
        bias=bias,
    )


_cached_plan = lru_cache(maxsize=1024, typed=True)(_plan)  # typed: k = 2.0 is not k = 2


def _plan_of(
    estimator: str, n: int | None, k: int | None, order: int | None, scale_by_k: bool, given: tuple[tuple[str, float], ...]
) -> _Plan:
    if torch.compiler.is_compiling():  # a compiler traces no cache
        return _plan(estimator, n, k, order, scale_by_k, given)
    try:
        return _cached_plan(estimator, n, k, order, scale_by_k, given)
    except TypeError:  # an argument that cannot be hashed is refused by name
        return _plan(estimator, n, k, order, scale_by_k, given)


def forget_plans() -> None:
    """Forget what was computed from the rows of estimators, after one has changed."""
    _cached_plan.cache_clear()


def estimator_of(estimator: str) -> Estimator:
    """Return the row of an estimator; raise ValueError where there is none of this name."""
    row = ESTIMATORS.get(estimator) if isinstance(estimator, str) else None
    if row is None:
        raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r:.80}")
    return row


def _kernel_dtype(tensor: Tensor) -> Tensor:
    if tensor.dtype in DTYPES:
        return tensor
    return tensor.float() if tensor.element_size() <= 2 else tensor.double()  # large integers do not fit into float32


def _complain_of_inputs(estimator: str, row: Estimator, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if (value is None) == (name in row.inputs):
            raise ValueError(f"{estimator} {'needs' if value is None else 'takes no'} {name}")


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
    if inputs["lengths"] is not None and can_look_at(inputs["lengths"]):
        _check_lengths(inputs["lengths"], valid)
    log_ratios = inputs["log_ratios"]
    if log_ratios is not None and can_look_at(log_ratios):
        unknown = log_ratios.isnan() if valid is None else log_ratios.isnan() & valid
        if bool(unknown.any()):
            raise ValueError(f"log_ratios must be numbers, got nan at index {int(unknown.flatten().nonzero()[0])}")


# None: any real dtype, and a shape that is checked elsewhere.
_KINDS = {"offsets": None, "group_ids": "integers", "valid": "bool", "lengths": "integers", "logprobs": "floating"}
_KINDS |= {"greedy_correct": "bool", "greedy_rewards": None, "reward_parts": None, "log_ratios": "floating"}


def _check_kind(name: str, tensor: Tensor, kind: str) -> None:
    is_kind = {"floating": tensor.is_floating_point(), "integers": is_integer(tensor), "bool": tensor.dtype == torch.bool}
    if not is_kind[kind]:
        raise ValueError(f"{name} must be {kind}, got {tensor.dtype}")


def _weights(estimator: str, parts: Tensor | None, weights: Sequence[float] | None) -> tuple[float, ...]:
    """Return the weight of each part; raise ValueError where there is not one finite number for each."""
    if parts is None:
        if weights is not None:
            raise ValueError(f"{estimator} takes no reward_weights")
        return ()
    given = [1.0] * len(parts) if weights is None else weights
    checked = tuple(check_finite("each of reward_weights", weight) for weight in given)
    if len(checked) != len(parts):
        raise ValueError(f"reward_weights must be a number for each of the {len(parts)} rewards, got {len(checked)}")
    return checked


def _spread_rewards(groups: Groups, greedy_rewards: Tensor, shape: torch.Size) -> Tensor:
    """Return the greedy reward of each rollout, 0 for those that are not valid."""
    spread = groups.spread("greedy_rewards", _kernel_dtype(greedy_rewards.detach()), shape)
    if groups.valid is not None:
        spread = spread.masked_fill(~groups.valid, 0)
    if can_look_at(spread) and not bool(spread.isfinite().all()):
        raise ValueError(f"greedy_rewards must be finite, got {float(spread[~spread.isfinite()][0])}")
    return spread


def _check_lengths(lengths: Tensor, valid: Tensor | None) -> None:
    counted = lengths.long()  # the largest unsigned numbers become negative
    below = counted < 0 if valid is None else (counted < 0) & valid
    if bool(below.any()):
        raise ValueError(f"lengths must be at least 0, got {int(counted[below][0])}")


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
