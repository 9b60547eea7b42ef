"""Group advantages against their definitions in exact rationals, and the rules for ties, scale, layout and dtype."""

import itertools
import math
import subprocess
import sys
import warnings
from fractions import Fraction
from math import comb

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from maxrl_fast import _C, ops
from maxrl_fast.ops.estimators import KERNEL_ROWS
from maxrl_fast.ops.group_advantage_reference import group_advantage_reference
from tests import brute_force
from tests.ops.definitions import DEFINITIONS, OFF_POLICY, OPTIONS, grpo, mean, opo, qae, standardised, std

GROUPS = [
    [0, 1],
    [3, 3],
    [1, 0, 0],
    [0, 3, 1, 3, "0.5", 2],
    [-2, -5, "-0.25", -5, 7],
    [1, 0, 1, 1, 0, 0, 0],
    [2, 2, 2, 2],
    [0, 0, 0],
    [5, 1, 4, 1, 3, 9, 2, 6],
]
BINARY_GROUPS = [[1] * c + [0] * (n - c) for n in (1, 2, 5, 8) for c in range(n + 1)]
OVER_THE_BATCH = [name for name, row in ops.ESTIMATORS.items() if row.over_batch]


def tensor(rewards, dtype=torch.float64):
    return torch.tensor([float(Fraction(r)) for r in rewards], dtype=dtype)


def sizes_of(name, n):
    """Return keyword arguments for every size that groups of n allow."""
    size = ops.ESTIMATORS[name].size
    if size is None:
        return [{}]
    return [{size.name: k} for k in range(size.smallest, n - size.below_n + 1)]


def call(name, rewards, **keywords):
    """Call group_advantage with all inputs that the estimator needs. Equal rewards get equal inputs."""
    row = ops.ESTIMATORS[name]
    flat = torch.arange(rewards.numel()).view(rewards.shape)
    inputs = {"lengths": 1 + flat % 5, "logprobs": -(1 + flat % 7).double(), "greedy_correct": flat % 2 == 0}
    inputs |= {"greedy_rewards": flat % 3 / 4, "reward_parts": torch.stack([flat % 2, flat % 5])}
    inputs["log_ratios"] = (flat % 3 - 1).double() / 8
    size = {"k": 2} if row.size is not None and row.size.required else {}
    given = {"offsets", "group_ids"} & keywords.keys()
    if given:  # one per rollout, so that a permutation of the rewards permutes it too
        inputs["greedy_correct"] = rewards > 1e9
    return ops.group_advantage(
        rewards, name, **{**size, **OPTIONS.get(name, {}), **{i: inputs[i] for i in row.inputs}, **keywords}
    )


def assert_matches(actual, expected, tolerance=1e-12):
    expected = tensor([*expected])
    assert actual.dtype == torch.float64
    assert (actual - expected).abs().max() <= tolerance * (1 + expected.abs().max()), (actual, expected)


def usable_groups(name):
    return BINARY_GROUPS if ops.ESTIMATORS[name].binary or name == "noisy_verifier_forward" else [*GROUPS, *BINARY_GROUPS]


@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_size_equals_the_definition(name):
    some_are_not_zero = False
    for rewards in usable_groups(name):
        if len(rewards) == 1 and (
            ops.ESTIMATORS[name].size is not None or name in ("rloo", "bon_max_second", "pacs_first_update")
        ):
            continue  # no size fits, or there are no others: tested below
        for size in sizes_of(name, len(rewards)):
            exact = [Fraction(r) for r in rewards]
            expected = DEFINITIONS[name](exact, next(iter(size.values()), 0))
            inputs = {"lengths": torch.ones(len(rewards), dtype=torch.int64)} if name == "opo" else {}
            actual = ops.group_advantage(tensor(rewards), name, **size, **OPTIONS.get(name, {}), **inputs)
            assert_matches(actual, expected, 1e-11 if name == "passk_training" else 1e-12)
            some_are_not_zero |= bool(actual.abs().max() > 0.1)
    assert some_are_not_zero


def test_every_estimator_has_a_definition_or_its_own_test():
    by_itself = {*OVER_THE_BATCH, "differential_smoothing", "unlikeliness", "self", "remax", *OFF_POLICY}
    assert set(DEFINITIONS) | by_itself == set(ops.ESTIMATORS)


@pytest.mark.parametrize("rewards", GROUPS)
def test_options(rewards):
    n, exact = len(rewards), [Fraction(r) for r in rewards]
    for ddof in (0, 1):
        expected = grpo(exact, 1e-3, ddof)
        assert_matches(ops.grpo_advantage(tensor(rewards), eps=1e-3, ddof=ddof), expected)
        actual = ops.group_advantage(tensor(rewards), "qae", quantile=0.7, eps=0.0, ddof=ddof)
        assert_matches(actual, qae(exact, "0.7", 0.0, ddof))
    lengths = [3 * i % 7 + 1 for i in range(n)]
    assert_matches(ops.group_advantage(tensor(rewards), "opo", lengths=torch.tensor(lengths)), opo(exact, lengths))
    ratio = ops.group_advantage(tensor(rewards), "maxrl_ratio", eps=0.25)
    assert_matches(ratio, [(r - sum(exact) / n) / (sum(exact) / n + Fraction("0.25")) for r in exact])
    weighted = ops.group_advantage(tensor(rewards), "w_reinforce", correct_weight=0.5)
    assert_matches(weighted, [r / 2 - (1 - r) for r in exact])
    if n > 2:
        for function in (ops.maxpo_advantage, ops.expected_improvement, ops.leave_two_out_baseline):
            assert_matches(function(tensor(rewards), 2, scale_by_k=True), (2 * function(tensor(rewards), 2)).tolist())


def test_quantiles_at_steps_of_the_empirical_distribution():
    rewards = torch.arange(30, dtype=torch.float64)
    for quantile, baseline in ((0.1, 2), (0.4, 11), (1.0, 29), (0.01, 0), (0.101, 3)):  # in floating point, .1 * 30 > 3
        actual = ops.group_advantage(rewards, "qae", quantile=quantile, eps=0.0)
        torch.testing.assert_close(actual, (rewards - baseline) / rewards.std())


def test_whitening_over_the_batch():
    rewards = torch.tensor([[0, 1, 1, 1], [5, 5, 5, 5], [1, 0, 0, 2]], dtype=torch.float64)
    centred = (rewards - rewards.mean(1, keepdim=True)).flatten()
    actual = ops.group_advantage(rewards, "reinforce_pp", eps=0.0)
    torch.testing.assert_close(actual.flatten(), centred / centred.std())
    assert (actual[1] == 0).all()
    valid = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 1]]).bool()
    kept = ops.group_advantage(rewards, "reinforce_pp", eps=0.0, valid=valid)[valid]
    groups = [row[keep] - row[keep].mean() for row, keep in zip(rewards, valid, strict=True)]
    torch.testing.assert_close(kept, torch.cat(groups) / torch.cat(groups).std())


