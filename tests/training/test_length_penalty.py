"""DAPO's overlong punishment: its formula, which rewards it changes, and the options."""

import pytest
import torch

from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.training.collect import LengthPenalty, RolloutCollector
from tests.batches import collected, make_prompts


def soft_punishment(length, longest, cache):
    """Return R_length of DAPO, eq. 13, case by case."""
    if length <= longest - cache:
        return 0.0
    return ((longest - cache) - length) / cache if length <= longest else -1.0


@pytest.mark.parametrize(("limit", "buffer"), [(20, 5), (7, 7), (9, 1)])
def test_the_penalty_is_that_of_dapo(limit, buffer):
    lengths = torch.arange(limit + 1)
    expected = torch.tensor([soft_punishment(length, limit, buffer) for length in range(limit + 1)])
    torch.testing.assert_close(LengthPenalty(limit, buffer)(lengths), expected)
    torch.testing.assert_close(LengthPenalty(limit, buffer, 0.25)(lengths), 0.25 * expected)
    assert expected[-1] == -1


def samples(*lengths):
    return Samples(make_prompts([[1], [2]]), Rollouts.given([[1] * length for length in lengths]))


def test_only_the_rewards_of_the_objective_change():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    valid = torch.tensor([[True, True], [False, True]])
    before = collected(samples(2, 8, 10, 9), rewards, valid)
    collector = RolloutCollector(None, None, None, None, 2, 2, length_penalty=LengthPenalty(10, 4))
    batch = collector._shaped(before)
    # where the reward is not known it stays 0
    assert batch.rewards.tolist() == [[1.0, -0.5], [0.0, -0.75]]
    assert batch.metrics["overlong_penalty"] == pytest.approx(-(0.5 + 1 + 0.75) / 4)
    assert torch.equal(batch.task_rewards, rewards)  # kept rollouts
    assert batch.all_rewards.nan_to_num().equal(rewards)  # metrics and dynamic sampling
