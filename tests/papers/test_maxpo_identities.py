import random

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
