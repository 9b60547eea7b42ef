import pytest
import torch

from maxrl_fast.training.objectives.classes import explained_variance, gae_advantages, whitened

LENGTHS = [3, 1, 0, 7, 16, 2, 33, 0, 1]
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0)
T = sum(LENGTHS)


def numbers(seed, size=T):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_definition(values, rewards, lengths, gamma, gae_lambda):
    advantages, start = [], 0
    for reward, length in zip(rewards, lengths, strict=True):
        v = [*values[start : start + length], 0.0]
        deltas = [gamma * v[t + 1] - v[t] + reward * (t == length - 1) for t in range(length)]
        for t in range(length):
            powers = enumerate(deltas[t:])
            advantages.append(sum((gamma * gae_lambda) ** i * delta for i, delta in powers))
        start += length
    return torch.tensor(advantages, dtype=torch.float64)


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.0, 0.3)])
def test_advantages_are_the_double_sum(gamma, gae_lambda):
    values, rewards = numbers(0), numbers(1, len(LENGTHS))
    actual = gae_advantages(values, rewards, CU_SEQLENS, gamma, gae_lambda)
    expected = by_definition(values.tolist(), rewards.tolist(), LENGTHS, gamma, gae_lambda)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert actual.abs().min() > 1e-4
    single = gae_advantages(values.float(), rewards.float(), CU_SEQLENS, gamma, gae_lambda)
    torch.testing.assert_close(single, expected, rtol=1e-4, atol=1e-5)


def test_no_token_and_values_that_are_not_finite():
    for num_responses in (0, 2):
        rewards, cu_seqlens = torch.zeros(num_responses), torch.zeros(num_responses + 1).long()
        assert not len(gae_advantages(torch.zeros(0), rewards, cu_seqlens, 1.0, 1.0))
    values = numbers(0)
    values[CU_SEQLENS[4] :] = torch.nan  # of later responses: nothing of them reaches the others
    advantages = gae_advantages(values, numbers(1, len(LENGTHS)), CU_SEQLENS, 0.9, 0.95)
    assert advantages[: CU_SEQLENS[4]].isfinite().all()


def test_where_one_token_counts_or_all_are_equal_nothing_is_whitened_or_explained():
    """test_ppo_objective.py has the values of a step."""
    one, values = torch.arange(T) == 4, numbers(0)
    for advantages, counts in (
        (values, one),
        (values, one & False),
        (0 * values + 0.5, one | True),
    ):
        assert not whitened(advantages, counts).any()
    assert explained_variance(values, 0 * values + 0.1) == 0
    assert explained_variance(values[:0], values[:0]) == 0
