"""Estimators of max@k by sums over subsets of the group: sums over gaps of ascending rewards."""

import torch
from torch import Tensor

from maxrl_fast.algorithms.estimator import (
    K,
    KBelowN,
    Kernel,
    KOfPairs,
    KOfPairsBelowN,
    Order,
    estimator,
)
from maxrl_fast.algorithms.estimators import tables
from maxrl_fast.algorithms.group import Group


def shortfall(g: Group, k: int) -> Tensor:
    """Return the largest reward minus S_i: the mean of the gaps above the subset's maximum."""
    # Gap j >= i is above it if the k-1 others are among the j-1 others at or below gap j.
    return g.above(g.within(k - 1, g.n - 1)[:, :-2] * g.gaps)


@estimator(
    source="MaxPO, section 4.1, eq. 8; EI + L2O of section 3.1",
    weight="(1-p)^(k-1)",
    kernel=Kernel(tables.maxpo),
    centred=True,
    scales_by_k=True,
)
def maxpo(g: Group, *, k: KBelowN) -> Tensor:
    """S_i - S_-i = EI_i - L2O_i.

    It is sum_{j<i} (N/j) C(j,k)/C(N-1,k) d_j, centred.
    """
    return g.centre(g.below(g.n / g.j * g.within(k, g.n - 1)[:, 1:-1] * g.gaps))


@estimator(
    source="MaxPO, section 3.1, eq. 5",
    weight="(1-p)^(k-1)",
    kernel=Kernel(tables.expected_improvement),
    scales_by_k=True,
)
def expected_improvement(g: Group, *, k: KOfPairs) -> Tensor:
    """EI_i = S_i - M_-i.

    It is sum_{j<i} C(j,k-1)/C(N-1,k-1) d_j.
    """
    return g.below(g.within(k - 1, g.n - 1)[:, 1:-1] * g.gaps)


@estimator(
    source="MaxPO, section 3.1, eq. 6",
    weight="0",
    kernel=Kernel(tables.leave_two_out),
    scales_by_k=True,
)
def leave_two_out(g: Group, *, k: KOfPairsBelowN) -> Tensor:
    """L2O_i = S_-i - M_-i = mean over j != i of EI_j computed without i: a baseline."""
    return expected_improvement(g, k=k) - maxpo(g, k=k)


@estimator(
    source="MaxPO, section 3.1, against eq. 6",
    kernel=Kernel(tables.ei_l1o),
    centred=True,
    scales_by_k=True,
)
def ei_l1o(g: Group, *, k: KOfPairs) -> Tensor:
    """EI_i - mean over j != i of EI_j; biased, an ablation."""
    return g.centre(expected_improvement(g, k=k)) * g.n / (g.n - 1).clamp_min(1)


@estimator(
    source="MaxRL, eq. 5 with Algorithm 1; any real reward through MaxPO",
    weight="(1-(1-p)^order)/p",
    kernel=Kernel(tables.maxrl),
    centred=True,
)
def maxrl(g: Group, *, order: Order = None) -> Tensor:
    """(r - mean)/mean for rewards 0 or 1 at order N-1, 0 where mean = 0; else the sum of maxpo over
    k = 1..order.
    """
    # sum_{k=1..T} C(j,k)/C(N-1,k) = N/(N-j) (1 - C(j,T+1)/C(N,T+1)) - 1
    missed = g.within(g.n if order is None else order + 1, g.n)[:, 1:-1]
    slope = g.n / g.j * (g.n / (g.n - g.j).clamp_min(1) * (1 - missed) - 1)
    return g.centre(g.below(slope * g.gaps))


@estimator(
    source="PKPO, Walder & Karkhanis 2025, sloo_minus_one",
    weight="(k/N) (1-p)^(k-1)",
    kernel=Kernel(tables.pkpo),
)
def pkpo(g: Group, *, k: KOfPairs) -> Tensor:
    """(k/N) EI_i = (k/N) (S_i - M_-i)."""
    return k / g.n * expected_improvement(g, k=k)


@estimator(
    source="PKPO, Walder & Karkhanis 2025, sloo",
    weight="(k/N) (1-p)^(k-1)",
    kernel=Kernel(tables.pkpo_sloo),
)
def pkpo_sloo(g: Group, *, k: KBelowN) -> Tensor:
    """(k/N) S_i - (k/(N-1)) S_-i; not centred."""
    with_i = g.largest(g.rewards) - shortfall(g, k)
    return k / g.n * with_i - k / (g.n - 1).clamp_min(1) * (with_i - maxpo(g, k=k))


@estimator(
    source="Pass@k Training, Chen et al. 2025, arXiv:2508.10751, eqs. 14-15",
    kernel=Kernel(tables.passk_training, binary=True),
    binary=True,
    centred=True,
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


@estimator(
    source="The Best of N Worlds, Bagirov et al. 2025, BoN max-second",
    weight="(1-p)^(N-1)",
    kernel=Kernel(tables.max_minus_second),
)
def bon_max_second(g: Group) -> Tensor:
    """best reward - second best for the best rollout, 0 for the others."""
    return g.below(torch.where(g.j == g.n - 1, g.gaps, 0.0))
