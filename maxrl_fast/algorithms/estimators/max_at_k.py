"""Estimators of max@k, most of them by rank tables: weights of the gaps of a group's ascending
rewards, float64, by recurrence. The last are for rollouts that another policy sampled.

A table [G, 2, N] holds `offset` and `slope` of each group, of which `Group.rank_transform` and the
kernel (csrc/group_advantage.h has the formula) make advantages. The table of a sum of estimators is
the sum of their tables, and centring is a choice of offset. Tables depend only on the sizes n of
the groups; a size k may be a number, or one for each group, [G, 1]."""

from typing import Annotated

import torch
from torch import Tensor, where

from maxrl_fast.algorithms.estimator import (
    Group,
    K,
    KBelowN,
    KOfPairs,
    KOfPairsBelowN,
    Order,
    estimator,
    rank_estimator,
)
from maxrl_fast.algorithms.options import Help, NotNegative
from maxrl_fast.algorithms.tokens import MAX_LOG_RATIO


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

    It is sum_{j<i} (N/j) C(j,k)/C(N-1,k) d_j, centred."""
    return _maxpo(g, k)


@rank_estimator("MaxPO, section 3.1, eq. 5", weight="(1-p)^(k-1)")
def expected_improvement(g: Group, *, k: KOfPairs) -> Tensor:
    """EI_i = S_i - M_-i.

    It is sum_{j<i} C(j,k-1)/C(N-1,k-1) d_j."""
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

    sum_{k=1..T} C(j,k)/C(n-1,k) = n/(n-j) (1 - C(j,T+1)/C(n,T+1)) - 1."""
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
    C(F,k)/C(N,k)."""
    # rho is the mean of S. 1 - rho comes from C(F,k)/C(N,k) itself: near rho = 1 the difference
    # would lose it.
    wrong = (g.valid & (g.rewards == 0)).sum(1, keepdim=True)
    missed = g.within(k, g.n).gather(1, wrong)
    return g.centre(-shortfall(g, k)) / ((missed * (1 - missed)).sqrt() + 1e-6)


ClampDelta = Annotated[
    NotNegative,
    Help("Clamp probability ratios of responses to at most this distance from 1; 0: do not."),
]
_SECTION = "The Best of N Worlds, Bagirov et al. 2025, section 3.3"


def _deltas(g: Group, log_ratios: Tensor, clamp: float) -> tuple[Tensor, Tensor]:
    """Return delta [G, N], in the order of the rollouts, and D [G, N], by rank."""
    delta = where(g.valid, log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1(), 0.0)
    delta = delta.clamp(-clamp, clamp) if clamp else delta
    return delta, delta.gather(1, g.order).cumsum(1)


def _with_ratios(
    g: Group, at_one: Tensor, slopes: Tensor, log_ratios: Tensor, clamp: float
) -> Tensor:
    """Return the advantages from those at ratios of 1 and v_j = (k-1) u_j [G, N-1]. A set of
    rollouts has the weight 1 + the sum of its delta, the first order of the product of its rho = 1
    + delta: docs/objectives/off_policy.md."""
    delta, sums = _deltas(g, log_ratios, clamp)
    rise = slopes * g.gaps
    fall = rise * (g.n - g.j) / (g.j - 1).clamp_min(1)  # v_1 = 0
    change = g.below(rise * sums[:, :-1]) - g.above(fall * sums[:, :-1]) + delta * g.above(fall)
    return (1 + delta) * (at_one + change)


@estimator(
    f"maxpo with the ratios of {_SECTION}",
    weight="depends on the ratios; (1-p)^(k-1) where they are 1",
    centred=True,
)
def maxpo_off_policy(
    g: Group, log_ratios: Tensor, *, k: KBelowN, clamp_delta: ClampDelta = 0.0
) -> Tensor:
    """rho_i (S_i - S_-i), subsets of the k-1 others weighted by 1 + the sum of their rho - 1."""
    slopes = (k - 1) * g.within(k, g.n - 1)[:, 1:-1] / g.j
    return _with_ratios(g, maxpo(g, k=k), slopes, log_ratios, clamp_delta)


@estimator(
    f"maxrl with the ratios of {_SECTION}",
    weight="depends on the ratios; (1-(1-p)^order)/p where they are 1",
    centred=True,
)
def maxrl_off_policy(
    g: Group, log_ratios: Tensor, *, order: Order = None, clamp_delta: ClampDelta = 0.0
) -> Tensor:
    """the sum of maxpo_off_policy over k = 1..order."""
    # With t_j(k) = C(j,k)/C(N-1,k), T = order and R = N-1-T, sums over k from 0 to T telescope:
    #     sum_k t_j(k) = (N - R t_j(T+1))/(N-j) =: P
    #     sum_k k t_j(k) = (j P - (T+1) R t_j(T+1))/(N+1-j) =: Q,   v_j = (Q - P + 1)/j
    largest = g.n - 1 if order is None else order
    left = g.n - 1 - largest
    lost = left * g.within(largest + 1, g.n - 1)[:, 1:-1]
    plain = (g.n - lost) / (g.n - g.j).clamp_min(1)
    by_size = (g.j * plain - (largest + 1) * lost) / (g.n + 1 - g.j).clamp_min(1)
    return _with_ratios(
        g, maxrl(g, order=order), (by_size - plain + 1) / g.j, log_ratios, clamp_delta
    )


@estimator(
    f"{_SECTION}, off-policy BoN",
    weight="depends on the ratios; (k/N) (1-p)^(k-1) where they are 1",
)
def bon_off_policy(g: Group, log_ratios: Tensor, *, k: K, clamp_delta: ClampDelta = 0.0) -> Tensor:
    """(k/N) S_i, subsets weighted by 1 + the sum of their rho - 1."""
    delta, sums = _deltas(g, log_ratios, clamp_delta)
    mean_weight = 1 + delta + (k - 1) * (sums[:, -1:] - delta) / (g.n - 1).clamp_min(1)
    below = g.within(k - 1, g.n - 1)[:, :-2] * g.gaps
    of_others = (k - 1) * below / (g.j - 1).clamp_min(1)
    loss = shortfall(g, k) + g.above(below - of_others) * delta + g.above(of_others * sums[:, :-1])
    return k / g.n * (mean_weight * g.largest(g.rewards) - loss)


def stopped_maxrl(rewards: Tensor, valid: Tensor, drawn_by: Tensor, stop_at: int) -> Tensor:
    """Return A_i = r_i/K - min(K_-i, m)/(m n_i), [G, N] float64, of groups that were drawn in whole
    rounds: K successes of the group, m = stop_at, n_i = drawn_by, K_-i successes among the others
    of these n_i; 0 where K = 0.

    Args:
        rewards: [G, N], 0 or 1, in the order of sampling.
        valid: [G, N] bool, False where a rollout was not drawn, or has no reward.
        drawn_by: int64 [G, N], the rollouts of the prompt after the round of each; 0 if not drawn.
    """
    r = torch.where(valid, rewards.double(), 0.0)
    others = r.cumsum(1).gather(1, (drawn_by - 1).clamp_min(0)) - r
    baseline = others.clamp_max(stop_at) / (stop_at * drawn_by.clamp_min(1))
    return torch.where(valid, r / r.sum(1, keepdim=True).clamp_min(1) - baseline, 0.0)