@pytest.mark.parametrize(("eps", "ddof"), [(1e-6, 1), (0.25, 0)])
def test_lite_ppo_divides_by_the_standard_deviation_of_the_rewards_of_the_batch(eps, ddof):
    groups = [[0, 1, 1, 1], [5, 5, 5, 5], [1, 0, 0, 2]]
    given = {"eps": eps, "ddof": ddof}
    everything = [Fraction(r) for group in groups for r in group]
    expected = [
        float(Fraction(r) - mean([*map(Fraction, group)])) / (std(everything, ddof) + eps) for group in groups for r in group
    ]
    actual = ops.group_advantage(torch.tensor(groups), "lite_ppo", **given)
    assert_matches(actual.double().flatten(), expected, 1e-6)
    assert_matches(ops.group_advantage(torch.tensor(groups).double(), "lite_ppo", **given).flatten(), expected)
    assert (actual[1] == 0).all()
    valid = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 0, 0]]).bool()  # the last group is a group of one
    kept = [[Fraction(r) for r, keep in zip(*row, strict=True) if keep] for row in zip(groups, valid.tolist(), strict=True)]
    spread = std([r for group in kept for r in group], ddof) + eps
    part = ops.group_advantage(torch.tensor(groups).double(), "lite_ppo", valid=valid, **given)
    assert_matches(part[valid], [float(r - mean(group)) / spread for group in kept for r in group])
    assert (part[~valid] == 0).all()
    assert part[2, 1] == 0
    assert (ops.group_advantage(torch.full((2, 3), 0.1), "lite_ppo", **given) == 0).all()


def test_remax_subtracts_the_reward_of_the_greedy_response():
    rewards = torch.tensor([[1.0, 0, 0.5], [1, 1, 1], [0, 0, 0]], dtype=torch.float64)
    greedy = torch.tensor([0.5, 1, -1])
    expected = torch.tensor([[0.5, -0.5, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.float64)
    assert torch.equal(ops.group_advantage(rewards, "remax", greedy_rewards=greedy), expected)
    assert torch.equal(ops.group_advantage(rewards, "remax", greedy_rewards=greedy[:, None].expand(3, 3)), expected)
    alone = ops.group_advantage(torch.tensor([[3.5]]), "remax", greedy_rewards=torch.tensor([1.0]))
    assert alone.tolist() == [[2.5]]  # a group of one has a baseline too
    valid = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]]).bool()
    greedy[1] = torch.nan  # as where the greedy response has no reward
    part = ops.group_advantage(rewards, "remax", greedy_rewards=greedy, valid=valid)
    assert torch.equal(part, expected.masked_fill(~valid, 0.0))
    with pytest.raises(ValueError, match="greedy_rewards must be finite, got nan"):
        ops.group_advantage(rewards, "remax", greedy_rewards=greedy)
    with pytest.raises(ValueError, match="remax needs greedy_rewards"):
        ops.group_advantage(rewards, "remax")


def normalise_then_sum(parts, weights, valid, eps, ddof):
    """Return the advantages of GDPO of parts [R][G][N], None where one does not apply, from the definition."""
    sums = [[Fraction(0) for _ in group] for group in valid]
    for part, weight in zip(parts, weights, strict=True):
        for g, group in enumerate(part):
            members = [i for i, x in enumerate(group) if x is not None and valid[g][i]]
            values = [Fraction(group[i]) for i in members]
            normalised = standardised(values, mean(values), std(values, ddof), eps) if values else []
            for i, x in zip(members, normalised, strict=True):
                sums[g][i] += Fraction(weight) * Fraction(x)
    everything = [x for group, keep in zip(sums, valid, strict=True) for x, known in zip(group, keep, strict=True) if known]
    spread = std(everything, ddof) + eps
    return [[float(x - mean(everything)) / spread if known else 0.0 for x, known in zip(group, keep, strict=True)]
            for group, keep in zip(sums, valid, strict=True)]  # fmt: skip


@pytest.mark.parametrize(("weights", "eps", "ddof"), [(None, 1e-4, 1), ([1, -0.5], 0.25, 0)])
def test_gdpo_normalises_each_reward_before_the_sum(weights, eps, ddof):
    parts = [[[0, 1, 1, 1], [1, 1, 1, 1], [None, 0, 0, 1]], [[30, 10, 40, 10], [5, 9, 2, 6], [50, 30, 50, None]]]
    values = torch.tensor([[[torch.nan if x is None else x for x in group] for group in part] for part in parts])
    rewards, given = values.nan_to_num().sum(0).double(), {"eps": eps, "ddof": ddof, "reward_weights": weights}
    everywhere = [[True] * 4] * 3
    expected = normalise_then_sum(parts, weights or [1, 1], everywhere, eps, ddof)
    actual = ops.group_advantage(rewards, "gdpo", reward_parts=values, **given)
    assert_matches(actual.flatten(), itertools.chain(*expected), 1e-9)
    some = [[True, True, False, True], [True] * 4, [False, True, False, False]]  # a group of one has no spread
    part = ops.group_advantage(rewards, "gdpo", reward_parts=values, valid=torch.tensor(some), **given)
    assert_matches(part.flatten(), itertools.chain(*normalise_then_sum(parts, weights or [1, 1], some, eps, ddof)), 1e-9)
    assert not part[2].any()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(12).div(4, rounding_mode="floor")[order]
    shuffled = ops.group_advantage(
        rewards.flatten()[order], "gdpo", reward_parts=values.flatten(1)[:, order], group_ids=ids, **given
    )
    assert_matches(shuffled, actual.flatten()[order].tolist())
    equal = ops.group_advantage(rewards, "gdpo", reward_parts=torch.ones_like(values), **given)
    assert (equal == 0).all()


def test_gdpo_does_not_depend_on_the_scale_of_a_reward():
    first, second = torch.tensor([[0.0, 1, 0, 1], [1, 0, 0, 0]]), torch.tensor([[1.0, 1, 0, 0], [0, 1, 1, 1]])
    scales = [1.0, 100.0]
    by_scale = [ops.group_advantage(first + s * second, "gdpo", reward_parts=torch.stack([first, s * second])) for s in scales]
    torch.testing.assert_close(*by_scale, rtol=1e-3, atol=1e-3)
    summed = [ops.group_advantage(first + s * second, "reinforce_pp") for s in scales]
    assert (summed[0] - summed[1]).abs().max() > 0.3


def hero(verifier, scores, valid, half=Fraction("0.05"), eps=Fraction("1e-6"), ddof=1):
    """Return the advantages of HERO of [G][N] from the definition."""
    known = [[i for i, keep in enumerate(group) if keep] for group in valid]
    spreads = [std([Fraction(scores[g][i]) for i in members], ddof) for g, members in enumerate(known) if members]
    advantages = [[0.0] * len(group) for group in verifier]
    for g, members in enumerate(known):
        ranged = []
        for i in members:
            own = [Fraction(scores[g][j]) for j in members if verifier[g][j] == verifier[g][i]]
            share = (Fraction(scores[g][i]) - min(own)) / (max(own) - min(own) + eps)
            ranged.append((1 if verifier[g][i] else 0) - half + 2 * half * share)
        if members:
            spread = std([Fraction(scores[g][i]) for i in members], ddof)
            weight = 0.5 + 1.5 / (1 + math.exp(-5 * (spread - sum(spreads) / len(spreads))))
            for i, x in zip(members, ranged, strict=True):
                advantages[g][i] = weight * float(x - mean(ranged))
    return itertools.chain(*advantages)


