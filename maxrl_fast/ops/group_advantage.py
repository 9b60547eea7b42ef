"""Group advantages by any estimator, and how an estimator weighs a prompt (docs/advantages.md).

The kernel (csrc/group_advantage.h) computes those that have a `Kernel`; on a GPU nothing is read
back, so that a CUDA graph can capture it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributions import Binomial

from maxrl_fast import _C
from maxrl_fast.algorithms.arguments import (
    check_finite,
    check_integer,
    check_tensor,
    is_host_readable,
    is_integer,
)
from maxrl_fast.algorithms.estimator import INPUTS, OBJECTS, Kernel
from maxrl_fast.algorithms.estimators import ESTIMATORS, Estimator, Group, find_estimator
from maxrl_fast.algorithms.method import check_options
from maxrl_fast.errors import InputError
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.dispatch import (
    KernelLaunch,
    choices,
    eager,
    has_kernels,
    make_plan,
)
from maxrl_fast.runtime.loading import describe_error

# Up to it squares and differences stay finite: kLargestReward of csrc/group_advantage.h.
_LARGEST = 1e150
_MOST = 10_000  # n of effective_weight: the rewards of its n + 1 groups take 8 n^2 bytes
# Kinds of the tensors with the rewards' shape; greedy_correct may also have one value per group.
_KINDS = {"valid": "bool", "greedy_correct": "bool", "truncated": "bool", "lengths": "integers"}
_KINDS |= {"group_ids": "integers", "logprobs": "floating", "log_ratios": "floating"}


@eager
def group_advantage(
    rewards: Tensor | list[Any],
    estimator: str | Estimator,
    *,
    k: int | None = None,
    order: int | None = None,
    group_ids: Tensor | None = None,
    valid: Tensor | None = None,
    reward_weights: Sequence[float] | None = None,
    **given: Any,
) -> Tensor:
    """Return the advantages of rollouts within their groups (docs/advantages.md).

    Args:
        rewards: [G, N] or [..., N], each row a group; or flat [S] with group_ids. Any real dtype,
            or lists of numbers.
        estimator: a name in `ESTIMATORS`, a function of rewards [G, N], or an `Estimator`.
        k, order: of max@k, and of MaxRL: 1 <= order <= N-1, by default N-1 of each group.
        group_ids: [S] integers in any order; equal ids form a group.
        valid: bool, like rewards. Invalid rollouts are left out of their groups, and get 0.
        reward_weights: of the reward_parts, default 1.
        given: options of the estimator, such as eps, ddof, quantile, tau, and its inputs:
            lengths, logprobs, truncated, like rewards: tokens of each response, their mean
            log-prob, whether the length limit ended it.
            log_ratios, like rewards: log pi(y_i) - log mu(y_i) of responses sampled by mu.
            greedy_correct, greedy_rewards, [G] or like rewards: of the prompt's greedy response.
            reward_parts, [R, *rewards.shape]: their weighted sum is `rewards`; NaN: not applicable.
            prompts, texts, components: what a custom function asks for, as it is.

    Returns advantages like rewards, float32 if these are not floating; not differentiable. A custom
    function of rewards [G, N] with `lengths` may return one for each of their tokens, [T].

    Raises ValueError and TypeError. On the CPU numbers that are not finite, not allowed for the
    estimator or beyond 1e150 are errors; a GPU would wait, and the group, or the batch, is NaN."""
    if group_ids is None and valid is None and reward_weights is None:
        advantages = _of_full_groups(rewards, estimator, k, order, given)
        if advantages is not None:
            return advantages
    layout = {"group_ids": group_ids, "valid": valid}
    inputs = {name: given.pop(name) for name in INPUTS if name in given}
    return _of_groups(rewards, estimator, k, order, layout, reward_weights, inputs, given)


def _of_full_groups(
    rewards: Any, estimator: Any, k: Any, order: Any, options: dict[str, Any]
) -> Tensor | None:
    """Return what the CPU's kernel computes of rewards [G, N] as they are; None for all that needs
    another way, or an error."""
    row = ESTIMATORS.get(estimator) if type(estimator) is str else None
    if row is None or type(rewards) is not Tensor or not rewards.is_cpu:
        return None
    if len(shape := rewards.shape) != 2:
        return None
    if options and not options.keys() <= row.options.keys():
        return None
    key = row, shape[1], rewards.dtype, k, order, tuple(options)
    try:
        plan, _table = _plan(*key, *options.values())  # a table lives until the call is over
    except TypeError:  # what cannot be a key is refused by the other way
        return None
    if plan is None:
        return None
    advantages = torch.empty_like(rewards)
    are_finite = plan.run((rewards, advantages), torch.get_num_threads())
    return advantages if are_finite == 1 else None


@lru_cache(maxsize=256, typed=True)  # 2.0 is not an integer
def _plan(
    row: Estimator,
    n: int,
    dtype: torch.dtype,
    k: Any,
    order: Any,
    names: tuple[str, ...],
    *values: float,
) -> tuple[_C.Plan | None, Tensor | None]:
    """Return the kernel's plan for rewards [G, n], and its table; None without."""
    if row.kernel is None or row.inputs or dtype not in (torch.float32, torch.float64):
        return None, None
    size, numbers = _resolve(row, n, k, order, dict(zip(names, values, strict=True)))
    table = _table_of_full_groups(row, size, n, torch.device("cpu")) if row.kernel.table else None
    fields = dict.fromkeys(choices("group_advantage"), 0) | _moments(row.kernel, numbers)
    fields["tables"] = 0 if table is None else KernelLaunch(table.device).keep(table)
    slots = ["rewards:P.GN", "advantages:P.GN", "num_groups:=-G", "group_size:=-N"]
    return make_plan("group_advantage", False, dtype, fields, slots), table


