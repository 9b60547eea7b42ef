"""Our losses against verl's own functions of the same losses, in verl's environment: `make test-integrations`."""

import pytest
import torch

from maxrl_fast import ops

pytestmark = pytest.mark.integrations

LENGTHS = [5, 1, 7, 4]
S, T, V = len(LENGTHS), sum(LENGTHS), 11


def rollouts():
    """Return logits [T, V], targets, old log-probs, advantages of both signs, and where tokens stand in a padded batch."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(T, V, generator=generator, dtype=torch.float64)
    logits[torch.arange(T), torch.arange(T) % V] += 2  # probabilities that can move by more than .2
    targets = torch.arange(T) % V
    logp = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    old = logp + 0.5 * torch.randn(T, generator=generator, dtype=torch.float64)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return logits, targets, old, torch.tensor([1.0, -2.0, -0.5, 0.7], dtype=torch.float64), mask


def verls(name, **options):
    """Return the loss of verl's function, its gradient in the logits, and the share of tokens that it clips."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    logits, targets, old, advantages, mask = rollouts()
    logits.requires_grad_()
    logp = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def padded(values):
        return torch.zeros(mask.shape, dtype=values.dtype).masked_scatter(mask, values)

    of_tokens = advantages[:, None].expand(mask.shape)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=20.0, **options)
    function = get_policy_loss_fn(name)
    loss, metrics = function(padded(old), padded(logp), of_tokens, mask.double(), "token-mean", config)
    clipped = sum(value for key, value in metrics.items() if key in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"))
    return loss.detach(), torch.autograd.grad(loss, logits)[0], clipped


def ours(loss, aggregation, **options):
    logits, targets, old, advantages, _ = rollouts()
    logits.requires_grad_()
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    value, metrics = ops.policy_gradient_loss(
        logits, targets, advantages, cu_seqlens, old_logprobs=old, loss=loss, aggregation=aggregation, loss_options=options
    )
    return value.detach(), torch.autograd.grad(value, logits)[0], metrics


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)  # verl adds 1e-8 to its counts
    assert expected.abs().max() > 1e-3


@pytest.mark.parametrize(("tau_pos", "tau_neg"), [(1.0, 1.05), (0.6, 2.0)])
def test_sapo(tau_pos, tau_neg):
    loss, gradient, _ = verls("sapo", tau_pos=tau_pos, tau_neg=tau_neg)
    value, our_gradient, _ = ours("sapo", "seq_mean_token_mean", tau_positive=tau_pos, tau_negative=tau_neg)
    assert_same(value, loss)
    assert_same(our_gradient, gradient)


@pytest.mark.parametrize(("low", "high"), [(0.4, 0.4), (0.1, 0.3)])
def test_gmpo_is_geo_mean(low, high):
    loss, gradient, _ = verls("geo_mean", clip_ratio_low=low, clip_ratio_high=high)
    value, our_gradient, metrics = ours("gmpo", "seq_mean_token_mean", low=low, high=high)
    assert_same(value, loss)
    assert_same(our_gradient, gradient)
    assert metrics["clipped_low"] + metrics["clipped_high"] > 0


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.05, 0.1)])
def test_dppo_has_the_gradient_of_dppo_tv_without_its_divergence(low, high):
    _, gradient, clipped = verls("dppo_tv", clip_ratio_low=low, clip_ratio_high=high)
    _, our_gradient, metrics = ours("dppo", "token_mean", low=low, high=high, kl=0.0)
    assert_same(our_gradient, gradient)
    assert (metrics["clipped_low"] + metrics["clipped_high"]).item() == pytest.approx(clipped, abs=1e-6)
    assert clipped > 0