def test_hero_ranges_the_score_within_the_verifiers_classes():
    verifier = [[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    scores = [[-1, 2, 0, 3, "0.5"], [0, 1, "0.25", 1, 2], [4, 4, 4, 4, 4], [9, 1, "-2.5", 0, 1]]
    parts = torch.tensor([verifier, [[float(x) for x in group] for group in scores]], dtype=torch.float64)
    everywhere = [[True] * 5] * 4
    actual = ops.group_advantage(parts.sum(0), "hero", reward_parts=parts)
    assert_matches(actual.flatten(), hero(verifier, scores, everywhere), 1e-9)
    assert (actual[1] != 0).all()  # all wrong: the score alone
    assert (actual[2] == 0).all()  # equal rewards
    assert actual[0][parts[0, 0] == 1].min() > actual[0][parts[0, 0] == 0].max()
    some = [[True, True, False, True, True], [False] * 5, [True] * 5, [False, True, False, False, False]]
    part = ops.group_advantage(parts.sum(0), "hero", reward_parts=parts, valid=torch.tensor(some), score_range=0.25)
    assert_matches(part.flatten(), hero(verifier, scores, some, half=Fraction("0.25")), 1e-9)
    assert not part[3].any()  # a group of one
    halves = torch.cat([parts, -parts[1:]])  # several scores are one, their weighted sum
    twice = ops.group_advantage(parts.sum(0), "hero", reward_parts=halves, reward_weights=[1, 1.5, 0.5])
    torch.testing.assert_close(twice, actual)


def test_bad_parts_are_refused_by_name():
    rewards, parts = torch.zeros(2, 3), torch.zeros(2, 2, 3)
    for name, given, message in (
        ("gdpo", {}, "gdpo needs reward_parts"),
        ("gdpo", {"reward_parts": parts[0]}, r"reward_parts must have the shape \(R, 2, 3\), got \(2, 3\)"),
        ("gdpo", {"reward_parts": parts[:0]}, r"reward_parts must have the shape \(R, 2, 3\), got \(0, 2, 3\)"),
        ("gdpo", {"reward_parts": parts, "reward_weights": [1]}, "a number for each of the 2 rewards, got 1"),
        ("gdpo", {"reward_parts": parts, "reward_weights": [1, torch.nan]}, "each of reward_weights must be a finite number"),
        ("gdpo", {"reward_parts": parts + torch.inf}, "must be finite"),
        ("rloo", {"reward_weights": [1]}, "rloo takes no reward_weights"),
        ("hero", {"reward_parts": parts[:1]}, "hero takes a verifier of weight 1 and one or more scores"),
        ("hero", {"reward_parts": parts, "reward_weights": [2, 1]}, "hero takes a verifier of weight 1"),
        ("hero", {"reward_parts": parts + 0.5}, "the verifier of hero must give 0 or 1, got 0.5"),
        ("hero", {"reward_parts": parts, "score_range": 0.5}, "score_range must be above 0 and below .5, got 0.5"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.group_advantage(rewards, name, **given)


def whitened_over_tokens(groups, eps, ddof):
    """Return the centred rewards of all rollouts (reward, length), standardised over a list of one number per token."""
    centred = [(Fraction(r) - mean([Fraction(x) for x, _ in group]), length) for group in groups for r, length in group]
    tokens = [x for x, length in centred for _ in range(length)]
    return standardised([x for x, _ in centred], mean(tokens), std(tokens, ddof), eps)


@pytest.mark.parametrize(("eps", "ddof"), [(1e-8, 1), (0.25, 0)])
def test_whitening_over_the_tokens_of_the_batch(eps, ddof):
    rewards = [[0, 1, 1, 1], [5, 5, 5, 5], [1, 0, 0, 2]]
    lengths = [[3, 1, 4, 1], [5, 9, 2, 6], [0, 5, 3, 5]]
    groups = [list(zip(*pair, strict=True)) for pair in zip(rewards, lengths, strict=True)]
    r, tokens = torch.tensor(rewards, dtype=torch.float64), torch.tensor(lengths)
    call_it = {"lengths": tokens, "eps": eps, "ddof": ddof}
    actual = ops.group_advantage(r, "reinforce_pp_tokens", **call_it)
    assert_matches(actual.flatten(), whitened_over_tokens(groups, eps, ddof))
    assert actual[1].abs().min() > 1e-3  # as in verl: the mean over tokens is not 0, and is subtracted from every rollout
    assert (actual - ops.group_advantage(r, "reinforce_pp", eps=eps, ddof=ddof)).abs().max() > 1e-2
    valid = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 1]]).bool()
    kept = ops.group_advantage(r, "reinforce_pp_tokens", **call_it, valid=valid)
    chosen = [[pair for pair, keep in zip(*row, strict=True) if keep] for row in zip(groups, valid.tolist(), strict=True)]
    assert_matches(kept[valid], whitened_over_tokens(chosen, eps, ddof))
    assert (kept[~valid] == 0).all()


def test_at_equal_lengths_tokens_weigh_as_rollouts():
    rewards = torch.rand(6, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    by_rollout = ops.group_advantage(rewards, "reinforce_pp", eps=0.0, ddof=0)
    for length in (0, 7):
        lengths = torch.full((6, 5), length)
        by_token = ops.group_advantage(rewards, "reinforce_pp_tokens", lengths=lengths, eps=0.0, ddof=0)
        torch.testing.assert_close(by_token, by_rollout, rtol=1e-12, atol=1e-12)
    assert (ops.group_advantage(0 * rewards, "reinforce_pp_tokens", lengths=lengths) == 0).all()


def test_estimators_that_use_logprobs_or_the_greedy_response():
    rewards = torch.tensor([[1, 0, 1, 0.0], [1, 1, 0, 1]], dtype=torch.float64)
    logprobs = torch.tensor([[-0.1, -0.5, -0.7, -0.2], [-3, -1, -2, -1]], dtype=torch.float64)
    base = ops.grpo_advantage(rewards, ddof=0)
    actual = ops.group_advantage(rewards, "differential_smoothing", logprobs=logprobs, tau=0.2)
    torch.testing.assert_close(actual, base + 0.2 * torch.where(rewards == 1, -logprobs, logprobs))

    # Ranks from 0, the least likely; equal log-probs get equal ranks.
    ranks = torch.tensor([[3, 1, 0, 2], [0, 2, 1, 2]])
    expected = ops.grpo_advantage(rewards * (1 - 0.5 * ranks / 4))
    assert torch.equal(ops.group_advantage(rewards, "unlikeliness", logprobs=logprobs, penalty=0.5), expected)
    valid = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]]).bool()
    part = ops.group_advantage(rewards, "unlikeliness", logprobs=logprobs, penalty=0.5, valid=valid)
    alone = ops.group_advantage(rewards[1, valid[1]], "unlikeliness", logprobs=logprobs[1, valid[1]], penalty=0.5)
    assert torch.equal(part[1, valid[1]], alone)
    assert part[1, 1] == 0
    logprobs[1, 0] = -torch.inf
    with pytest.raises(ValueError, match="logprobs must be finite, got -inf in group 1, rollout 0"):
        ops.group_advantage(rewards, "unlikeliness", logprobs=logprobs)

    for greedy in (torch.tensor([True, False]), torch.tensor([[True] * 4, [False] * 4])):
        actual = ops.group_advantage(rewards, "self", greedy_correct=greedy)
        assert (actual[0] == 0).all()
        assert torch.equal(actual[1], ops.grpo_advantage(rewards[1]))
    flat = ops.group_advantage(
        rewards.flatten(), "self", greedy_correct=torch.tensor([False, True]), offsets=torch.tensor([0, 4, 8])
    )
    assert torch.equal(flat[:4], ops.grpo_advantage(rewards[0]))
    assert (flat[4:] == 0).all()


