from fractions import Fraction
from itertools import combinations
from math import comb

import numpy
import pytest
import torch

from maxrl_fast.evaluation import coverage
from maxrl_fast.evaluation.coverage import (
    bootstrap,
    majority_at_k,
    max_at_k,
    mean_over_sets,
    outcomes,
)
from tests import brute_force


def pass_at_k(n, num_correct, k):
    return max_at_k(outcomes(n, num_correct), k)


def test_pass_at_k_is_exact():
    for n in (1, 2, 7, 16):
        for k in range(1, n + 1):
            actual = pass_at_k(n, torch.arange(n + 1), k)
            expected = [float(brute_force.pass_at_k(n, c, k)) for c in range(n + 1)]
            assert actual.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    for c, k in ((1, 512), (100, 256), (1000, 3)):
        actual = pass_at_k(1024, torch.tensor(c), k).item()
        assert actual == pytest.approx(float(brute_force.pass_at_k(1024, c, k)), rel=1e-10)
    # the best of k of n consecutive numbers is (k n - 1) / (k + 1) on average
    for k in (1, 10, 512, 1024):
        best = max_at_k(torch.arange(1024).float()[None], k).item()
        assert best == pytest.approx(k * 1025 / (k + 1) - 1, rel=1e-11)


def test_a_k_out_of_range_is_refused():
    with pytest.raises(ValueError, match="from 1 to the 8 samples of a prompt, got 9"):
        pass_at_k(8, torch.tensor([1]), 9)
    with pytest.raises(ValueError, match="got 4"):
        majority_at_k(torch.zeros(2, 3).long(), torch.ones(2, 3) > 0, [1, 4], 0)


# with ties
REWARDS = [
    [-3.0, -1.5, -1.5, -0.25, -7.0],
    [2.0, 2.0, 2.0, 2.0],
    [0.5, -1.0, 3.0, 3.0, 0.0, 0.5],
    [4.0],
]


@pytest.mark.parametrize("rewards", REWARDS)
def test_max_at_k_is_the_mean_over_all_subsets_of_the_best_reward(rewards):
    shifted = [reward + 10 for reward in rewards[::-1]]
    for k in range(1, len(rewards) + 1):
        best = [max(Fraction(r) for r in subset) for subset in combinations(rewards, k)]
        expected = float(sum(best) / len(best))
        actual = max_at_k(torch.tensor([rewards, shifted]), k)
        assert actual.tolist() == pytest.approx([expected, expected + 10], rel=1e-12)


def majority_by_hand(answers, right, k):
    """Return maj@k as the mean over all subsets of size k. Answers that tie for the most votes
    share a subset equally."""
    pairs = [*zip(answers, right, strict=True)]
    worth = {a: Fraction(sum(r for b, r in pairs if b == a), answers.count(a)) for a in answers}
    total = Fraction(0)
    for subset in combinations(answers, k):
        votes = {a: subset.count(a) for a in subset if a != -1} or {-1: 1}
        tied = [a for a, count in votes.items() if count == max(votes.values())]
        total += sum(worth[a] for a in tied) / len(tied)
    return float(total / comb(len(answers), k))


GROUPS = [
    ([0, 1, 1, 2, 0, 1, 2], [1, 0, 0, 0, 1, 0, 0]),  # the majority is wrong
    ([0, 0, 1, 1, 2, 3, 0], [1, 1, 0, 0, 0, 0, 1]),  # ties among many
    ([0, 0, 0, 1, 1, 2, 2], [1, 0, 1, 0, 0, 1, 1]),  # an answer that is sometimes right
    ([-1, -1, -1, -1, 0, 1, 0], [0, 0, 0, 0, 1, 0, 1]),  # most do not answer
    ([-1, -1, -1, -1, -1, 0, -1], [1, 0, 0, 1, 0, 0, 0]),
    ([0] * 7, [1] * 7),
]