def _moments(kernel: Kernel, options: dict[str, float]) -> dict[str, Any]:
    """Return the fields from `centred` on."""
    of_std = {"eps": options.get("eps", 0.0), "ddof": int(options.get("ddof", 0))}
    return {"centred": kernel.centred, "scale": kernel.scale, **of_std}


def _of_groups(
    rewards: Any,
    estimator: str | Estimator,
    k: int | None,
    order: int | None,
    layout: dict[str, Tensor | None],
    reward_weights: Sequence[float] | None,
    given: dict[str, Any],
    options: dict[str, Any],
) -> Tensor:
    rewards = torch.tensor(rewards) if isinstance(rewards, list) else rewards
    check_tensor("rewards", rewards)
    shape, (group_ids, valid) = rewards.shape, layout.values()
    is_flat = group_ids is not None
    if (len(shape) == 1) != is_flat or not shape:
        wanted = "[..., N], or flat [S] with group_ids"
        raise InputError(f"rewards must be {wanted}, got the shape {tuple(shape)}")
    row = find_estimator(estimator)
    size, numbers = _resolve(row, None if is_flat else shape[-1], k, order, options)
    inputs = _checked_inputs(row, rewards, given, layout, reward_weights)
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    if rewards.numel() == 0:
        return torch.zeros_like(rewards, dtype=dtype)
    if valid is not None and not row.takes_valid:
        raise ValueError(f"{row.name} has no parameter valid, so all rewards must be there")
    groups = PaddedGroups.of(rewards, group_ids, valid)
    if size and groups.valid is not None and is_host_readable(groups.valid):
        largest = int(groups.valid.sum(1).max())
        if row.size is not None and largest > 1:
            row.size.check(row.name, size, largest)
    padded = groups.pad(rewards.detach())  # [G, N]
    if row.kernel is not None and isinstance(estimator, str) and has_kernels(rewards.device):
        is_small = padded.dtype == torch.float32 or padded.element_size() <= 2
        padded = padded.to(torch.float32 if is_small else torch.float64).contiguous()
        advantages = by_kernel(padded, groups.valid, row, size, numbers)
    else:
        inputs = {"rewards": rewards.detach()} | inputs
        advantages = _by_function(row, groups, inputs, dtype, size, numbers)
    if advantages.dim() == 2:  # otherwise of tokens
        advantages = groups.unpad(advantages)
    advantages = advantages.to(dtype)
    if is_host_readable(advantages):
        beyond = (~advantages.double().isfinite()).flatten().nonzero()
        if len(beyond):
            find_unusable(row, "rewards", padded.double(), groups)
            got = f"{float(advantages.flatten()[beyond[0]])} at index {int(beyond[0])}"
            raise ValueError(f"the advantages of {row.name} must be finite in {dtype}, got {got}")
    return advantages


def _resolve(
    row: Estimator, n: int | None, k: Any, order: Any, options: dict[str, float]
) -> tuple[int, dict[str, float]]:
    """Return the size, 0 for the largest that fits groups of n (None: uneven), and all options."""
    is_alone = n == 1 and row.centred  # its advantage is 0, for any size
    size = row.resolve_size(None if is_alone else n, k, order)
    return size, check_options(row.name, row.options, options)


