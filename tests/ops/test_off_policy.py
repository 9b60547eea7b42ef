import math
from fractions import Fraction

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.algorithms.estimators import Estimator, Group
from tests.ops.definitions import OFF_POLICY


def advantages(name, rewards, log_ratios, k, **given):
    size = {"order" if name == "maxrl_off_policy" else "k": k}
    return ops.group_advantage(rewards, name, log_ratios=log_ratios, **size, **given)


def test_equal_ratios_scale_the_advantages_of_every_k():
    """With one ratio 1 + c for all, every subset of m has the weight 1 + m c: exact at sizes that
    no enumeration reaches.
    """
    n, c, close = 1024, 0.125, {"rtol": 1e-9, "atol": 1e-10}
    rewards = torch.randn(2, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    log_ratios = torch.full_like(rewards, math.log1p(c))

    def expected(k):
        return (1 + c) * (1 + (k - 1) * c) * ops.maxpo_advantage(rewards, k)

    for k in (1, 2, n // 2, n - 1):
        actual = advantages("maxpo_off_policy", rewards, log_ratios, k)
        torch.testing.assert_close(actual, expected(k), **close)
        bon = (1 + k * c) * advantages("bon_off_policy", rewards, 0 * rewards, k)
        actual = advantages("bon_off_policy", rewards, log_ratios, k)
        torch.testing.assert_close(actual, bon, **close)
    actual = advantages("maxrl_off_policy", rewards, log_ratios, 3)
    torch.testing.assert_close(actual, sum(map(expected, (1, 2, 3))), **close)


def test_ratios_are_clamped():
    rewards = torch.tensor([[0.0, 1, 3, 2, 0]]).double()
    valid, exact = torch.arange(5)[None] < 4, [*map(Fraction, (0, 1, 3, 2))]
    for name, definition in OFF_POLICY.items():

        def clamped(*ratios, name=name, **given):
            ratios = torch.tensor([[*ratios, 0]], dtype=torch.float64)
            return advantages(name, rewards, ratios, 2, valid=valid, **given)

        assert torch.equal(clamped(0, torch.inf, -torch.inf, 50), clamped(0, 20, -20, 20))
        actual = clamped(*map(math.log, (0.25, 1.125, 4, 1)), clamp_delta=0.5)
        expected = definition(exact, 2, [Fraction(x, 8) for x in (4, 9, 12, 8)])
        wanted = pytest.approx([*map(float, expected), 0], rel=1e-12, abs=1e-12)
        assert actual[0].tolist() == wanted


def test_equal_ids_take_memory_for_their_groups_alone():
    """4096 rollouts of one prompt by id: a row for each possible group would be 4096 times as
    much.
    """
    shapes = []

    def seen(g: Group):
        shapes.append(g.valid.shape)
        return g.rewards

    ops.group_advantage(torch.zeros(4096), Estimator.of(seen), group_ids=torch.full((4096,), 7))
    assert shapes == [(1, 4096)]