@pytest.mark.parametrize("correct", range(8))
def test_maxrl_of_binary_rewards_is_algorithm_1_and_the_sum_of_maxpo(correct):
    rewards = [1] * correct + [0] * (7 - correct)
    assert_matches(ops.maxrl_advantage(tensor(rewards)), brute_force.maxrl(rewards))
    assert_matches(ops.group_advantage(tensor(rewards), "maxrl_ratio"), brute_force.maxrl(rewards))
    # float32 and integers too, to rounding
    for dtype in (torch.float32, torch.int64, torch.bool):
        actual = ops.maxrl_advantage(torch.tensor(rewards).to(dtype))
        torch.testing.assert_close(actual, tensor(brute_force.maxrl(rewards), torch.float32), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("k", [2, 32, 512, 1000, 1023])
def test_float32_at_1024_rollouts(k):
    rewards = torch.randn(3, 1024, generator=torch.Generator().manual_seed(k))
    for name in ("maxpo", "expected_improvement", "leave_two_out", "bon_mean", "pkpo_sloo"):
        exact = ops.group_advantage(rewards.double(), name, k=k)
        error = (ops.group_advantage(rewards, name, k=k) - exact).abs().max() / exact.abs().max()
        assert exact.abs().max() > 1e-4
        assert error < 1e-6, name
    exact = ops.maxrl_advantage(rewards.double(), k)
    assert (ops.maxrl_advantage(rewards, k) - exact).abs().max() < 1e-6 * exact.abs().max()


def test_smallest_and_largest_k_at_4096_rollouts():
    n = 4096
    rewards = torch.randn(2, n, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    ordered, order = rewards.sort(1)
    # k = N-1: the best rollout gets its lead, the others share its cost.
    lead = ordered[:, -1:] - ordered[:, -2:-1]
    expected = (-lead / (n - 1)).expand(2, n).scatter(1, order[:, -1:], lead)
    torch.testing.assert_close(ops.maxpo_advantage(rewards, n - 1), expected, rtol=1e-11, atol=1e-12)
    # k = 2: gap j weighs N (j-1)/((N-1)(N-2)).
    j = torch.arange(1, n, dtype=torch.float64)
    sums = (ordered.diff(dim=1) * n * (j - 1) / ((n - 1) * (n - 2))).cumsum(1)
    values = torch.cat([torch.zeros(2, 1), sums], 1)
    expected = torch.zeros_like(values).scatter(1, order, values - values.mean(1, keepdim=True))
    torch.testing.assert_close(ops.maxpo_advantage(rewards, 2), expected, rtol=1e-11, atol=1e-12)
    # k = 1 is RLOO; full order of binary rewards is (r - mu)/mu.
    torch.testing.assert_close(ops.maxpo_advantage(rewards, 1), ops.rloo_advantage(rewards), rtol=1e-11, atol=1e-12)
    solved = (rewards > 3).double()
    mean = solved.mean(1, keepdim=True)
    assert 0 < mean.min() < 0.01
    torch.testing.assert_close(ops.maxrl_advantage(solved), (solved - mean) / mean, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("n", "k", "correct"), [(64, 8, 3), (64, 40, 30), (4096, 2048, 2), (9, 3, 7)])
def test_maxpo_of_binary_rewards_in_closed_form(n, k, correct):
    wrong = n - correct
    expected = float(Fraction(comb(wrong, k), comb(n - 1, k)))  # 0 where fewer than k are wrong
    advantages = ops.maxpo_advantage(torch.tensor([1.0] * correct + [0.0] * wrong, dtype=torch.float64), k)
    assert advantages[0].item() == pytest.approx(expected, rel=1e-10, abs=1e-300)
    assert advantages[-1].item() == pytest.approx(-expected * correct / wrong, rel=1e-10, abs=1e-300)
    assert (advantages[0] == 0) == (wrong < k)


def arguments(name, **changes):
    row = KERNEL_ROWS[name]
    options = {option: value or 0.1 for option, value in row.options.items()}
    parameter = 2.0 if row.size is not None else options.get("quantile", 0.0)
    defaults = {
        "estimator": name,
        "parameter": parameter,
        "eps": options.get("eps", 0.0),
        "ddof": int(options.get("ddof", 0)),
        "gain": row.affine(options)[0],
        "bias": row.affine(options)[1],
        "max_group_size": 0,
    }
    return {"offsets": None, "order": None, "valid": None, "lengths": None, **defaults, **changes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", KERNEL_ROWS)
def test_kernel_equals_the_reference(name, dtype):
    generator = torch.Generator().manual_seed(0)
    tolerance = {torch.float64: 1e-11, torch.bfloat16: 8e-3}.get(dtype, 2e-6)
    not_zero = 0
    for shape in ((1, 3), (5, 31), (9, 32), (6, 33), (2, 257), (1100, 16), (3, 1024)):
        rewards = torch.randn(shape, generator=generator).mul(4).round().div(4) + 100  # ties and an offset
        if KERNEL_ROWS[name].binary:
            rewards = (rewards > 100).float()
        rewards = rewards.to(dtype)
        layouts = [{}, {"valid": torch.rand(shape, generator=generator) < 0.7}]
        if "lengths" in KERNEL_ROWS[name].inputs:
            lengths = torch.randint(0, 50, shape, generator=generator)
            layouts = [{**layout, "lengths": lengths} for layout in layouts]
        for layout in layouts:
            actual = torch.ops.maxrl_fast.group_advantage(rewards, **arguments(name, **layout))
            expected = group_advantage_reference(rewards, **arguments(name, **layout))
            assert actual.dtype == expected.dtype
            largest = expected.double().abs().max()
            assert (actual.double() - expected.double()).abs().max() <= tolerance * largest
            not_zero += int(largest > 0)
    assert not_zero >= 4


@pytest.mark.parametrize("name", ops.ESTIMATORS)
def test_uneven_groups_equal_each_group_alone(name):
    generator = torch.Generator().manual_seed(3)
    sizes = [5, 0, 1, 16, 3, 0, 40, 2, 33, 8, 7, 6, 5, 5, 1]
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    rewards = (torch.rand(offsets[-1], generator=generator) < 0.5).float()
    if not (ops.ESTIMATORS[name].binary or name == "noisy_verifier_forward"):
        rewards = rewards + 0.25 * torch.rand(len(rewards), generator=generator)
    lengths = torch.randint(1, 9, rewards.shape, generator=generator)
    logprobs = -torch.rand(rewards.shape, generator=generator)
    greedy = torch.rand(len(sizes), generator=generator)
    log_ratios = logprobs + 0.5
    inputs = ops.ESTIMATORS[name].inputs

    def inputs_of(rows, group):
        known = {"lengths": lengths[rows], "logprobs": logprobs[rows], "greedy_correct": greedy[group] < 0.5}
        known |= {"greedy_rewards": greedy[group], "reward_parts": torch.stack([lengths[rows] % 2, lengths[rows]])}
        known["log_ratios"] = log_ratios[rows]
        return {key: known[key] for key in inputs}

    size = ops.ESTIMATORS[name].size
    keywords = {**OPTIONS.get(name, {}), **({"k": 3} if size is not None and size.required else {})}
    together = ops.group_advantage(rewards, name, offsets=offsets, **keywords, **inputs_of(slice(None), slice(None)))
    for group, (start, end) in enumerate(itertools.pairwise(offsets)):
        rows = slice(start, end)
        fits = size is None or (end - start > 1 and (not size.required or end - start >= 3 + size.below_n))
        if end == start or name in OVER_THE_BATCH:
            continue
        if fits or (end - start == 1 and ops.ESTIMATORS[name].is_centred):
            alone = ops.group_advantage(rewards[rows], name, **keywords, **inputs_of(rows, slice(group, group + 1)))
            assert torch.equal(together[rows], alone), (name, group)
        else:
            assert (together[rows] == 0).all()
    assert together.abs().max() > 0.1

    # Shuffled rollouts with group ids have the same groups.
    order = torch.randperm(len(rewards), generator=generator)
    ids = 7 * torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)) - 20
    greedy = greedy.repeat_interleave(torch.tensor(sizes))
    shuffled = inputs_of(order, order)
    by_ids = ops.group_advantage(rewards[order], name, group_ids=ids[order], **keywords, **shuffled)
    assert torch.equal(by_ids, together[order])


@pytest.mark.parametrize("name", ops.ESTIMATORS)
@pytest.mark.parametrize("n", [16, 70])
def test_invalid_rollouts_are_left_out_of_their_group(name, n):
    generator = torch.Generator().manual_seed(4)
    rewards = (torch.rand(6, n, generator=generator) < 0.4).double()
    valid = torch.rand(6, n, generator=generator) < 0.6
    valid[2] = False
    rewards[~valid] = torch.nan
    lengths, logprobs = torch.randint(1, 9, (6, n), generator=generator), -torch.rand(6, n, generator=generator)
    known = {"lengths": lengths, "logprobs": logprobs, "greedy_correct": torch.arange(6) % 2 == 0}
    known |= {"greedy_rewards": torch.arange(6) / 4, "reward_parts": torch.stack([lengths % 2, lengths])}
    known["log_ratios"] = torch.where(valid, logprobs + 0.5, torch.nan)
    inputs = {key: known[key] for key in ops.ESTIMATORS[name].inputs}
    actual = call(name, rewards, valid=valid, **inputs)
    assert (actual[~valid] == 0).all()
    if name in OVER_THE_BATCH:
        return  # they depend on the whole batch and have tests of their own
    for g in range(6):
        if g != 2:
            keep = valid[g]
            own = {key: value[g][keep] if value.dim() == 2 else value[g : g + 1] for key, value in inputs.items()}
            assert torch.equal(actual[g][keep], call(name, rewards[g][keep], **own)), name
    assert torch.equal(call(name, rewards.flatten(), valid=valid.flatten(), offsets=torch.arange(7) * n, **{
        key: value.flatten(-2) if value.dim() > 1 else value for key, value in inputs.items()
    }), actual.flatten())  # fmt: skip


def test_equal_rewards_get_exactly_zero():
    centred = [name for name, row in ops.ESTIMATORS.items() if row.is_centred and not row.inputs]
    assert {"grpo", "rloo", "maxpo", "maxrl", "reinforce", "ei_l1o", "maxrl_ratio"} <= set(centred)
    for name in [*centred, "expected_improvement", "leave_two_out", "bon_max_second", "qae", "bon_mean"]:
        for dtype in (torch.float32, torch.float64):
            for n in (7, 61):
                value = 1.0 if ops.ESTIMATORS[name].binary else 0.1
                assert (call(name, torch.full((n,), value, dtype=dtype)) == 0).all(), name


def test_groups_of_one_have_zero_advantage():
    rewards = torch.tensor([[3.5], [-1.0]])
    for name, row in ops.ESTIMATORS.items():
        if row.is_centred and not row.inputs:
            rewards = torch.tensor([[1.0], [0.0]]) if row.binary else torch.tensor([[3.5], [-1.0]])
            assert call(name, rewards).tolist() == [[0.0], [0.0]], name
    assert call("opo", rewards).tolist() == [[0.0], [0.0]]
    # An estimator that is not centred follows its own formula.
    assert ops.group_advantage(torch.tensor([[1.0], [0.0]]), "maxrl_conditional").tolist() == [[1.0], [0.0]]
    assert ops.group_advantage(torch.tensor([[1.0], [0.0]]), "maxrl_control_variate").tolist() == [[0.0], [-1.0]]
    with pytest.raises(ValueError, match="expected_improvement needs 2 <= k <= N = 1 for N = 1 rollouts, got 2"):
        ops.expected_improvement(rewards, 2)


def test_degenerate_shapes_and_eps():
    assert ops.rloo_advantage(torch.zeros(3, 0)).shape == (3, 0)
    assert ops.rloo_advantage(torch.zeros(0, 3, dtype=torch.int64)).dtype == torch.float32
    assert ops.rloo_advantage(torch.zeros(0), offsets=torch.tensor([0, 0])).shape == (0,)
    assert (ops.grpo_advantage(torch.ones(4), eps=0.0) == 0).all()
    lengths = torch.zeros(2, 3, dtype=torch.int64)  # no token at all: the plain mean
    rewards = torch.tensor([[0, 0, 3.0], [1, 1, 1]])
    assert ops.group_advantage(rewards, "opo", lengths=lengths).tolist() == [[-1, -1, 2], [0, 0, 0]]


def test_a_large_offset_keeps_full_precision():
    rewards = torch.tensor([1e4, 1e4, 1e4 + 1, 1e4])
    expected = torch.tensor([-0.25, -0.25, 0.75, -0.25])
    assert torch.equal(ops.group_advantage(rewards, "reinforce"), expected)
    torch.testing.assert_close(ops.grpo_advantage(rewards, eps=0.0), expected / 0.5)
    huge = torch.tensor([2.0**40, 2.0**40 + 2**17, 2.0**40])
    assert ops.group_advantage(huge, "reinforce").tolist() == pytest.approx([-(2**17) / 3, 2**18 / 3, -(2**17) / 3])


@hypothesis.given(st.lists(st.integers(-3, 3), min_size=2, max_size=40), st.data())
@hypothesis.settings(deadline=None, max_examples=100)
def test_ties_permutation_shift_and_scale(rewards, data):
    n = len(rewards)
    k = data.draw(st.integers(1, n - 1))
    order = data.draw(st.permutations(range(n)))
    r = torch.tensor(rewards, dtype=torch.float32)
    shift_invariant = ("maxpo", "maxrl", "rloo", "grpo", "reinforce", "qae", "ei_l1o", "bon_max_second", "leave_two_out")
    linear = {"maxpo", "maxrl", "rloo", "reinforce", "pkpo", "pkpo_sloo", "reinforce_raw", "psr", "leave_two_out"}
    centred = {"maxpo", "maxrl", "rloo", "grpo", "reinforce", "maxrl_ratio", "ei_l1o", "bon_mean"}
    for name, row in ops.ESTIMATORS.items():
        if row.inputs or row.binary:
            continue
        size = {}
        if row.size is not None:
            if n - row.size.below_n < row.size.smallest:
                continue
            size = {row.size.name: max(k, row.size.smallest)}
        a = ops.group_advantage(r, name, **size, **OPTIONS.get(name, {}))
        permuted = ops.group_advantage(r[order], name, **size, **OPTIONS.get(name, {}))
        assert torch.equal(permuted, a[order]), name  # bitwise
        for i in range(n):
            assert (a[r == r[i]] == a[i]).all(), name
        if name in centred:
            assert abs(float(a.double().sum())) <= 1e-5 * (1 + float(a.abs().max())) * n
        if name in shift_invariant:
            assert torch.equal(ops.group_advantage(r + 64, name, **size), a), name  # exact in float32, so bitwise too
        if name in linear:
            torch.testing.assert_close(ops.group_advantage(4 * r, name, **size), 4 * a)


@hypothesis.given(
    st.lists(st.floats(-1e6, 1e6, width=64, allow_subnormal=False), min_size=2, max_size=70), st.randoms(use_true_random=False)
)
@hypothesis.settings(deadline=None, max_examples=100)
def test_any_order_of_rewards_is_bitwise_the_same(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    lengths = torch.tensor([random.randrange(1, 2000) for _ in rewards])
    for dtype in (torch.float64, torch.float32):
        r = torch.tensor(rewards, dtype=dtype)
        for name in ("reinforce", "rloo", "grpo", "maxrl_ratio", "maxrl", "qae", "bon_mean", "reinforce_pp"):
            size = {"k": 2} if name == "bon_mean" else {}
            a = ops.group_advantage(r, name, **size)
            assert torch.equal(ops.group_advantage(r[order], name, **size), a[order]), name
        for name in ("opo", "reinforce_pp_tokens"):
            a = ops.group_advantage(r, name, lengths=lengths)
            assert torch.equal(ops.group_advantage(r[order], name, lengths=lengths[order]), a[order]), name


@pytest.mark.parametrize("name", ops.ESTIMATORS)
def test_shapes_dtypes_threads_and_batches(name):
    generator = torch.Generator().manual_seed(1)
    r = (torch.rand(40, 30, 8, generator=generator) < 0.4).float()
    a = call(name, r)
    assert a.shape == r.shape
    if not ops.ESTIMATORS[name].inputs and name not in OVER_THE_BATCH:  # a group's result does not depend on its batch
        assert torch.equal(call(name, r[1, 2]), a[1, 2])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(call(name, r), a)
    finally:
        torch.set_num_threads(threads)
    strided = torch.empty(8, 30, 40).permute(2, 1, 0).copy_(r)
    assert not strided.is_contiguous()
    assert torch.equal(call(name, strided), a)
    exact = call(name, r.double())
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float16, torch.bfloat16):
        other = call(name, r.to(dtype))
        assert other.dtype == (dtype if dtype.is_floating_point else torch.float32)
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-6)
        torch.testing.assert_close(other.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ops.ESTIMATORS)
