"""Unbiased estimates of pass@k, max@k and maj@k from n samples of each of P prompts, c of them
correct, with bootstrap intervals. A prompt's estimate is a mean over size-k subsets of its samples,
in float64."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from maxrl_fast.algorithms.estimators.max_at_k import subset_ratios

# subsets for maj@k: the standard error of a prompt's estimate is at most 0.5 / sqrt(500) = 0.022
NUM_DRAWS = 500
ROUNDING = 1e-12  # two estimates of the same number may differ by this much
RARE = 10  # where fewer prompts than this differ from the others, a bootstrap misses the rest
RESAMPLED = 1 << 24  # largest number of prompts that the bootstrap draws at once: 128 MB

Interval = dict[str, float]  # "mean", "low" and "high", as in eval.json


def powers_of_two(largest: int) -> list[int]:
    """Return 1, 2, 4, ... up to `largest`."""
    return [2**i for i in range(largest.bit_length())]


def max_at_k(rewards: Tensor, k: int) -> Tensor:
    """Return the mean best reward of size-k subsets, 1 <= k <= n: rewards [..., n] -> float64
    [...]. In ascending order, r_(i) is the best of C(i-1, k-1) of the C(n, k) subsets, a fraction
    q_i k / i, where q_i = C(i, k) / C(n, k). Of rewards of 1 and 0 it is pass@k, 1 - C(n-c, k) /
    C(n, k) of c correct ones (Chen et al. 2021, eq. 1)."""
    num_samples = rewards.shape[-1]
    _check_k(num_samples, k)
    rank = torch.arange(1, num_samples + 1, dtype=torch.float64)
    weights = subset_ratios(num_samples, k)[1:] * k / rank
    return rewards.double().sort(-1).values @ weights.to(rewards.device)


def outcomes(num_samples: int, num_correct: Tensor) -> Tensor:
    """Return c ones and n - c zeros: num_correct int [...] -> float64 [..., n]."""
    places = torch.arange(num_samples, device=num_correct.device)
    return (places < num_correct[..., None]).double()


def majority_at_k(answers: Tensor, is_correct: Tensor, ks: Sequence[int], seed: int) -> Tensor:
    """Return the probability that the majority answer of k samples is correct (self-consistency,
    Wang et al. 2023): answers [P, n], integers that are equal where the answers to a prompt are,
    -1: none; is_correct bool [P, n] -> float64 [P, len(ks)].

    The mean over NUM_DRAWS random subsets of size k; exact for k = 1 (c / n) and k = n. Tied
    answers count equally. An answer is worth the fraction of correct samples among all that give
    it. Samples without an answer have no vote, unless none of the k has one."""
    num_prompts, num_samples = answers.shape
    for k in ks:
        _check_k(num_samples, k)
    generator = torch.Generator().manual_seed(seed)
    result = torch.empty(num_prompts, len(ks), dtype=torch.float64)
    pairs = zip(answers.cpu().long() + 1, is_correct.cpu().double(), strict=True)
    for prompt, (own, right) in enumerate(pairs):  # own 0: no answer
        sizes = torch.bincount(own)
        worth = torch.bincount(own, weights=right) / sizes.clamp_min(1)  # [A+1]
        # [D, n]; a row's first k are a subset
        drawn = own[torch.rand(NUM_DRAWS, num_samples, generator=generator).argsort(1)]
        for column, k in enumerate(ks):
            if k == 1:
                result[prompt, column] = right.mean()
                continue
            subsets = drawn[:, :k]
            votes = torch.zeros(len(subsets), len(sizes)).scatter_add_(
                1, subsets, torch.ones(subsets.shape)
            )
            votes[:, 0] = 0.5  # less than one vote, more than none
            is_most = (votes == votes.amax(1, keepdim=True)).double()
            result[prompt, column] = (is_most @ worth / is_most.sum(1)).mean()
    return result


def _check_k(num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be from 1 to the {num_samples} samples of a prompt, got {k}")


def bootstrap(values: Tensor, resamples: int, confidence: float, seed: int) -> list[Interval]:
    """Return the means of values [P, M] over prompts, with M intervals from a bootstrap over
    prompts: percentiles (Efron and Tibshirani 1993, ch. 13), as far out as those of a t
    distribution with n/(n - 1) times the variance (Hesterberg 2015). Where fewer than RARE prompts
    differ from the most common value, they reach at least to Wilson's bounds."""
    num_prompts, values = len(values), values.double().cpu()
    generator = torch.Generator().manual_seed(seed)
    means, most_drawn = [], max(1, RESAMPLED // num_prompts)
    for start in range(0, resamples, most_drawn):
        count = min(resamples - start, most_drawn)
        drawn = torch.randint(num_prompts, (count, num_prompts), generator=generator)
        times = torch.zeros(count, num_prompts, dtype=torch.float64)
        times.scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=torch.float64))
        means.append(times @ values / num_prompts)
    z, free = NormalDist().inv_cdf((1 + confidence) / 2), max(num_prompts - 1, 1)
    t = z + (z**3 + z) / (4 * free)
    tail = NormalDist().cdf(-t * math.sqrt(num_prompts / free))
    bounds = np.quantile(torch.cat(means).numpy(), [tail, 1 - tail], axis=0)
    low, high = torch.from_numpy(bounds)
    common = values.mode(0).values
    is_rare = (values != common).sum(0) < RARE
    least, most = _wilson_bounds(values, common, z)
    low = low.minimum(least.where(is_rare, low))
    high = high.maximum(most.where(is_rare, high))
    return [
        {"mean": float(m), "low": float(a), "high": float(b)}
        for m, a, b in zip(values.mean(0), low, high, strict=True)
    ]


def _wilson_bounds(values: Tensor, common: Tensor, z: float) -> tuple[Tensor, Tensor]:
    """Return Wilson's bounds [M] of the means of values [P, M]: of how far they lie above and below
    the most common value, as shares of how far they can: to 1 and 0, or -1 for differences."""
    least, most = float(values.min()), float(values.max())
    up, down = max(most, 1.0) - common, common - (0.0 if least >= 0 else min(least, -1.0))
    extra, bounds = z * z / len(values), list[Tensor]()
    for side, far in ((values - common, up), (common - values, down)):
        share = side.clamp_min(0).mean(0) / far.clamp_min(ROUNDING)
        half = (extra * (share * (1 - share) + extra / 4)) ** 0.5
        bounds += [(share + extra / 2 + sign * half) / (1 + extra) for sign in (-1, 1)]
    above, most_above, below, most_below = bounds
    return common + above * up - most_below * down, common + most_above * up - below * down


def mean_over_sets(intervals: Sequence[Interval]) -> Interval:
    """Return the mean of independent sets of prompts. The distances from the means to the bounds
    add as squares (Zou and Donner 2008)."""
    mean = sum(x["mean"] for x in intervals) / len(intervals)
    below, above = (
        math.hypot(*(x["mean"] - x[bound] for x in intervals)) / len(intervals)
        for bound in ("low", "high")
    )
    return {"mean": mean, "low": mean - below, "high": mean + above}
