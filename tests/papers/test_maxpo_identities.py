import random
from itertools import combinations

import pytest
import torch

from maxrl_fast import ops
from tests import brute_force as exact


@pytest.mark.parametrize(("n", "k"), [(4, 2), (5, 4), (7, 3)])
def test_table_1_relates_the_estimators_of_max_at_k(n, k):
    rewards = random.Random(n).choices(range(9), k=n)
    sums = exact.maxpo, exact.conditional_max, exact.leave_one_out_max
    a, s, without = (torch.tensor([*map(float, f(rewards, k))]).double() for f in sums)
    group = torch.tensor(rewards).double()
    correct = (group > group.median()).double()
    rho = float(exact.pass_at_k(n, int(correct.sum()), k))
    chen = (n - k) / n / ((rho * (1 - rho)) ** 0.5 + 1e-6)
    centred = k / n * (s - s.mean())

    def made(name, rewards=group):
        return ops.group_advantage(rewards[None], name, k=k)[0]

    for actual, expected in (
        (made("maxpo"), a),
        (made("expected_improvement"), a + made("leave_two_out")),
        (made("pkpo_sloo"), k / n * a - k / (n * (n - 1)) * without),
        (centred, k / n * (n - k) / n * a),
        (made("bon_mean"), centred / (centred.std() + 1e-6)),
        (made("passk_training", correct), chen * made("maxpo", correct)),
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_l2o_cancels_any_function_of_the_comparators():
    """Proposition F.1."""
    rng = random.Random(0)
    rewards = rng.choices(range(9), k=6)
    baseline = {x: rng.random() for x in combinations(range(6), 2)}

    def signal(i, pool):
        others = [*combinations([j for j in pool if j != i], 2)]
        return sum(max(rewards[j] for j in (i, *x)) - baseline[x] for x in others) / len(others)

    for i, expected in enumerate(exact.maxpo(rewards, 3)):
        rest = [j for j in range(6) if j != i]
        l2o = sum(signal(j, rest) for j in rest) / len(rest)
        assert signal(i, range(6)) - l2o == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize("logits", [torch.zeros(100), torch.arange(5.0)])
def test_the_variance_of_a_softmax_score(logits):
    """E |grad log pi(a)|^2 = 1 - |pi|^2 (eq. 120); the mean of the score is 0."""
    policy, rows = logits.double().softmax(0), logits.double().repeat(len(logits), 1)
    logprobs, _ = ops.token_logprobs(rows.requires_grad_(), torch.arange(len(logits)))
    (scores,) = torch.autograd.grad(logprobs.sum(), rows)
    assert (policy @ scores).abs().max() < 1e-12
    variance = policy @ scores.square().sum(1)
    torch.testing.assert_close(variance, 1 - policy.square().sum())