def test_advantages_are_bitwise_the_same_with_any_instructions(name):
    generator = torch.Generator().manual_seed(2)
    rewards = [(torch.rand(shape, generator=generator) < 0.4).double() for shape in ((1100, 16), (6, 33), (2, 257))]
    if not ops.ESTIMATORS[name].binary:
        rewards = [r + torch.randn(r.shape, generator=generator, dtype=torch.float64).mul(4).round() / 3 for r in rewards]
    results = []
    try:
        for instructions in _C.instruction_sets():
            _C.limit_instructions(instructions)
            results.append([call(name, r.to(dtype)) for r in rewards for dtype in (torch.float32, torch.float64)])
    finally:
        _C.limit_instructions(_C.instruction_sets()[0])
    assert any(x.any() for x in results[0])
    for others in results[1:]:
        assert all(map(torch.equal, others, results[0]))


def test_advantages_have_no_gradient():
    assert not ops.rloo_advantage(torch.tensor([0.0, 1.0], requires_grad=True)).requires_grad


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda r: ops.maxpo_advantage(r, 4), r"maxpo needs 1 <= k <= N-1 = 3 for N = 4 rollouts, got 4"),
        (lambda r: ops.maxpo_advantage(r, 0), r"maxpo needs 1 <= k <= N-1 = 3"),
        (lambda r: ops.maxpo_advantage(r, 2.0), r"maxpo needs an integer as k, got 2.0"),
        (lambda r: ops.expected_improvement(r, 5), r"expected_improvement needs 2 <= k <= N = 4"),
        (lambda r: ops.leave_two_out_baseline(r, 4), r"leave_two_out needs 2 <= k <= N-1 = 3"),
        (lambda r: ops.maxrl_advantage(r, 4), r"maxrl needs 1 <= order <= N-1 = 3"),
        (lambda r: ops.group_advantage(r, "maxpo"), r"maxpo needs k, 1 <= k <= N-1"),
        (lambda r: ops.group_advantage(r, "grpo", k=2), r"grpo takes no k, got k=2"),
        (lambda r: ops.group_advantage(r, "rloo", eps=1.0), r"rloo takes no eps"),
        (lambda r: ops.group_advantage(r, "grpo", epsilon=1.0), r"grpo takes no epsilon; it takes eps, ddof"),
        (lambda r: ops.group_advantage(r, "grpo", ddof=2), r"ddof must be 0 or 1, got 2"),
        (lambda r: ops.group_advantage(r, "grpo", eps=-1.0), r"eps must be at least 0, got -1"),
        (lambda r: ops.group_advantage(r, "qae", quantile=0.0), r"quantile must be above 0 and at most 1, got 0"),
        (lambda r: ops.group_advantage(r, "rloo", scale_by_k=True), r"rloo takes no scale_by_k"),
        (lambda r: ops.group_advantage(r, "opo"), r"opo needs lengths"),
        (lambda r: ops.group_advantage(r, "rloo", lengths=r.long()), r"rloo takes no lengths"),
        (lambda r: ops.group_advantage(r, "opo", lengths=r), r"lengths must be integers, got torch.float32"),
        (lambda r: ops.group_advantage(r, "opo", lengths=r[:2].long()), r"lengths must have the shape of rewards, \(4,\)"),
        (
            lambda r: ops.group_advantage(r, "noisy_verifier_backward"),
            r"noisy_verifier_backward needs false_positive_rate and false_negative_rate",
        ),
        (
            lambda r: ops.group_advantage(r, "noisy_verifier_backward", false_positive_rate=0.5, false_negative_rate=0.5),
            r"add up to less than 1",
        ),
        (lambda r: ops.group_advantage(r, "best"), r"estimator must be one of maxpo, .*, got 'best'"),
        (lambda r: ops.rloo_advantage(torch.tensor(1.0)), r"rewards must be \[..., N\], got the shape \(\)"),
        (lambda r: ops.rloo_advantage(r, valid=r), r"valid must be bool, got torch.float32"),
        (lambda r: ops.rloo_advantage(r, offsets=torch.tensor([0, 3])), r"offsets must rise from 0 to 4, got 3 as the last"),
        (lambda r: ops.rloo_advantage(r, offsets=torch.tensor([0, 3, 2, 4])), r"got 3 followed by 2 at group 1"),
        (lambda r: ops.rloo_advantage(r, offsets=torch.tensor([1, 4])), r"got 1 followed by 4 at group 0"),
        (lambda r: ops.rloo_advantage(r, offsets=torch.tensor([0.0, 4.0])), r"offsets must be int64 \[G\+1\]"),
        (lambda r: ops.rloo_advantage(r[None], offsets=torch.tensor([0, 4])), r"rewards must be flat \[S\]"),
        (lambda r: ops.rloo_advantage(r, group_ids=r), r"group_ids must be integers, got torch.float32"),
        (lambda r: ops.rloo_advantage(r, group_ids=torch.zeros(3).long()), r"group_ids must have the shape of rewards"),
        (
            lambda r: ops.rloo_advantage(r, group_ids=torch.zeros(4).long(), offsets=torch.tensor([0, 4])),
            r"give offsets or group_ids, not both",
        ),
        (
            lambda r: ops.maxpo_advantage(r, 2, offsets=torch.tensor([0, 2, 4])),
            r"maxpo needs 1 <= k <= N-1 = 1 for N = 2 rollouts, got 2",
        ),
        (
            lambda r: ops.maxpo_advantage(r, 2, offsets=torch.tensor([0, 4]), max_group_size=3),
            r"a group has 4 rollouts, more than max_group_size = 3",
        ),
        (lambda r: ops.group_advantage(r / 2, "passk_training", k=2), r"must be 0 or 1 for passk_training, got 0.5 in group 0"),
        (
            lambda r: ops.group_advantage(r, "self", greedy_correct=torch.ones(3).bool()),
            r"greedy_correct must have one value per group, or the shape of rewards, got the shape \(3,\)",
        ),
    ],
)
def test_bad_input_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make(torch.tensor([0.0, 1.0, 0.0, 1.0]))


