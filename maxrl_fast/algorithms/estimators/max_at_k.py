"""Estimators of max@k, most of them by rank tables: weights of the gaps of a group's ascending
rewards, float64, by recurrence.

A table [G, 2, N] holds `offset` and `slope` of each group, of which `Group.rank_transform` and the
kernel (csrc/group_advantage.h has the formula) make advantages. The table of a sum of estimators is
the sum of their tables, and centring is a choice of offset. Tables depend only on the sizes n of
the groups; a size k may be a number, or one for each group, [G, 1].
"""

import torch
from torch import Tensor

from maxrl_fast.algorithms.estimator import (
    K,
    KBelowN,
    KOfPairs,
    KOfPairsBelowN,
    Order,
    estimator,
    rank_estimator,
)
from maxrl_fast.algorithms.group import Group


def subset_ratios(n: int, k: int) -> Tensor:
    """Return q_j = C(j, k) / C(n, k) for j = 0..n, float64; underflow to 0 is harmless."""
    g = Group.of_sizes(torch.tensor([n]), n)
    return g.within(k, g.n)[0]


def shortfall(g: Group, k: int) -> Tensor:
    """Return the largest reward minus S_i: the mean of the gaps above the subset's maximum."""
    # Gap j >= i is above it if the k-1 others are among the j-1 others at or below gap j.
    return g.above(g.within(k - 1, g.n - 1)[:, :-2] * g.gaps)


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


def _maxpo(g: Group, k: int) -> Tensor:
    return _centred(g, g.n / g.j * g.within(k, g.n - 1)[:, 1:-1])


def _improvement(g: Group, k: int) -> Tensor:
    return _table(g, g.within(k - 1, g.n - 1)[:, 1:-1])


@rank_estimator(
    "MaxPO, section 4.1, eq. 8; EI + L2O of section 3.1", weight="(1-p)^(k-1)", centred=True
)
def maxpo(g: Group, *, k: KBelowN) -> Tensor:
    """S_i - S_-i = EI_i - L2O_i.

    It is sum_{j<i} (N/j) C(j,k)/C(N-1,k) d_j, centred.
    """
    return _maxpo(g, k)


@rank_estimator("MaxPO, section 3.1, eq. 5", weight="(1-p)^(k-1)")
def expected_improvement(g: Group, *, k: KOfPairs) -> Tensor:
    """EI_i = S_i - M_-i.

    It is sum_{j<i} C(j,k-1)/C(N-1,k-1) d_j.
    """
    return _improvement(g, k)


@rank_estimator("MaxPO, section 3.1, eq. 6", weight="0")
def leave_two_out(g: Group, *, k: KOfPairsBelowN) -> Tensor:
    """L2O_i = S_-i - M_-i = mean over j != i of EI_j computed without i: a baseline."""
    return _improvement(g, k) - _maxpo(g, k)


@rank_estimator("MaxPO, section 3.1, against eq. 6", centred=True)
def ei_l1o(g: Group, *, k: KOfPairs) -> Tensor:
    """EI_i - mean over j != i of EI_j; biased, an ablation."""
    return _centred(g, g.within(k - 1, g.n - 1)[:, 1:-1] * g.n / (g.n - 1))


@rank_estimator(
    "MaxRL, eq. 5 with Algorithm 1; any real reward through MaxPO",
    weight="(1-(1-p)^order)/p",
    centred=True,
)
def maxrl(g: Group, *, order: Order = None) -> Tensor:
    """(r - mean)/mean for rewards 0 or 1 at order N-1, 0 where mean = 0; else the sum of maxpo over
    k = 1..order.

    sum_{k=1..T} C(j,k)/C(n-1,k) = n/(n-j) (1 - C(j,T+1)/C(n,T+1)) - 1.
    """
    missed = g.within((g.n - 1 if order is None else order) + 1, g.n)[:, 1:-1]
    return _centred(g, g.n / g.j * (g.n / (g.n - g.j) * (1 - missed) - 1))


@rank_estimator("PKPO, Walder & Karkhanis 2025, sloo_minus_one", weight="(k/N) (1-p)^(k-1)")
def pkpo(g: Group, *, k: KOfPairs) -> Tensor:
    """(k/N) EI_i = (k/N) (S_i - M_-i)."""
    return _improvement(g, k) * (k / g.n)[:, None]


@rank_estimator("PKPO, Walder & Karkhanis 2025, sloo", weight="(k/N) (1-p)^(k-1)")
def pkpo_sloo(g: Group, *, k: KBelowN) -> Tensor:
    """(k/N) S_i - (k/(N-1)) S_-i; not centred."""
    # S_i: C(j-1, k-1) / C(n-1, k-1), the k-1 others are below gap j, as i is
    below = g.within(k - 1, g.n - 1)[:, :-2]
    with_i = _table(g, below, 1 - below, lowest=1.0)
    # S_-i: C(j, k) / C(n-1, k), all k are among the j lowest
    ratios = g.within(k, g.n - 1)[:, :-1]
    without_i = _table(g, ratios[:, :-1] - ratios[:, 1:], 1 - ratios[:, :-1], lowest=1.0)
    return with_i * (k / g.n)[:, None] - without_i * (k / (g.n - 1))[:, None]


@rank_estimator("The Best of N Worlds, Bagirov et al. 2025, BoN max-second", weight="(1-p)^(N-1)")
def bon_max_second(g: Group) -> Tensor:
    """best reward - second best for the best rollout, 0 for the others."""
    return _table(g, (g.j == g.n - 1).double())


@estimator(
    "Pass@k Training, Chen et al. 2025, arXiv:2508.10751, eqs. 14-15", binary=True, centred=True
)
def passk_training(g: Group, *, k: K) -> Tensor:
    """mean over the size-k subsets with i of (max - rho)/(sqrt(rho (1-rho)) + 1e-6), rho = 1 -
    C(F,k)/C(N,k).
    """
    # rho is the mean of S. 1 - rho comes from C(F,k)/C(N,k) itself: near rho = 1 the difference
    # would lose it.
    wrong = (g.valid & (g.rewards == 0)).sum(1, keepdim=True)
    missed = g.within(k, g.n).gather(1, wrong)
    return g.centre(-shortfall(g, k)) / ((missed * (1 - missed)).sqrt() + 1e-6)
