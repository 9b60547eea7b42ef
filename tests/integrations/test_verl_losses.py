"""Our losses against verl's own functions of the same losses, in verl's environment: `make
test-integrations`."""

import pytest
import torch

from maxrl_fast import ops

pytestmark = pytest.mark.integrations

LENGTHS = [5, 1, 7, 4]
S, T, V = len(LENGTHS), sum(LENGTHS), 11


def rollouts():
    """Return logits [T, V], targets, old log-probs, advantages of both signs, and where tokens
    stand in a padded batch."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(T, V, generator=generator, dtype=torch.float64)
    logits[torch.arange(T), torch.arange(T) % V] += 2  # probabilities that can move by more than .2
    targets = torch.arange(T) % V
    logp = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    old = logp + 0.5 * torch.randn(T, generator=generator, dtype=torch.float64)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return logits, targets, old, torch.tensor([1.0, -2.0, -0.5, 0.7], dtype=torch.float64), mask


def verls(name, **options):
    """Return the loss of verl's function, its gradient in the logits, and the share of tokens that
    it clips."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    logits, targets, old, advantages, mask = rollouts()
    logits.requires_grad_()
    logp = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def padded(values):
        return torch.zeros(mask.shape, dtype=values.dtype).masked_scatter(mask, values)

    of_tokens = advantages[:, None].expand(mask.shape)
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=20.0, **options
    )
    function = get_policy_loss_fn(name)
    loss, metrics = function(
        padded(old), padded(logp), of_tokens, mask.double(), "token-mean", config
    )
    clipped = sum(metrics.get(f"actor/pg_clipfrac{x}", 0) for x in ("", "_lower"))
    return loss.detach(), torch.autograd.grad(loss, logits)[0], clipped


def ours(loss, aggregation, arguments=None, **options):
    logits, targets, old, advantages, _ = rollouts()
    logits.requires_grad_()
    given = {"cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0), **(arguments or {})}
    given |= {"old_logprobs": old, "aggregation": aggregation}
    value, metrics = ops.policy_gradient_loss(
        logits, targets, advantages, **given, loss=loss, loss_options=options
    )
    return value.detach(), torch.autograd.grad(value, logits)[0], metrics


def assert_same(actual, expected):
    # verl adds 1e-8 to its counts
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)
    assert expected.abs().max() > 1e-3


def policy_loss(name, **options):
    from verl.workers.config import PolicyLossConfig

    return PolicyLossConfig(loss_mode=name, **options)


@pytest.mark.parametrize(("share", "coef"), [(0.13, 0.4), (2e-4, 1.0)])
def test_kl_cov(share, coef):
    loss, gradient, _ = verls(
        "kl_cov", policy_loss=policy_loss("kl_cov", kl_cov_ratio=share, ppo_kl_coef=coef)
    )
    value, our_gradient, _ = ours("kl_cov", "token_mean", share=share, coef=coef)
    assert_same(value, loss)
    assert_same(our_gradient, gradient)
    plain = ours("kl_cov", "token_mean", share=share, coef=0)[1]
    assert (plain - gradient).abs().max() > 1e-3


@pytest.mark.parametrize(("share", "low", "high"), [(0.13, 0.05, 1.0), (2e-4, 0.1, 5.0)])
def test_clip_cov_draws_the_same_tokens_from_the_same_generator(share, low, high):
    """With bounds of the ratio that clip no token, as in the authors' script; verl does not draw
    tokens that are clipped."""
    options = policy_loss("clip_cov", clip_cov_ratio=share, clip_cov_lb=low, clip_cov_ub=high)
    for seed in range(2):
        torch.manual_seed(seed)
        loss, gradient, clipped = verls(
            "clip_cov", policy_loss=options, clip_ratio_low=1.0, clip_ratio_high=99.0
        )
        torch.manual_seed(seed)
        arguments = {"clip_low": 1.0, "clip_high": 99.0}
        value, our_gradient, metrics = ours(
            "clip_cov", "token_mean", arguments, share=share, low=low, high=high
        )
        assert_same(value, loss)
        assert_same(our_gradient, gradient)
        assert clipped > 0
        # they are masked, and count as dropped
        dropped = metrics["dropped_tokens"] / metrics["tokens"]
        assert dropped.item() == pytest.approx(clipped, abs=1e-6)