def test_nonfinite_rewards_are_refused_by_name():
    for value in (torch.nan, torch.inf, -torch.inf):
        for name in ("rloo", "maxpo", "reinforce_raw"):
            rewards = torch.zeros(5, 7, 40)
            rewards[3, 2, 5], rewards[4, 0, 1] = value, torch.nan
            with pytest.raises(ValueError, match=rf"finite, got {value} in group 23, rollout 5"):
                call(name, rewards)
    rewards = torch.zeros(10)
    rewards[7] = torch.nan
    offsets = torch.tensor([0, 3, 3, 6, 10])
    with pytest.raises(ValueError, match=r"got nan in group 3, rollout 1 \(index 7\)"):
        ops.rloo_advantage(rewards, offsets=offsets)
    with pytest.raises(ValueError, match=r"got nan in group 0, rollout 4 \(index 7\)"):
        ops.maxpo_advantage(rewards, 1, group_ids=torch.tensor([2, 1, 1, 1, 2, 1, 2, 1, 2, 2]))


def test_an_infinite_reward_is_not_a_wrong_one():
    """On the CPU and in the reference; tests/emulation and tests/gpu test CUDA."""
    for value in (torch.inf, -torch.inf, torch.nan):
        rewards = torch.tensor([[0.0, 1, 0, 1], [0, 1, value, 1]])
        with pytest.raises(ValueError, match=f"rewards must be finite, got {value} in group 1, rollout 2"):
            ops.group_advantage(rewards, "passk_training", k=2)
        reference = group_advantage_reference(rewards, **arguments("passk_training"))
        assert reference[0].isfinite().all()
        assert reference[1].isnan().all()