def by_kernel(
    rewards: Tensor, valid: Tensor | None, row: Estimator, size: int, options: dict[str, float]
) -> Tensor:
    """Return advantages of contiguous rewards [G, N]."""
    call, kernel, (num_groups, n) = KernelLaunch(rewards.device), row.kernel, rewards.shape
    assert kernel is not None, f"{row.name} has no kernel"
    tables, advantages = 0, torch.empty_like(rewards)
    if kernel.table is not None and valid is None:
        tables = call.keep_cached(_table_of_full_groups(row, size, n, call.device))
    elif kernel.table is not None and valid is not None:
        sizes, of_group = valid.sum(1), slice(None)  # [G]
        if not dispatch.is_gpu(call.device):  # a GPU would wait
            sizes, of_group = sizes.unique(return_inverse=True)
        tables = call.keep(_table(row, size, Group.of_sizes(sizes, n))[of_group])
    call.launch(
        "group_advantage",
        dtype=rewards.dtype,
        num_groups=num_groups,
        group_size=n,
        rewards=rewards,
        valid=None if valid is None else valid.contiguous(),
        tables=tables,
        **_moments(kernel, options),
        advantages=advantages,
    )
    return advantages


def _table(row: Estimator, size: int, group: Group) -> Tensor:
    """Return the rank tables [G, 2, N]; 0 for groups that are too small for the size."""
    table: Any = row.kernel and row.kernel.table
    if row.size is None:
        return cast(Tensor, table(group, 0))
    sizes = size or group.n - row.size.below_n
    fits = (row.size.smallest <= sizes) & (sizes <= group.n - row.size.below_n)  # [G, 1]
    return cast(Tensor, table(group, sizes).masked_fill(~fits[:, None], 0.0))


# Other threads may drop cached tables, and other streams may read them: see
# KernelLaunch.keep_cached.
@lru_cache(maxsize=256)
def _table_of_full_groups(row: Estimator, size: int, n: int, device: torch.device) -> Tensor:
    group = Group.of_sizes(torch.tensor([n]), n)
    # A copy from pageable host memory is complete when `to` returns: every stream may read it.
    return _table(row, size, group).contiguous().to(device)


forget_tables = _table_of_full_groups.cache_clear


@dataclass(frozen=True)
class PaddedGroups:
    """Where the rollouts of rewards [..., N], or [S] in uneven groups, stand in [G, N]."""

    shape: torch.Size  # of the rewards
    index: Tensor | None = None  # [G, N] in [S], S where there is none; None: rewards are [..., N]
    valid: Tensor | None = None  # [G, N] bool, whether it is there and valid; None: everywhere

    @classmethod
    def of(cls, rewards: Tensor, group_ids: Tensor | None, valid: Tensor | None) -> "PaddedGroups":
        """Pad to the largest group, whose size is read from the device."""
        shape, total = rewards.shape, rewards.numel()
        if group_ids is None:
            return cls(shape, valid=None if valid is None else valid.reshape(-1, shape[-1]))
        ids, order = group_ids.long().sort(stable=True)
        sizes = ids.unique_consecutive(return_counts=True)[1][:, None]  # [G, 1]
        place = torch.arange(int(sizes.max()), device=rewards.device)  # [N]
        present = place < sizes  # [G, N]
        index = order[(sizes.cumsum(0) - sizes + place).clamp_max(total - 1)]
        valid = present if valid is None else present & valid[index]
        return cls(shape, index.masked_fill(~present, total), valid)

    def pad(self, x: Tensor) -> Tensor:
        """Return [..., G, N] of [..., *shape]."""
        if self.index is not None:
            return x[..., self.index.clamp_max(self.shape[0] - 1)]
        return x.reshape(*x.shape[: x.dim() - len(self.shape)], -1, self.shape[-1])

    def unpad(self, x: Tensor) -> Tensor:
        """Return [*shape] of [G, N]."""
        if self.index is None:
            return x.reshape(self.shape)
        # one more number takes what is written for absent rollouts
        to = x.new_zeros(self.shape[0] + 1)
        return to.scatter(0, self.index.flatten(), x.flatten())[:-1]


