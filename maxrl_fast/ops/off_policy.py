r"""Advantages of max@k for rollouts that another policy sampled: steps after the kernel, in float64.

Derivation. Rollouts y_1..y_N come from an old policy mu, the gradient is wanted under pi, and rho_i = pi(y_i)/mu(y_i) =
1 + delta_i is the ratio of whole responses. max@k = E_mu[rho_1 ... rho_k max(r_1..r_k)], so with rho(I) the product over I,

    grad max@k = E_mu[ (1/C(N,k)) sum_i grad log pi(y_i) sum_{I with i, |I| = k} rho(I) max_I r ].

The sum over subsets has no fast form. To the first order, rho(I) = 1 + sum_{l in I} delta_l (Bagirov et al. 2025, section 3.3):
that is `bon`. For `maxpo` only the ratios of the others are expanded, and rho_i stays a factor:

    A_i = rho_i (S_i - S_-i) = rho_i (EI_i - L2O_i),   with J among the others, |J| = k-1, w(J) = 1 + sum_{l in J} delta_l,
    S_i  = mean over J of w(J) max(J, i),              EI_i  = mean over J of w(J) (max(J, i) - max J),
    S_-i = mean over J and over j outside J and i of w(J) max(J, j),
    L2O_i = mean over j != i of EI_j computed without i.

S_-i does not depend on y_i, and E_mu[rho_i grad log pi(y_i)] = 0, so this baseline has exactly the mean 0 whatever the ratios
are: the only error of the mean is that of w(J), of second order in delta, and none for k <= 2. i and j meet the same J and the
same weight, so a constant added to the rewards changes nothing, and a group of equal rewards has exactly 0.

Prefix sums. Sort r_(1) <= ... <= r_(N), d_j = r_(j+1) - r_(j), D_j = delta_(1) + ... + delta_(j). A maximum is r_(N) minus the
gaps above it, and gap j is above a set if the set lies within the lowest j. Over the sets within the lowest j, the mean of w is
1 + (k-1) times the mean of delta there, which is D_j/j, or (D_j - delta_i)/(j-1) without i. Hence, with
u_j = C(j,k) / (j C(N-1,k)),

    A_i/rho_i = sum_{j < i} d_j j u_j (1 + (k-1) D_j/j) - sum_{j >= i} d_j (N-j) u_j (1 + (k-1) (D_j - delta_i)/(j-1)).

At delta = 0 this is the table of maxpo, which the kernel computes; the terms with (k-1) u_j = v_j are added here. `maxrl` is
the sum over k = 1..T: t_j = C(j,T+1)/C(N-1,T+1), R = N-1-T and telescoping sums give

    sum_k t_j(k) = (N - R t_j)/(N-j) =: P,   sum_k k t_j(k) = (j P - (T+1) R t_j)/(N+1-j) =: Q,   v_j = (Q - P + 1)/j,

k from 0 to T; at full order v_j = (j-1)/((N-j)(N+1-j)). Sorting takes N log N operations, the rest N. Equal rewards have a gap
of 0 between them, so their order has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from maxrl_fast import _C
from maxrl_fast.ops.estimator import Inputs
from maxrl_fast.ops.groups import padded

LARGEST_LOG_RATIO: float = _C.MAX_LOG_RATIO  # 20, as in the token losses


def maxpo(advantages: Tensor, inputs: Inputs, options: Mapping[str, float]) -> Tensor:
    """Return rho_i (S_i - S_-i) from the advantages S_i - S_-i at ratios of 1."""
    return _advantages(_maxpo_slopes, advantages, inputs, options)


def maxrl(advantages: Tensor, inputs: Inputs, options: Mapping[str, float]) -> Tensor:
    """Return the sum of `maxpo` over k = 1..order from the advantages at ratios of 1."""
    return _advantages(_maxrl_slopes, advantages, inputs, options)


def bon(advantages: Tensor, inputs: Inputs, options: Mapping[str, float]) -> Tensor:
    """Return sum_j w'_ij r_j / C(N,k) (Bagirov et al. 2025, section 3.3) from (k/N) S_i, its value at ratios of 1."""
    group, k = _Sorted.of(inputs, options), inputs.size
    j, n, delta = group.rank, group.counts, group.delta
    largest = group.rewards.gather(1, (n - 1).clamp_min(0))
    # The mean weight, minus 1, of the subsets with i: of all of them, and of those within the lowest j.
    of_all = delta + (k - 1) * (group.sums.gather(1, (n - 1).clamp_min(0)) - delta) / (n - 1).clamp_min(1)
    below = _subset_ratios(j, n, k - 1)[:, :-1] * group.gaps  # C(j-1,k-1)/C(n-1,k-1) d_j
    of_others = (k - 1) * below / (j[1:] - 1).clamp_min(1)
    loss = _from(below - of_others) * delta + _from(of_others * group.sums[:, :-1])
    change = torch.where(n >= k, (of_all * largest - loss) * k / n.clamp_min(1), 0.0)
    return group.unsorted(group.sort(advantages) + group.unscale(change), advantages)


def _advantages(
    slopes: Callable[[Tensor, Tensor, int], Tensor], advantages: Tensor, inputs: Inputs, options: Mapping[str, float]
) -> Tensor:
    """Return rho_i times the advantages at ratios of 1 plus the terms with the slopes v_j."""
    group = _Sorted.of(inputs, options)
    j, n, sums = group.rank[1:], group.counts, group.sums[:, :-1]
    rise = slopes(group.rank, n, inputs.size) * group.gaps
    fall = rise * (n - j) / (j - 1).clamp_min(1)  # v_1 = 0
    change = _before(rise * sums) - _from(fall * sums) + group.delta * _from(fall)
    return group.unsorted((1 + group.delta) * (group.sort(advantages) + group.unscale(change)), advantages)


