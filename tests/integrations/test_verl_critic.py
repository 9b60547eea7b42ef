"""Our generalized advantages and value loss against verl's own functions, in verl's environment:
`make test-integrations`.
"""

import pytest
import torch

from maxrl_fast.training.critic import value_loss
from maxrl_fast.training.objectives.gae import gae_advantages, whitened

pytestmark = pytest.mark.integrations

LENGTHS = [5, 1, 7, 4]
T = sum(LENGTHS)
MASK = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0)


def numbers(seed, size=T):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def padded(values):
    return torch.zeros(MASK.shape, dtype=values.dtype).masked_scatter(MASK, values)


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_whitened_advantages_and_returns_are_verls(gamma, gae_lambda):
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    values, rewards = numbers(0), numbers(1, len(LENGTHS))
    at_last = torch.zeros(T, dtype=torch.float64).index_copy(0, CU_SEQLENS[1:] - 1, rewards)
    theirs, returns = compute_gae_advantage_return(
        padded(at_last), padded(values), MASK.double(), gamma, gae_lambda
    )
    ours = gae_advantages(values, rewards, CU_SEQLENS, gamma, gae_lambda)
    torch.testing.assert_close(ours + values, returns[MASK], rtol=1e-7, atol=1e-9)
    every = torch.ones(T, dtype=torch.bool)
    # verl adds 1e-8 to its counts
    torch.testing.assert_close(whitened(ours, every), theirs[MASK], rtol=1e-6, atol=1e-8)
    assert ours.abs().min() > 1e-3


@pytest.mark.parametrize("clip", [0.2, 0.5])
def test_the_value_loss_is_verls(clip):
    from verl.trainer.ppo.core_algos import compute_value_loss

    old, returns = numbers(0), numbers(1)
    values = (old + 0.5 * numbers(2)).requires_grad_()
    theirs, share = compute_value_loss(
        padded(values), padded(returns), padded(old), MASK.double(), clip
    )
    ours = value_loss(values, old, returns, clip).mean()
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
    slopes = [torch.autograd.grad(loss, values, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-9)
    assert 0 < float(share) < 1  # some are clipped