# What becomes of the advantages when all rewards are multiplied by c, at eps 0; the others have a bias or take only 0 and 1.
SCALE_FREE = ["grpo", "bon_mean", "qae", "maxrl_ratio", "maxrl_conditional", *OVER_THE_BATCH, "unlikeliness", "self"]
LINEAR = ["maxpo", "expected_improvement", "leave_two_out", "ei_l1o", "maxrl", "rloo", "reinforce", "reinforce_raw", "pkpo"]
LINEAR += ["pkpo_sloo", "bon_max_second", "opo", "noisy_verifier_backward"]


@pytest.mark.parametrize("name", [*SCALE_FREE, *LINEAR])
def test_huge_and_tiny_float64_rewards_have_the_advantages_of_ordinary_ones(name):
    """A power of two changes no bit of a result, so the results must be bitwise equal."""
    generator = torch.Generator().manual_seed(11)
    for shape, exponent in itertools.product(((7, 5), (2, 70)), (480, 700, 1000, -404, -700, -900)):
        rewards = torch.randn(shape, generator=generator).mul(4).round().div(4).double() + torch.arange(shape[1]) / 64
        eps = {"eps": 0.0} if "eps" in ops.ESTIMATORS[name].options else {}
        expected = call(name, rewards, **eps)
        scaled = call(name, rewards * 2.0**exponent, **eps)
        assert expected.abs().max() > 1e-3
        assert torch.equal(scaled, expected if name in SCALE_FREE else expected * 2.0**exponent)
        valid = torch.rand(shape, generator=generator) < 0.8
        part = call(name, rewards * 2.0**exponent, valid=valid, **eps)
        assert torch.equal(part, call(name, rewards, valid=valid, **eps) * (1 if name in SCALE_FREE else 2.0**exponent))


@pytest.mark.parametrize("scale", [1e154, 1e200, 1e300, 1e-200])
@pytest.mark.parametrize("name", ["grpo", "bon_mean", "qae", "maxpo", "maxrl", "rloo", "maxrl_ratio"])
def test_huge_and_tiny_rewards_equal_the_definition(name, scale):
    """With the default eps, which a tiny reward does not reach."""
    rewards = [Fraction(scale) * x for x in (0, 3, 1, 3, 2, 7)]
    size = {"k": 2} if ops.ESTIMATORS[name].size and name != "maxrl" else {}
    expected = torch.tensor([float(x) for x in DEFINITIONS[name](rewards, size.get("k", 0))], dtype=torch.float64)
    actual = ops.group_advantage(tensor(rewards), name, **size)
    torch.testing.assert_close(actual / expected.abs().max(), expected / expected.abs().max(), rtol=1e-11, atol=1e-11)
    given = {"eps": ops.ESTIMATORS[name].options.get("eps", 0.0)} | ({"parameter": 0.0} if name == "maxrl" else {})
    given |= {"parameter": 0.4} if name == "qae" else {}
    reference = group_advantage_reference(tensor(rewards)[None], **(arguments(name) | given))
    torch.testing.assert_close(reference[0] / expected.abs().max(), expected / expected.abs().max(), rtol=1e-11, atol=1e-11)


