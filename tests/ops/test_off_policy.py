"""Off-policy max@k: its mean gradient over all groups of a bandit against the exact one, and its limits."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.algorithms.estimators import Estimator, Group
from tests.ops.definitions import OFF_POLICY

NAMES = list(OFF_POLICY)
ON_POLICY = {"maxpo_off_policy": "maxpo", "maxrl_off_policy": "maxrl"}


def size(name, k):
    return {"order" if name == "maxrl_off_policy" else "k": k}


def advantages(name, rewards, ratios, k, **options):
    rewards = torch.as_tensor([float(r) for r in rewards], dtype=torch.float64)
    log_ratios = torch.as_tensor([math.log(x) for x in ratios], dtype=torch.float64)
    return ops.group_advantage(rewards, name, log_ratios=log_ratios, **size(name, k), **options)


def assert_close(actual, expected, tolerance=1e-12):
    expected = torch.tensor([float(x) for x in expected], dtype=torch.float64)
    assert (actual - expected).abs().max() <= tolerance * (1 + expected.abs().max()), (actual, expected)


def test_at_ratios_of_one_they_are_the_estimators_on_policy():
    rewards = torch.randn(5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for (name, on_policy), k in itertools.product(ON_POLICY.items(), range(1, 9)):
        expected = ops.group_advantage(rewards, on_policy, **size(name, k))
        actual = ops.group_advantage(rewards, name, log_ratios=torch.zeros(5, 9), **size(name, k))
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [64, 4096])
def test_equal_ratios_scale_the_advantages_of_every_k(n):
    """With one ratio 1 + c for all, every subset of m has the weight 1 + m c: exact at sizes that no enumeration reaches."""
    rewards = torch.randn(2, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    c = 0.125
    log_ratios = torch.full_like(rewards, math.log1p(c))

    def off(name, k):
        return ops.group_advantage(rewards, name, log_ratios=log_ratios, **size(name, k))

    for k in (1, 2, n // 2, n - 1):
        torch.testing.assert_close(
            off("maxpo_off_policy", k), (1 + c) * (1 + (k - 1) * c) * ops.maxpo_advantage(rewards, k), rtol=1e-9, atol=1e-10
        )
        bon = ops.group_advantage(rewards, "bon_off_policy", k=k, log_ratios=torch.zeros_like(rewards))
        torch.testing.assert_close(off("bon_off_policy", k), (1 + k * c) * bon, rtol=1e-9, atol=1e-10)
    terms = [(1 + c) * (1 + (k - 1) * c) * ops.maxpo_advantage(rewards, k) for k in (1, 2, 3)]
    torch.testing.assert_close(off("maxrl_off_policy", 3), sum(terms), rtol=1e-9, atol=1e-10)
    # With one best rollout its advantage is 1 for every k, and its share of the others' is -1/(n-1).
    best = torch.zeros(n, dtype=torch.float64)
    best[5] = 1
    actual = ops.group_advantage(best, "maxrl_off_policy", log_ratios=log_ratios[0])
    total = (1 + c) * (n - 1 + c * (n - 1) * (n - 2) / 2)
    torch.testing.assert_close(actual, best * total - (1 - best) * total / (n - 1), rtol=1e-10, atol=0)


def test_groups_too_small_for_the_size_get_zero():
    rewards, ratios = torch.tensor([2.0, 1, 3, 0, 2, 1, 3, 1]), torch.linspace(-0.3, 0.3, 8)
    for name in NAMES:
        actual = ops.group_advantage(rewards, name, log_ratios=ratios, offsets=torch.tensor([0, 3, 8]), **size(name, 4))
        assert actual[:3].tolist() == [0, 0, 0]
        assert actual[3:].any()


def test_equal_rewards_and_groups_of_one_have_zero_advantage():
    log_ratios = torch.randn(7, generator=torch.Generator().manual_seed(3))
    for name in ON_POLICY:
        assert (ops.group_advantage(torch.full((7,), 0.1), name, log_ratios=log_ratios, **size(name, 3)) == 0).all()
        assert ops.group_advantage(torch.tensor([3.5]), name, log_ratios=log_ratios[:1], **size(name, 3)).tolist() == [0]
    # bon has no baseline.
    assert ops.group_advantage(torch.tensor([3.5]), "bon_off_policy", k=1, log_ratios=torch.zeros(1)).tolist() == [3.5]


def test_ratios_are_clamped():
    rewards = torch.tensor([0.0, 1.0, 3.0, 2.0], dtype=torch.float64)
    for name in NAMES:
        far = ops.group_advantage(rewards, name, log_ratios=torch.tensor([0, torch.inf, -torch.inf, 50]), **size(name, 2))
        at_limit = ops.group_advantage(rewards, name, log_ratios=torch.tensor([0.0, 20, -20, 20]), **size(name, 2))
        assert torch.equal(far, at_limit)
        assert_close(
            advantages(name, rewards, [0.25, 1.125, 4.0, 1.0], 2, clamp_delta=0.5),
            OFF_POLICY[name]([Fraction(float(r)) for r in rewards], 2, [Fraction(x, 8) for x in (4, 9, 12, 8)]),
        )


def test_what_is_no_ratio_is_refused():
    rewards = torch.tensor([[0.0, 1.0, 2.0]])
    for given, message in (
        ({}, "maxpo_off_policy needs log_ratios"),
        (
            {"log_ratios": rewards.masked_fill(rewards == 1, torch.nan)},
            "log_ratios must be numbers, got nan in group 0, rollout 1",
        ),
        ({"log_ratios": rewards[0]}, r"log_ratios must have the shape of rewards, \(1, 3\), got \(3,\)"),
        ({"log_ratios": rewards, "clamp_delta": -1}, "clamp_delta of maxpo_off_policy must be a finite number of at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.group_advantage(rewards, "maxpo_off_policy", k=2, **given)


def test_where_the_check_would_wait_a_ratio_that_is_nan_spoils_its_group_alone():
    rewards = torch.tensor([[0.0, 1.0, 2.0], [2.0, 0.0, 1.0]])
    log_ratios = torch.tensor([[0.0, 0.0, torch.nan], [0.1, 0.2, 0.3]])  # of the best rollout, whom no other's sums include
    compiled = torch.compile(
        lambda r, x: ops.group_advantage(r, "maxpo_off_policy", k=2, log_ratios=x), fullgraph=True, backend="aot_eager"
    )
    actual = compiled(rewards, log_ratios)
    assert actual[0].isnan().all()
    expected = ops.group_advantage(rewards[1], "maxpo_off_policy", k=2, log_ratios=log_ratios[1])
    torch.testing.assert_close(actual[1], expected)


def test_equal_ids_take_memory_for_their_groups_alone():
    """4096 rollouts of one prompt by id: a row for each possible group would be 4096 times as much."""
    shapes = []

    def seen(g: Group):
        shapes.append(g.valid.shape)
        return g.rewards

    ops.group_advantage(torch.zeros(4096), Estimator.of(seen), group_ids=torch.full((4096,), 7))
    assert shapes == [(1, 4096)]


# A bandit with three arms, all 3^N groups of it: sampled by the old policy, and the gradient of the new one is wanted.
REWARDS = torch.tensor([0.0, 0.7, 2.0], dtype=torch.float64)
OLD = torch.tensor([0.5, 0.1, -0.8], dtype=torch.float64)
CHANGE = torch.tensor([-0.4, 0.1, 0.6], dtype=torch.float64)
N = 4
ARMS = torch.tensor(list(itertools.product(range(3), repeat=N)))


def mean_gradient(values, policy):
    """Return E[(1/N) sum_i A_i grad log pi(a_i)] over groups of the old policy, of advantages [3^N, N]."""
    scores = torch.eye(3, dtype=torch.float64)[ARMS] - policy
    probability = torch.softmax(OLD, 0)[ARMS].prod(1)
    return (probability[:, None] * (values[..., None] * scores).mean(1)).sum(0)


def max_at_k_gradient(logits, k):
    logits = logits.clone().requires_grad_()
    below = torch.softmax(logits, 0).cumsum(0)
    expected = (torch.cat([below[:1] ** k, (below**k).diff()]) * REWARDS).sum()
    return torch.autograd.grad(expected, logits)[0]


def wanted(name, logits, k):
    """Return what the mean gradient of an estimator should be."""
    if name == "maxrl_off_policy":
        return sum(max_at_k_gradient(logits, m) / m for m in range(1, k + 1))
    return max_at_k_gradient(logits, k) / (N if name == "bon_off_policy" else k)


def error(name, k, step):
    """Return the largest error of the mean gradient after a change of the policy of this size."""
    logits = OLD + step * CHANGE
    policy = torch.softmax(logits, 0)
    log_ratios = (policy / torch.softmax(OLD, 0)).log()[ARMS]
    values = ops.group_advantage(REWARDS[ARMS], name, log_ratios=log_ratios, **size(name, k))
    return float((mean_gradient(values, policy) - wanted(name, logits, k)).abs().max())


@pytest.mark.parametrize(
    ("name", "k", "is_exact"),
    [
        ("maxpo_off_policy", 1, True),
        ("maxpo_off_policy", 2, True),
        ("maxpo_off_policy", 3, False),
        ("maxrl_off_policy", 2, True),
        ("maxrl_off_policy", 3, False),
        ("bon_off_policy", 1, True),
        ("bon_off_policy", 2, False),
        ("bon_off_policy", 4, False),
    ],
)
def test_the_mean_gradient_is_that_of_max_at_k_to_the_first_order(name, k, is_exact):
    scale = float(wanted(name, OLD, k).abs().max())
    assert error(name, k, 0.0) <= 1e-12 * scale
    if is_exact:
        assert error(name, k, 1.0) <= 1e-12 * scale
        return
    errors = [error(name, k, step) for step in (0.1, 0.05, 0.025)]
    assert errors[0] > 1e-5 * scale
    for larger, smaller in itertools.pairwise(errors):
        assert 3.5 < larger / smaller < 4.5  # of second order: a quarter at half the change