def find_unusable(row: Estimator, name: str, x: Tensor, groups: PaddedGroups) -> Tensor | None:
    """Raise ValueError for the first of the numbers [..., G, N] that the estimator cannot take.

    Where the check would wait for the device, return which groups must become NaN: [G, 1] bool, or
    [1, 1] if the batch scales all groups. Otherwise None."""
    wanted, wrong = "finite", ~(x.abs() <= _LARGEST)
    is_binary = name == "rewards" and row.binary
    if name == "lengths":
        wanted, wrong = "at least 0", x < 0
    elif name == "log_ratios":
        wanted, wrong = "numbers", x.isnan()  # they are clamped
    elif name == "reward_parts":
        wrong = x.abs() > _LARGEST  # NaN is allowed: a part that does not apply
    elif is_binary:
        wrong = (x != 0) & (x != 1)
    wrong = wrong if groups.valid is None else wrong & groups.valid
    if not is_host_readable(wrong):
        unusable = wrong.any(-1, keepdim=True).view(-1, wrong.shape[-2], 1).any(0)
        return unusable.any(0, keepdim=True) if row.over_batch else unusable
    if not bool(wrong.any()):
        return None
    place = wrong.nonzero()[0].tolist()
    number, (group, rollout) = float(x[tuple(place)]), place[-2:]
    if wanted == "finite" and math.isfinite(number):
        limit = "0 or 1" if is_binary else f"at most {_LARGEST:g} in magnitude"
        wanted = f"{limit} for {row.name}"
    index = "" if groups.index is None else f" (index {int(groups.index[group, rollout])})"
    got = f"{number!r}".removesuffix(".0") + f" in group {group}, rollout {rollout}{index}"
    raise ValueError(f"{name} must be {wanted}, got {got}")


def _checked_inputs(
    row: Estimator,
    rewards: Tensor,
    given: dict[str, Any],
    layout: dict[str, Tensor | None],
    reward_weights: Sequence[float] | None,
) -> dict[str, Any]:
    """Return the inputs that are given, which must be those that the estimator asks for."""
    given = {name: x for name, x in given.items() if x is not None}
    for name in {**given, **dict.fromkeys(row.inputs)}:
        if name not in given or name not in row.inputs:
            raise ValueError(f"{row.name} {'does not use' if name in given else 'needs'} {name}")
    if reward_weights is not None and "reward_parts" not in row.inputs:
        raise ValueError(f"{row.name} does not use reward_weights")
    for name, x in (given | layout).items():
        if x is None or name in OBJECTS:
            continue
        check_tensor(name, x, rewards.device, "the rewards are")
        kind, shape = _KINDS.get(name), tuple(rewards.shape)
        is_kind = {"floating": x.is_floating_point(), "integers": is_integer(x)}
        if kind and not is_kind.get(kind, x.dtype == torch.bool):
            raise ValueError(f"{name} must be {kind}, got {x.dtype}")
        if kind and name != "greedy_correct" and x.shape != shape:
            wanted = f"the shape of rewards, {shape}"
            raise ValueError(f"{name} must have {wanted}, got {tuple(x.shape)}")
        if name == "reward_parts" and (x.dim() == 0 or x.shape[1:] != shape or not len(x)):
            wanted = ", ".join(["R", *map(str, shape)])
            raise ValueError(f"{name} must have the shape ({wanted}), got {tuple(x.shape)}")
    if "reward_parts" in given:
        count = len(given["reward_parts"])
        weights = [1.0] * count if reward_weights is None else reward_weights
        weights = tuple(check_finite("each of reward_weights", weight) for weight in weights)
        if len(weights) != count:
            wanted = f"a number for each of the {count} rewards"
            raise ValueError(f"reward_weights must be {wanted}, got {len(weights)}")
        given["reward_weights"] = weights
    return given


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
    unusable, values = None, dict(given)
    for name, x in given.items():
        if isinstance(x, Tensor) and name not in OBJECTS:
            values[name] = x = _padded(name, x, groups)
            wrong = None if x.dtype == torch.bool else find_unusable(row, name, x, groups)
            if wrong is not None:
                unusable = wrong if unusable is None else unusable | wrong
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


def _padded(name: str, x: Tensor, groups: PaddedGroups) -> Tensor:
    """Return an input as [..., G, N], or [G, 1], bool, int64 or float64; 0 where not valid."""
    if name.startswith("greedy") and x.shape != groups.shape:
        if groups.index is not None or x.numel() != groups.shape[:-1].numel():
            wanted = "one value per group, or the shape of rewards"
            raise ValueError(f"{name} must have {wanted}, got the shape {tuple(x.shape)}")
        x = x.reshape(-1, 1)
    else:
        x = groups.pad(x)
    if name == "rewards" or x.is_floating_point():
        x = x.double()
    elif x.dtype != torch.bool:
        x = x.long()
    return x if groups.valid is None else x.masked_fill(~groups.valid, 0)


def maxpo_advantage(rewards: Tensor, k: int, **layout: Any) -> Tensor:
    """Return S_i - S_-i of rewards [..., N], 1 <= k <= N-1 (MaxPO, section 4.1): its mean gradient
    is (1/k) grad max@k. This and the next functions also take group_ids and valid."""
    return group_advantage(rewards, "maxpo", k=k, **layout)


