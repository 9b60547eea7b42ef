"""Advantages of max@k for rollouts that another policy sampled, from the ratios rho_i = 1 + delta_i
of whole responses.

A set of rollouts has the weight 1 + the sum of its delta, the first order of the product of its
rho; the reasons and the sum by gaps are in docs/objectives/off_policy.md. At delta = 0 it is maxpo;
`_with_ratios` adds the terms with v_j = (k-1) u_j. For the sum over k =
1..T, with t_j = C(j,T+1)/C(N-1,T+1) and R = N-1-T, telescoping sums over k from 0 to T give

    sum_k t_j(k) = (N - R t_j)/(N-j) =: P,
    sum_k k t_j(k) = (j P - (T+1) R t_j)/(N+1-j) =: Q,   v_j = (Q - P + 1)/j.
"""

from typing import Annotated

from torch import Tensor, where

from maxrl_fast.algorithms.estimator import K, KBelowN, Order, estimator
from maxrl_fast.algorithms.estimators.max_at_k import maxpo, maxrl, shortfall
from maxrl_fast.algorithms.group import Group
from maxrl_fast.algorithms.options import Help, NotNegative
from maxrl_fast.algorithms.tokens import MAX_LOG_RATIO

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
    """Return the advantages from those at ratios of 1 and v_j [G, N-1]."""
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
