"""The tables that the kernel computes estimators by, for each group size n: float64, by recurrence.

A rank table [2, n] holds `offset` and `slope`: for ascending rewards r_(1) <= ... <= r_(n), gaps
d_0 = r_(1), d_j = r_(j+1) - r_(j),

    v_(i) = sum_{j >= 0} offset_j d_j + sum_{1 <= j < i} slope_j d_j.

The table of a sum of estimators is therefore the sum of their tables, and centring is a choice of
offset. A binary table [2, n+1] holds the advantages of a wrong and of a correct rollout, by the
number of correct rollouts.

Notation: S_i the mean of the maximum over the size-k subsets that contain i, S_-i over those
without i, M_-i over the size-(k-1) subsets of the others.
"""

import torch
from torch import Tensor


def subset_ratios(n: int, k: int) -> Tensor:
    """Return q_j = C(j, k) / C(n, k) for j = 0..n, float64; underflow to 0 is harmless."""
    j = torch.arange(1, n + 1, dtype=torch.float64)
    factors = ((j - k).clamp_min(0) / j).flip(0)  # from q_n down
    return torch.cat([factors.new_ones(1), factors.cumprod(0)]).flip(0)


def _gaps(n: int) -> Tensor:
    """Return j = 1..n-1 [n-1]."""
    return torch.arange(1, n, dtype=torch.float64)


def _uncentred(slope: Tensor, offset: Tensor | None = None, lowest: float = 0.0) -> Tensor:
    """Return the table of slopes and offsets [n-1] of the gaps; `lowest` is the weight of r_(1)."""
    slopes = torch.cat([slope.new_zeros(1), slope])
    offset = torch.zeros_like(slope) if offset is None else offset
    offsets = torch.cat([slope.new_tensor([lowest]), offset])
    return torch.stack([offsets, slopes])


def _centred(slope: Tensor) -> Tensor:
    """Return the table with mean 0 in every group: gap j raises the n - j rollouts above it."""
    n = len(slope) + 1
    return _uncentred(slope, -slope * (n - _gaps(n)) / n)


def maxpo(n: int, k: int) -> Tensor:
    """S_i - S_-i."""
    return _centred(n / _gaps(n) * subset_ratios(n - 1, k)[1:])


def expected_improvement(n: int, k: int) -> Tensor:
    """EI_i = S_i - M_-i."""
    return _uncentred(subset_ratios(n - 1, k - 1)[1:])


def leave_two_out(n: int, k: int) -> Tensor:
    """L2O_i = S_-i - M_-i."""
    return expected_improvement(n, k) - maxpo(n, k)


def ei_l1o(n: int, k: int) -> Tensor:
    """EI_i minus the mean of the other EI_j: biased, an ablation."""
    return _centred(subset_ratios(n - 1, k - 1)[1:] * n / (n - 1))


def maxrl(n: int, order: int) -> Tensor:
    """sum_{k=1..order} maxpo_k."""
    j = _gaps(n)
    return _centred(n / j * (n / (n - j) * (1 - subset_ratios(n, order + 1)[1:n]) - 1))


def pkpo(n: int, k: int) -> Tensor:
    """(k/n) EI_i."""
    return expected_improvement(n, k) * (k / n)


def conditional_max(n: int, k: int) -> Tensor:
    """S_i."""
    # C(j-1, k-1) / C(n-1, k-1): the k-1 others are below gap j, as i is
    below = subset_ratios(n - 1, k - 1)[:-1]
    return _uncentred(below, 1 - below, lowest=1.0)


def leave_one_out_max(n: int, k: int) -> Tensor:
    """S_-i."""
    ratios = subset_ratios(n - 1, k)  # C(j, k) / C(n-1, k): all k are among the j lowest
    return _uncentred(ratios[:-1] - ratios[1:], 1 - ratios[:-1], lowest=1.0)


def pkpo_sloo(n: int, k: int) -> Tensor:
    """(k/n) S_i - (k/(n-1)) S_-i."""
    return conditional_max(n, k) * (k / n) - leave_one_out_max(n, k) * (k / (n - 1))


def max_minus_second(n: int, _: int) -> Tensor:
    """The best reward minus the second best, for the best rollout."""
    slope = torch.zeros(n - 1, dtype=torch.float64)
    slope[-1:] = 1
    return _uncentred(slope)


def pacs_first_update(n: int, _: int, beta: float) -> Tensor:
    """-B beta dL/dr at reward proxies r = 0, for PACS's balanced loss with rloo scores."""
    # groups with both outcomes; the others have 0
    correct = torch.arange(1, n, dtype=torch.float64)
    scale = beta * n * n / (4 * max(n - 1, 1))
    return torch.nn.functional.pad(torch.stack([-scale / (n - correct), scale / correct]), (1, 1))


def over_others_std(n: int, _: int) -> Tensor:
    """(r_i - m)/(s + 1e-6), m and s the mean and sample standard deviation of the others; r_i -
    m where these are all equal."""
    others = max(n - 1, 1)

    def of_reward(reward: float, correct: Tensor) -> Tensor:
        variance = correct * (others - correct) / (others * max(others - 1, 1))
        return (reward - correct / others) / torch.where(variance > 0, variance.sqrt() + 1e-6, 1.0)

    correct = torch.arange(n + 1, dtype=torch.float64)
    table = torch.stack([of_reward(0.0, correct), of_reward(1.0, correct - 1)])
    table[0, n] = table[1, 0] = 0  # not read, since no rollout is wrong, or correct
    return table * (n > 1)


def passk_training(n: int, k: int) -> Tensor:
    """The standardised reward of groups of k, averaged over a rollout's groups (Chen et al.)."""
    correct = torch.arange(n + 1, dtype=torch.float64)
    wrong_groups = subset_ratios(n, k).flip(0)  # 1 - rho = C(F, k) / C(n, k), by C = n - F
    divisor = (wrong_groups * (1 - wrong_groups)).sqrt() + 1e-6
    # 1 - rho - C(F-1, k-1) / C(n-1, k-1) without the cancellation
    wrong_with_me = torch.cat([subset_ratios(n - 1, k - 1).flip(0), correct.new_zeros(1)])
    table = torch.stack([-correct / n * wrong_with_me, wrong_groups]) / divisor
    table[1, 0] = 0  # not read, since no rollout is correct
    return table