def test_majority_at_k_is_the_mean_over_all_subsets(monkeypatch):
    monkeypatch.setattr(coverage, "NUM_DRAWS", 40000)
    answers, right = (torch.tensor(x) for x in zip(*GROUPS, strict=True))
    actual = majority_at_k(answers, right.bool(), range(1, 8), seed=0)
    for group, values in zip(GROUPS, actual.tolist(), strict=True):
        for k, value in enumerate(values, start=1):
            # One draw is in [0, 1]: four standard errors of the mean are at most 0.01.
            limit = 1e-12 if k in (1, 7) else 0.01
            assert value == pytest.approx(majority_by_hand(*group, k), abs=limit)
    again = majority_at_k(answers, right.bool(), [2, 3], seed=0)
    assert torch.equal(again, majority_at_k(answers, right.bool(), [2, 3], seed=0))
    assert not torch.equal(again, majority_at_k(answers, right.bool(), [2, 3], seed=1))


def test_the_interval_of_a_fraction_is_binomial():
    num, p = 200, 0.3
    values = (torch.arange(num) < p * num).double()[:, None]
    probability = [comb(num, i) * p**i * (1 - p) ** (num - i) for i in range(num + 1)]
    below = [sum(probability[: i + 1]) for i in range(num + 1)]
    for confidence in (0.5, 0.95):
        [interval] = bootstrap(values, 20000, confidence, seed=3)
        assert interval["mean"] == pytest.approx(p, abs=1e-12)
        for name, tail in (("low", (1 - confidence) / 2), ("high", (1 + confidence) / 2)):
            expected = next(i for i, b in enumerate(below) if b >= tail) / num
            assert interval[name] == pytest.approx(expected, abs=1.01 / num)


@pytest.mark.parametrize(
    ("a", "b", "n"), [(0.05, 0.95, 1), (0.7, 0.3, 1), (0.05, 4.95, 16), (4.95, 0.05, 16)]
)
def test_intervals_of_30_prompts_cover_the_mean(a, b, n):
    """Each column is an evaluation: pass rates of a beta distribution, with n samples."""
    draw = numpy.random.default_rng(0)
    rates = draw.binomial(n, draw.beta(a, b, (2, 30, 400))) / n
    sets = [bootstrap(torch.tensor(x), 1000, 0.95, seed=0) for x in rates]
    both = [mean_over_sets(pair) for pair in zip(*sets, strict=True)]
    for intervals in (*sets, both):
        covered = sum(x["low"] <= a / (a + b) <= x["high"] for x in intervals) / 400
        assert covered > 0.92  # two standard errors below .94


def test_no_success_is_not_certainty():
    values = torch.tensor([[0, 1.0]]).expand(30, 2)
    none, all_right = bootstrap(values, 100, 0.95, seed=0)
    most = pytest.approx(1.96**2 / (30 + 1.96**2), rel=1e-4)
    assert (none["low"], none["high"]) == (0, most)
    assert (1 - all_right["low"], all_right["high"]) == (most, 1)
    (gain,) = bootstrap(torch.tensor([-1.0, *[0] * 29])[:, None], 100, 0.95, seed=0)
    assert gain["low"] < -0.15  # one is lost, and more may be
    assert gain["high"] > 0.08


def test_the_bootstrap_is_seeded_and_draws_the_same_prompts_for_all_columns(monkeypatch):
    values = torch.rand(30, 2, generator=torch.Generator().manual_seed(0))
    values[:, 1] = 1 - values[:, 0]
    first = bootstrap(values, 100, 0.95, seed=0)
    assert first[0]["low"] == pytest.approx(1 - first[1]["high"], abs=1e-12)
    assert first == bootstrap(values, 100, 0.95, seed=0)
    assert first != bootstrap(values, 100, 0.95, seed=1)
    monkeypatch.setattr(coverage, "RESAMPLED", 30 * 7)  # in chunks of 7 resamples
    assert bootstrap(values, 100, 0.95, seed=0) == first
