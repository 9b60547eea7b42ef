"""Rank tables: the weights of the gaps of a group's ascending rewards, float64, by recurrence.

A table [G, 2, N] holds `offset` and `slope` of each group: for ascending rewards r_(1) <= ... <=
r_(n), gaps d_0 = r_(1), d_j = r_(j+1) - r_(j),

    v_(i) = sum_{j >= 0} offset_j d_j + sum_{1 <= j < i} slope_j d_j,

which `Group.rank_transform` and the kernel (csrc/group_advantage.h) compute. The table of a sum of
estimators is the sum of their tables, and centring is a choice of offset. Tables depend only on the
sizes n of the groups; a size k may be a number, or one for each group, [G, 1].

Notation: S_i the mean of the maximum over the size-k subsets that contain i, S_-i over those
without i, M_-i over the size-(k-1) subsets of the others.
"""

import torch
from torch import Tensor

from maxrl_fast.algorithms.group import Group


def subset_ratios(n: int, k: int) -> Tensor:
    """Return q_j = C(j, k) / C(n, k) for j = 0..n, float64; underflow to 0 is harmless."""
    g = Group.of_sizes(torch.tensor([n]), n)
    return g.within(k, g.n)[0]


def _table(
    g: Group, slope: Tensor, offset: Tensor | None = None, lowest: float | Tensor = 0.0
) -> Tensor:
    """Return the table of slopes and offsets [G, N-1] of the gaps; `lowest` is r_(1)'s weight."""
    offset = torch.zeros_like(slope) if offset is None else offset
    of_gaps = torch.stack([offset, slope], 1).masked_fill((g.j >= g.n)[:, None], 0.0)
    of_lowest = torch.stack([torch.ones_like(g.n) * lowest, torch.zeros_like(g.n)], 1)
    return torch.cat([of_lowest, of_gaps], 2)


def _centred(g: Group, slope: Tensor) -> Tensor:
    """Return the table with mean 0 in every group: gap j raises the n - j rollouts above it."""
    return _table(g, slope, -slope * (g.n - g.j) / g.n)


def maxpo(g: Group, k: int) -> Tensor:
    """S_i - S_-i."""
    return _centred(g, g.n / g.j * g.within(k, g.n - 1)[:, 1:-1])


def expected_improvement(g: Group, k: int) -> Tensor:
    """EI_i = S_i - M_-i."""
    return _table(g, g.within(k - 1, g.n - 1)[:, 1:-1])


def leave_two_out(g: Group, k: int) -> Tensor:
    """L2O_i = S_-i - M_-i."""
    return expected_improvement(g, k) - maxpo(g, k)


def ei_l1o(g: Group, k: int) -> Tensor:
    """EI_i minus the mean of the other EI_j: biased, an ablation."""
    return _centred(g, g.within(k - 1, g.n - 1)[:, 1:-1] * g.n / (g.n - 1))


def maxrl(g: Group, order: int | Tensor) -> Tensor:
    """sum_{k=1..order} maxpo_k.

    sum_{k=1..T} C(j,k)/C(n-1,k) = n/(n-j) (1 - C(j,T+1)/C(n,T+1)) - 1.
    """
    missed = g.within(order + 1, g.n)[:, 1:-1]
    return _centred(g, g.n / g.j * (g.n / (g.n - g.j) * (1 - missed) - 1))


def pkpo(g: Group, k: int) -> Tensor:
    """(k/n) EI_i."""
    return expected_improvement(g, k) * (k / g.n)[:, None]


def conditional_max(g: Group, k: int) -> Tensor:
    """S_i."""
    # C(j-1, k-1) / C(n-1, k-1): the k-1 others are below gap j, as i is
    below = g.within(k - 1, g.n - 1)[:, :-2]
    return _table(g, below, 1 - below, lowest=1.0)


def leave_one_out_max(g: Group, k: int) -> Tensor:
    """S_-i."""
    ratios = g.within(k, g.n - 1)[:, :-1]  # C(j, k) / C(n-1, k): all k are among the j lowest
    return _table(g, ratios[:, :-1] - ratios[:, 1:], 1 - ratios[:, :-1], lowest=1.0)


def pkpo_sloo(g: Group, k: int) -> Tensor:
    """(k/n) S_i - (k/(n-1)) S_-i."""
    with_i, without_i = conditional_max(g, k), leave_one_out_max(g, k)
    return with_i * (k / g.n)[:, None] - without_i * (k / (g.n - 1))[:, None]


def max_minus_second(g: Group, _: int) -> Tensor:
    """The best reward minus the second best, for the best rollout."""
    return _table(g, (g.j == g.n - 1).double())
