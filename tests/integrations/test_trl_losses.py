"""Our losses against those of TRL's GRPOTrainer, in TRL's environment: `make test-integrations`."""

from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.algorithms.losses.entropy import highest_entropies
from tests.ops.test_loss_functions import tokens

pytestmark = pytest.mark.integrations

LENGTHS = [5, 1, 7, 4]
T, V = sum(LENGTHS), 11
MASK = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
ADVANTAGES = torch.tensor([1.0, -2.0, -0.5, 0.7], dtype=torch.float64)
VESPO = {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0}
ARGUMENTS = SimpleNamespace(
    delta=None, use_bias_correction_kl=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
    vespo_k_pos=2.0,
    vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
)  # fmt: skip


def rollouts():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(T, V, generator=generator, dtype=torch.float64)
    targets = torch.arange(T) % V
    logp = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return (
        logits.requires_grad_(),
        targets,
        logp.detach() + 0.2 * torch.randn(T, generator=generator, dtype=torch.float64),
    )


def entropies_of(logits):
    return torch.distributions.Categorical(logits=logits.detach()).entropy()


def highest(entropies, share):
    zeros = torch.zeros(len(entropies))
    return highest_entropies(tokens(zeros, zeros, entropy=entropies), share)


def trls(loss_type, level, top_entropy=1.0):
    """Return the loss that TRL's trainer computes, without a model, and its gradient in the
    logits.
    """
    from trl import GRPOTrainer

    logits, targets, old = rollouts()
    logp = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def padded(values):
        return torch.zeros(MASK.shape, dtype=values.dtype).masked_scatter(MASK, values)

    trainer = MagicMock(
        args=ARGUMENTS, loss_type=loss_type, importance_sampling_level=level, beta=0.0,
        epsilon_low=0.1, epsilon_high=0.15,
        top_entropy_quantile=top_entropy, off_policy_mask_threshold=None, use_vllm=False,
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False, current_gradient_accumulation_steps=1,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )  # fmt: skip
    trainer.args.steps_per_generation = trainer.accelerator.num_processes = 1
    trainer.accelerator.gather = lambda values: values
    entropies = padded(entropies_of(logits))
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (padded(logp), entropies, None)
    trainer.accelerator.pad_across_processes = lambda values, **_: values
    trainer.get_high_entropy_mask = partial(GRPOTrainer.get_high_entropy_mask, trainer)
    ids = torch.zeros(MASK.shape, dtype=torch.int64)
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids}
    inputs |= {"completion_mask": MASK.long(), "old_per_token_logps": padded(old)}
    inputs |= {"advantages": ADVANTAGES, "num_items_in_batch": MASK.sum()}
    loss = GRPOTrainer._compute_loss(trainer, MagicMock(training=True), inputs)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize(
    ("name", "aggregation", "level", "options"),
    [
        ("sapo", "seq_mean_token_mean", "token", {"tau_positive": 1.0, "tau_negative": 1.05}),
        ("vespo", "token_mean", "token", VESPO),
        ("luspo", "seq_mean_token_sum", "sequence", None),
    ],
)
def test_loss_and_gradient_are_trls(name, aggregation, level, options):
    expected, expected_gradient = trls(name, level)
    logits, targets, old = rollouts()
    loss, _ = ops.policy_gradient_loss(
        logits, targets, ADVANTAGES, torch.tensor([0, *LENGTHS]).cumsum(0), old_logprobs=old,
        loss=name,
        aggregation=aggregation, loss_options=options, clip_low=0.1, clip_high=0.15,
    )  # fmt: skip
    # TRL rounds sapo's temperatures to float32.
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=1e-12)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-12)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_with_top_entropy_loss_and_gradient_are_trls(share):
    """The loss is divided by all tokens, those without a policy gradient included."""
    expected, expected_gradient = trls("dapo", "token", share)
    logits, targets, old = rollouts()
    keep = highest(entropies_of(logits), share)
    loss, _ = ops.policy_gradient_loss(
        logits, targets, ADVANTAGES, torch.tensor([0, *LENGTHS]).cumsum(0), old_logprobs=old,
        importance_weights=keep.double(),
        clip_low=0.1, clip_high=0.15,
    )  # fmt: skip
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-10, atol=1e-12)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)
    assert (gradient.abs().sum(1) > 0).sum() <= keep.sum() < T
    assert gradient.abs().max() > 1e-3
