"""Estimators of max@k by sums over subsets of the group: sums over gaps of ascending rewards."""

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
)
def maxpo(g: Group, *, k: KBelowN) -> Tensor:
    """S_i - S_-i = EI_i - L2O_i.

    It is sum_{j<i} (N/j) C(j,k)/C(N-1,k) d_j, centred.
    """
    return g.rank_transform(tables.maxpo(g, k))


@estimator(
    source="MaxPO, section 3.1, eq. 5",
    weight="(1-p)^(k-1)",
    kernel=Kernel(tables.expected_improvement),
)
def expected_improvement(g: Group, *, k: KOfPairs) -> Tensor:
    """EI_i = S_i - M_-i.

    It is sum_{j<i} C(j,k-1)/C(N-1,k-1) d_j.
    """
    return g.rank_transform(tables.expected_improvement(g, k))


@estimator(source="MaxPO, section 3.1, eq. 6", weight="0", kernel=Kernel(tables.leave_two_out))
def leave_two_out(g: Group, *, k: KOfPairsBelowN) -> Tensor:
    """L2O_i = S_-i - M_-i = mean over j != i of EI_j computed without i: a baseline."""
    return g.rank_transform(tables.leave_two_out(g, k))


@estimator(source="MaxPO, section 3.1, against eq. 6", kernel=Kernel(tables.ei_l1o), centred=True)
def ei_l1o(g: Group, *, k: KOfPairs) -> Tensor:
    """EI_i - mean over j != i of EI_j; biased, an ablation."""
    return g.rank_transform(tables.ei_l1o(g, k))


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
    return g.rank_transform(tables.maxrl(g, g.n - 1 if order is None else order))


@estimator(
    source="PKPO, Walder & Karkhanis 2025, sloo_minus_one",
    weight="(k/N) (1-p)^(k-1)",
    kernel=Kernel(tables.pkpo),
)
def pkpo(g: Group, *, k: KOfPairs) -> Tensor:
    """(k/N) EI_i = (k/N) (S_i - M_-i)."""
    return g.rank_transform(tables.pkpo(g, k))


@estimator(
    source="PKPO, Walder & Karkhanis 2025, sloo",
    weight="(k/N) (1-p)^(k-1)",
    kernel=Kernel(tables.pkpo_sloo),
)
def pkpo_sloo(g: Group, *, k: KBelowN) -> Tensor:
    """(k/N) S_i - (k/(N-1)) S_-i; not centred."""
    return g.rank_transform(tables.pkpo_sloo(g, k))


@estimator(
    source="Pass@k Training, Chen et al. 2025, arXiv:2508.10751, eqs. 14-15",
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
    return g.rank_transform(tables.max_minus_second(g, 0))