def test_a_reward_far_below_the_others_changes_none_of_their_advantages():
    """The maximum of two other rollouts never is the smallest reward, so only that it is the smallest matters."""
    rewards = torch.tensor([[0.1, -1.0, 0.2, 0.3, 1.0], [0.1, 0.5, 0.2, 0.3, 1.0]], dtype=torch.float64)
    expected = ops.group_advantage(rewards, "bon_mean", k=2)
    assert expected.abs().max() > 1.5
    for least in (-1e100, -1e145, -1e300):
        lower = rewards.clone()
        lower[0, 1] = least
        torch.testing.assert_close(ops.group_advantage(lower, "bon_mean", k=2), expected, rtol=1e-12, atol=1e-12)
        given = arguments("bon_mean") | {"eps": ops.ESTIMATORS["bon_mean"].options["eps"]}
        torch.testing.assert_close(group_advantage_reference(lower, **given), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_rewards_give_the_right_advantages_or_are_refused(dtype):
    binary = {"passk_training", "pacs_first_update", "grpo_nemo", "differential_smoothing"}
    for name in set(ops.ESTIMATORS) - binary - set(OFF_POLICY):  # what overflows before the ratios is refused there
        check_largest_rewards(name, dtype)


def check_largest_rewards(name, dtype):
    """Compare with float64, and float64 with the advantages of rewards 2^16 times smaller."""
    largest = torch.finfo(dtype).max
    rewards = torch.tensor([[-largest, largest, largest / 2, -largest], [largest, 0, 0, -largest]], dtype=dtype)
    eps = {"eps": 0.0} if "eps" in ops.ESTIMATORS[name].options else {}
    if name.startswith("maxrl_"):
        rewards = rewards.abs()  # the mean of the others cancels
    if dtype == torch.float64:
        is_free = name in SCALE_FREE or name.startswith(("grpo_", "maxrl_"))
        expected = call(name, rewards * 2.0**-16, **eps) * (1 if is_free else 2.0**16)
    else:
        expected = call(name, rewards.double(), **eps)
    if expected.to(dtype).isfinite().all():
        actual = call(name, rewards, **eps)
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-6)
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    else:
        with pytest.raises(ValueError, match=f"the advantages of {name} must be finite in {dtype}, got -?inf at index [0-7]"):
            call(name, rewards, **eps)


def test_options_that_push_results_out_of_range_are_refused_by_name():
    rewards = torch.tensor([0.0, 1.0, 2.0])
    for name, given, what in (
        ("w_reinforce", {"correct_weight": 1e300}, "the advantages of w_reinforce must be finite in torch.float32"),
        ("differential_smoothing", {"tau": 1e300, "logprobs": -rewards - 1}, "the advantages of differential_smoothing"),
        ("unlikeliness", {"penalty": 1e300, "logprobs": -rewards}, "the rewards of unlikeliness with its options"),
    ):
        with pytest.raises(ValueError, match=what):
            ops.group_advantage(rewards, name, **given)


def test_the_operator_passes_opcheck():
    op = torch.ops.maxrl_fast.group_advantage.default
    rewards = torch.rand(3, 5)
    for name, extra in (
        ("grpo", {}),
        ("maxpo", {"valid": rewards > 0.2}),
        ("opo", {"lengths": torch.ones(3, 5, dtype=torch.int64)}),
    ):
        torch.library.opcheck(op, (rewards,), arguments(name, **extra))
    order, offsets = torch.randperm(15), torch.tensor([0, 4, 4, 15])
    torch.library.opcheck(op, (rewards.flatten().bfloat16(),), arguments("maxrl", offsets=offsets, order=order))
    torch.library.opcheck(op, (rewards > 0.5,), arguments("passk_training"))


def test_the_operator_checks_what_the_kernel_does_not():
    op = torch.ops.maxrl_fast.group_advantage
    with pytest.raises(ValueError, match=r"rewards must be contiguous \[G, N\], or \[S\] with offsets"):
        op(torch.rand(4, 3).T, **arguments("grpo"))
    with pytest.raises(ValueError, match=r"rewards must be one of float32, .*, got torch.float16"):
        op(torch.rand(4, 3).half(), **arguments("grpo"))
    with pytest.raises(ValueError, match=r"valid must be a contiguous torch.bool tensor of shape \(4, 3\)"):
        op(torch.rand(4, 3), **arguments("grpo", valid=torch.ones(3).bool()))


def test_compiled_as_one_graph():
    generator = torch.Generator().manual_seed(2)
    rewards = torch.rand(6, 8, generator=generator)
    flat, ids = rewards.flatten(), torch.arange(48) % 6
    lengths = torch.randint(1, 9, (6, 8), generator=generator)

    def step(r, f, valid):
        return (
            2 * ops.maxpo_advantage(r, 3),
            ops.grpo_advantage(r, eps=1e-4, valid=valid) + 1,
            ops.maxrl_advantage(f, group_ids=ids),
            ops.group_advantage(r, "opo", lengths=lengths),
            ops.group_advantage(r, "unlikeliness", logprobs=-r),
            ops.group_advantage(r, "reinforce_pp"),
            ops.group_advantage(r, "maxrl_off_policy", log_ratios=r - 0.5, valid=valid),
        )

    valid = rewards > 0.3
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        results = compiled(rewards, flat, valid)
    for actual, expected in zip(results, step(rewards, flat, valid), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_grpo_presets_equal_other_libraries(n):
    generator = torch.Generator().manual_seed(n)
    rewards = (torch.rand(20, n, generator=generator) < 0.5).float() + torch.rand(20, n, generator=generator).round()
    # verl gathers each prompt's scores by id, in a Python loop; TRL views them as [G, N].
    loop = torch.empty_like(rewards)
    for g, group in enumerate(rewards):
        loop[g] = (group - torch.mean(group)) / (torch.std(group) + 1e-6)
    torch.testing.assert_close(ops.group_advantage(rewards, "grpo_verl"), loop, rtol=1e-5, atol=1e-4)
    flat = rewards.flatten()
    mean = flat.view(-1, n).mean(dim=1).repeat_interleave(n)
    deviation = flat.view(-1, n).std(dim=1).repeat_interleave(n)
    trl = (flat - mean) / (deviation + 1e-4)
    torch.testing.assert_close(ops.group_advantage(rewards, "grpo_trl").flatten(), trl, rtol=1e-5, atol=1e-4)
    assert (ops.group_advantage(rewards, "grpo_trl") - ops.group_advantage(rewards, "grpo_verl")).abs().max() > 1e-5


def test_importing_the_operators_imports_no_trainer():
    code = (
        "import sys; from maxrl_fast import ops; "
        "ours = ('maxrl_fast.ops', 'maxrl_fast._C'); "
        "print([m for m in sys.modules if m.startswith('maxrl_fast.') and not m.startswith(ours)]"
        " + [m for m in ('tyro', 'rich', 'matplotlib', 'tensorboard') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_standardising_by_hand():
    """Test the helpers of tests/ops/definitions.py."""
    values = [Fraction(1), Fraction(2), Fraction(6)]
    assert std(values, 1) == pytest.approx(torch.tensor([1.0, 2, 6]).std().item())
    assert standardised(values, Fraction(3), 2.0, 0.0) == [-1.0, -0.5, 1.5]
