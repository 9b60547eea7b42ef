"""What n samples of each prompt say about the best, the majority or any of k: unbiased estimates, and how sure they are.

Shapes: P prompts, n samples each, c of them correct. All estimates of a prompt are means over its size-k subsets of samples,
drawn without replacement, in float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from maxrl_fast.ops.estimator_tables import subset_ratios

NUM_DRAWS = 500  # of subsets, for maj@k: a prompt's estimate then has a standard error of at most 0.5 / sqrt(500) = 0.022
ROUNDING = 1e-12  # by which two estimates of the same number may differ
RESAMPLED = 1 << 24  # most prompts drawn at once by the bootstrap: 128 MB


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, ... up to `largest`."""
    return [2**i for i in range(largest.bit_length())]


def _ratios_of_wrong(num_samples: int, num_correct: Tensor, k: int) -> Tensor:
    """Probability [..., k] that the i-th draw is wrong, when those before it were."""
    _check_k("pass", num_samples, k)
    wrong = (num_samples - num_correct).double()[..., None]
    i = torch.arange(k, dtype=torch.float64, device=num_correct.device)
    return ((wrong - i) / (num_samples - i)).clamp_min(0)


def pass_at_k(num_samples: int, num_correct: Tensor, k: int) -> Tensor:
    """Unbiased estimate 1 - C(n-c, k) / C(n, k) from c correct of n samples (Chen et al. 2021, eq. 1).

    Shapes: num_correct int [...] -> float64 [...]. A product of ratios in [0, 1], which neither over- nor underflows badly.

    Raises:
        ValueError: unless 1 <= k <= n.
    """
    return 1 - _ratios_of_wrong(num_samples, num_correct, k).prod(-1)


def coverage_curve(num_samples: int, num_correct: Tensor) -> Tensor:
    """pass@k for every k = 1..n, the mean over prompts: num_correct int [P] -> float64 [n]."""
    counts, numbers = num_correct.cpu().unique(return_counts=True)  # each once: 8 n bytes for each
    share = numbers.double() / num_correct.numel()
    return share @ (1 - _ratios_of_wrong(num_samples, counts, num_samples).cumprod(-1))


def max_at_k(rewards: Tensor, k: int) -> Tensor:
    """Mean over the size-k subsets of their best reward (pass@k for any reward; MaxPO's S over all samples).

    Shapes: rewards [P, n] -> float64 [P]. Of the ascending rewards, r_(i) is the best of C(i-1, k-1) of the C(n, k) subsets: a
    share of q_i k / i, with q_i = C(i, k) / C(n, k) by recurrence. Rewards may be any finite numbers.

    Raises:
        ValueError: unless 1 <= k <= n.
    """
    num_samples = rewards.shape[1]
    _check_k("max", num_samples, k)
    rank = torch.arange(1, num_samples + 1, dtype=torch.float64)
    weights = subset_ratios(num_samples, k)[1:] * k / rank
    return rewards.double().sort(1).values @ weights.to(rewards.device)


def majority_at_k(answers: Tensor, is_correct: Tensor, ks: Sequence[int], seed: int) -> Tensor:
    """Probability that the answer which most of k samples give is right, ties at random (self-consistency, Wang et al. 2023).

    The mean over size-k subsets, from NUM_DRAWS of them; exact for k = 1, where it is c / n, and for k = n, where there is one
    subset. Ties are not drawn: each tied answer counts equally. An answer is worth the share of correct ones among all samples
    that give it: 0 or 1 where the answer alone decides the reward. Samples without an answer have no vote, but where none of
    the k has one they are the answer.

    Args:
        answers: int64 [P, n], equal numbers for equal answers of a prompt, from 0 on; -1 for none.
        is_correct: bool [P, n].
        ks: each from 1 to n.
        seed: of the draws.

    Returns:
        float64 [P, len(ks)].

    Raises:
        ValueError: unless 1 <= k <= n.
    """
    num_prompts, num_samples = answers.shape
    for k in ks:
        _check_k("maj", num_samples, k)
    generator = torch.Generator().manual_seed(seed)
    result = torch.empty(num_prompts, len(ks), dtype=torch.float64)
    for prompt, (own, right) in enumerate(zip(answers.cpu(), is_correct.cpu().double(), strict=True)):
        own = own + 1  # 0 for none
        sizes = torch.bincount(own)
        worth = torch.bincount(own, weights=right) / sizes.clamp_min(1)  # [A+1]
        drawn = own[torch.rand(NUM_DRAWS, num_samples, generator=generator).argsort(1)]  # [D, n]; its first k are a subset
        for column, k in enumerate(ks):
            if k == 1:
                result[prompt, column] = right.mean()
                continue
            subsets = own[None] if k == num_samples else drawn[:, :k]
            votes = torch.zeros(len(subsets), len(sizes)).scatter_add_(1, subsets, torch.ones(subsets.shape))
            votes[:, 0] = 0.5  # less than any vote, more than none
            is_most = (votes == votes.amax(1, keepdim=True)).double()
            result[prompt, column] = (is_most @ worth / is_most.sum(1)).mean()
    return result


def _check_k(what: str, num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"{what}@k of {num_samples} samples needs 1 <= k <= {num_samples}, got {k}")


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float


def bootstrap(values: Tensor, resamples: int, confidence: float, seed: int) -> list[Interval]:
    """Means over prompts, with percentile intervals from prompts drawn with replacement (Efron and Tibshirani 1993, ch. 13).

    What differs between prompts is in the interval, what differs between the samples of one is through it. All columns meet the
    same draws, so that the interval of a difference is that of a column of differences.

    Shapes: values [P, M] -> M intervals.
    """
    num_prompts, values = len(values), values.double().cpu()
    generator = torch.Generator().manual_seed(seed)
    means = []
    for start in range(0, resamples, max(1, RESAMPLED // num_prompts)):
        count = min(resamples - start, max(1, RESAMPLED // num_prompts))
        drawn = torch.randint(num_prompts, (count, num_prompts), generator=generator)
        times = torch.zeros(count, num_prompts, dtype=torch.float64)
        times.scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=torch.float64))
        means.append(times @ values / num_prompts)
    tail = (1 - confidence) / 2
    low, high = np.quantile(torch.cat(means).numpy(), [tail, 1 - tail], axis=0)
    return [Interval(float(m), float(a), float(b)) for m, a, b in zip(values.mean(0), low, high, strict=True)]


@dataclass(frozen=True)
class Support:
    """Number of prompts by who solved them at least once in the same number of samples (Wu et al. 2025, empirical support)."""

    preserved: int  # both
    expanded: int  # this policy alone
    shrunk: int  # the baseline alone
    out_of_support: int  # neither


def support_classes(num_correct: Tensor, num_correct_of_baseline: Tensor) -> Support:
    """Counts over prompts, from correct samples int [P] of each policy."""
    own, base = num_correct > 0, num_correct_of_baseline > 0
    counts = (own & base, own & ~base, ~own & base, ~own & ~base)
    return Support(*(int(count.sum()) for count in counts))


def samples_to_match(num_samples: int, num_correct: Tensor, target: float) -> int | None:
    """The smallest k whose pass@k, exact at every integer, is at least `target`; None where that takes more than n samples."""
    reached = (coverage_curve(num_samples, num_correct) >= target - ROUNDING).nonzero()
    return int(reached[0]) + 1 if len(reached) else None