def _maxpo_slopes(rank: Tensor, n: Tensor, k: int) -> Tensor:
    """Return v_j = (k-1) C(j,k) / (j C(n-1,k)) for j = 1..W-1, [G, W-1]."""
    return (k - 1) * _subset_ratios(rank, n, k)[:, 1:] / rank[1:]


def _maxrl_slopes(rank: Tensor, n: Tensor, order: int) -> Tensor:
    """Return the sum of the slopes of maxpo over k = 1..order (0: n-1), [G, W-1]; 0 where the order is above n-1."""
    j = rank[1:]
    largest = order if order else n - 1
    left = n - 1 - largest
    ratios = left * _subset_ratios(rank, n, largest + 1)[:, 1:]
    plain = (n - ratios) / (n - j).clamp_min(1)
    by_size = (j * plain - (largest + 1) * ratios) / (n + 1 - j).clamp_min(1)
    return torch.where(left >= 0, (by_size - plain + 1) / j, 0.0)


def _subset_ratios(rank: Tensor, n: Tensor, k: Tensor | int) -> Tensor:
    """Return C(j,k)/C(n-1,k) for j = 0..W-1, [G, W]: estimator_tables.subset_ratios for each group's n; 0 where k > n-1."""
    j = rank[1:]
    factors = torch.where(j < n, (j - k).clamp_min(0) / j, 1.0).flip(1)  # from j = n-1 down
    ratios = torch.cat([torch.ones_like(n, dtype=torch.float64), factors.cumprod(1)], 1).flip(1)
    return ratios * (n - 1 >= k)


def _before(terms: Tensor) -> Tensor:
    """Return the sum of the terms of the gaps below each rank: [G, W-1] -> [G, W]."""
    return torch.nn.functional.pad(terms.cumsum(1), (1, 0))


def _from(terms: Tensor) -> Tensor:
    """Return the sum of the terms of the gaps above each rank: [G, W-1] -> [G, W]."""
    return torch.nn.functional.pad(terms.flip(1).cumsum(1).flip(1), (0, 1))


@dataclass(frozen=True)
class _Sorted:
    """Groups in ascending order of reward, padded to the width W of the largest; float64.

    Rewards are divided by a power of two, so that no difference of them overflows.
    """

    index: Tensor  # [G, W] int64, of each rollout in the flattened rewards; their number where there is none
    counts: Tensor  # [G, 1] int64, n of each group
    rank: Tensor  # [W] = 0..W-1
    rewards: Tensor  # [G, W]
    gaps: Tensor  # [G, W-1], d_j for j = 1..W-1; 0 from n on
    delta: Tensor  # [G, W], ratio - 1
    sums: Tensor  # [G, W], D_j for j = 1..W
    exponent: Tensor  # [G, 1], of the power of two

    @classmethod
    def of(cls, inputs: Inputs, options: Mapping[str, float]) -> _Sorted:
        assert inputs.log_ratios is not None
        groups, width = inputs.groups, inputs.max_group_size
        index, exists = padded(groups.shape, groups.offsets, groups.order, groups.valid, inputs.rewards.device, width)
        log_ratios = inputs.log_ratios.flatten()[index].double().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        delta, limit = torch.where(exists, log_ratios, 0.0).expm1(), options["clamp_delta"]
        delta = delta.clamp(-limit, limit) if limit else delta
        delta = torch.where(delta.isnan().any(1, keepdim=True), torch.nan, delta)  # then all advantages of the group are NaN
        rewards = inputs.rewards.flatten()[index].double()
        # Among equal rewards by ratio, so that the order of the rollouts changes no bit; rollouts that are left out come last.
        order = delta.argsort(dim=1, stable=True)
        order = order.gather(1, torch.where(exists, rewards, torch.inf).gather(1, order).argsort(dim=1, stable=True))
        index, exists, rewards, delta = (x.gather(1, order) for x in (index, exists, rewards, delta))
        rewards = torch.where(exists, rewards, 0.0)
        exponent = rewards.abs().amax(1, keepdim=True).frexp().exponent.clamp(-1000, 1024) - 1
        rewards = rewards * torch.ldexp(torch.ones_like(rewards[:, :1]), -exponent)
        return cls(
            index=torch.where(exists, index, inputs.rewards.numel()),
            counts=exists.sum(1, keepdim=True),
            rank=torch.arange(index.shape[1], dtype=torch.float64, device=index.device),
            rewards=rewards,
            gaps=torch.where(exists[:, 1:], rewards.diff(dim=1), 0.0),
            delta=delta,
            sums=delta.cumsum(1),
            exponent=exponent,
        )

    def sort(self, values: Tensor) -> Tensor:
        """Return values, one per rollout, as [G, W] float64."""
        return values.flatten()[self.index.clamp_max(values.numel() - 1)].double()

    def unscale(self, values: Tensor) -> Tensor:
        return values * torch.ldexp(torch.ones_like(values[:, :1]), self.exponent)

    def unsorted(self, values: Tensor, like: Tensor) -> Tensor:
        """Return values [G, W] in the order, shape and dtype of `like`, 0 for rollouts that are in no group."""
        flat = values.new_zeros(like.numel() + 1).scatter(0, self.index.flatten(), values.flatten())
        return flat[:-1].view(like.shape).to(like.dtype)