def expected_improvement(rewards: Tensor, k: int, **layout: Any) -> Tensor:
    """Return EI_i = S_i - M_-i of rewards [..., N], 2 <= k <= N (MaxPO, eq. 5)."""
    return group_advantage(rewards, "expected_improvement", k=k, **layout)


def leave_two_out_baseline(rewards: Tensor, k: int, **layout: Any) -> Tensor:
    """Return L2O_i of rewards [..., N], 2 <= k <= N-1 (MaxPO, eq. 6)."""
    return group_advantage(rewards, "leave_two_out", k=k, **layout)


def maxrl_advantage(rewards: Tensor, order: int | None = None, **layout: Any) -> Tensor:
    """Return the sum of maxpo_advantage over k = 1..order, default N-1, of rewards [..., N]: for
    rewards 0 or 1 and order N-1 (r - mean)/mean, 0 if mean = 0 (MaxRL, Algorithm 1)."""
    return group_advantage(rewards, "maxrl", order=order, **layout)


def grpo_advantage(rewards: Tensor, *, eps: float = 1e-6, ddof: int = 1, **layout: Any) -> Tensor:
    """Return (r - mean)/(std + eps) of rewards [..., N] (Shao et al. 2024); 0 if they are equal."""
    return group_advantage(rewards, "grpo", eps=eps, ddof=ddof, **layout)


def rloo_advantage(rewards: Tensor, **layout: Any) -> Tensor:
    """Return r minus the mean of the other rewards, of rewards [..., N] (Ahmadian et al. 2024)."""
    return group_advantage(rewards, "rloo", **layout)


def try_out(
    row: Estimator, estimator: str | Estimator, num_rollouts: int = 4, **options: Any
) -> Tensor:
    """Return the advantages of a small example, [4, N] or [T]; raise ValueError if that fails."""
    rewards = torch.zeros(4, num_rollouts)  # correct by row: one, half of them, none, all
    rewards[0, 0] = rewards[1, : (num_rollouts + 1) // 2] = rewards[3] = 1
    try:
        return group_advantage(rewards, estimator, **example_inputs(row, rewards), **options)
    except ValueError as error:
        raise ValueError(f"{error}, on a small example") from error
    except (Exception, SystemExit) as error:
        what = f"{row.name} fails on a small example"
        raise ValueError(f"{what}: {describe_error(error)}") from error


def example_inputs(row: Estimator, rewards: Tensor) -> dict[str, Any]:
    """Return the inputs of an estimator for rewards [G, N]."""
    numbers = torch.arange(1, rewards.numel() + 1).view(rewards.shape)
    return {name: INPUTS[name](numbers) for name in row.inputs}


def effective_weight(estimator: str, n: int, pass_rate: Tensor, **options: Any) -> Tensor:
    """Return W_n(p), the factor of a prompt's gradient under an estimator, for rewards 0 or 1, at
    finite n (docs/advantages.md#effective-weight). For opo all lengths are equal.

    Args:
        estimator: a name in `ESTIMATORS` whose advantages depend only on the rewards of the group.
        n: the number of rollouts in the group.
        pass_rate: p, any shape, between 0 and 1.
        options: k, order and others, as in `group_advantage`, which raises the same errors.

    Returns W_n(p), float64, of the shape of `pass_rate`."""
    row = find_estimator(estimator)
    if not row.has_weight:
        raise ValueError(f"the weight of {row.name} {row.weight}, so it must be another estimator")
    check_integer("n", n, f"an integer from 1 to {_MOST}", lambda x: 1 <= x <= _MOST)
    check_tensor("pass_rate", pass_rate)
    p = pass_rate.double().flatten()[:, None]
    is_rate = (p >= 0) & (p <= 1)
    if p.device.type != "meta" and not bool(is_rate.all()):
        raise ValueError("pass_rate must be between 0 and 1 everywhere")
    rewards = torch.ones(n + 1, n, dtype=torch.float64).tril(-1)  # row c: c correct ones
    if "lengths" in row.inputs:
        options["lengths"] = torch.ones_like(rewards, dtype=torch.int64)
    advantages = group_advantage(rewards, estimator, **options)
    difference = (advantages[1:, 0] - advantages[:-1, -1]).to(p.device)  # [n], by c = 0..n-1
    c = torch.arange(n, dtype=torch.float64, device=p.device)
    probability = Binomial(n - 1, p, validate_args=False).log_prob(c).exp()
    return (probability.where(is_rate, torch.nan) @ difference).view(pass_rate.shape)
