"""RL-ZVP: the advantage of every token against the paper's formula, and the gradient of an update
with it.
"""

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.config.checks import check, objective_of
from maxrl_fast.config.parse import parse
from maxrl_fast.records import Samples
from maxrl_fast.training.loss_settings import LossSettings
from maxrl_fast.training.objectives.objective import Needs
from maxrl_fast.training.objectives.zvp import ZvpObjective
from tests.batches import collected, one_batch
from tests.models import response_logits, tiny_decoder
from tests.tables import refused
from tests.training.test_learner import PROMPTS, learner, sampled

OF_SEQUENCES = ("gspo", "gmpo", "vespo", "topr")
REWARDS = torch.tensor([[1.0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 1]])


def by_token(rewards, valid, entropies, alpha):
    advantages = []
    for r, keep, group in zip(rewards.double(), valid, entropies, strict=True):
        known = r[keep]
        normalised = (r - known.mean()) / (known.std() + 1e-6) if len(known) > 1 else 0 * r
        for i, h in enumerate(group):
            if not keep[i]:
                advantages.append(torch.zeros_like(h))
            elif (known == known[0]).all():
                advantages.append(alpha * h if r[i] == 1 else -alpha * (h.max() - h))
            else:
                advantages.append(normalised[i].expand(len(h)))
    return torch.cat(advantages)


def entropies_of(model, rollouts):
    with torch.no_grad():
        logprobs = (
            response_logits(model, one_batch(PROMPTS, rollouts), torch.float32)
            .double()
            .log_softmax(-1)
        )
    parts = (-(logprobs.exp() * logprobs).sum(-1)).split(rollouts.lengths.tolist())
    return [parts[g * 4 : g * 4 + 4] for g in range(3)]


@pytest.mark.parametrize("alpha", [0.1, 2.0])
def test_tokens_of_groups_with_equal_rewards_are_pushed_by_their_entropy(alpha):
    model = tiny_decoder()
    rollouts = sampled(model)
    valid = torch.ones(3, 4, dtype=torch.bool)
    valid[0, 1] = valid[2, 1] = valid[2, 2] = False  # the last group then has equal rewards too
    for known in (None, valid):
        keep = torch.ones_like(valid) if known is None else known
        samples = collected(Samples(PROMPTS, rollouts), REWARDS * keep, known)
        objective = ZvpObjective(alpha=alpha)
        step = objective.begin(samples, learner(model))
        advantages = step.advantages(samples.sequences)
        actual = (
            advantages.double().repeat_interleave(rollouts.lengths)
            * step.batch.rollouts.importance_weights
        )
        expected = by_token(REWARDS, keep, entropies_of(model, rollouts), alpha)
        assert expected.abs().max() > 0.05
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert step.finish() == {}


@pytest.mark.parametrize("loss", ["ppo", "reinforce", "cispo"])
@pytest.mark.parametrize("is_corrected", [False, True])
def test_an_update_has_the_gradient_of_advantages_per_token(loss, is_corrected):
    model = tiny_decoder()
    rollouts = sampled(model)
    weights = (
        torch.rand(len(rollouts.tokens), generator=torch.Generator().manual_seed(2))
        if is_corrected
        else None
    )
    samples = collected(Samples(PROMPTS, rollouts), REWARDS)
    if is_corrected:
        samples = samples.weighted(weights)
    by_hand = by_token(
        REWARDS, torch.ones(3, 4, dtype=torch.bool), entropies_of(model, rollouts), 0.5
    )
    batch = one_batch(PROMPTS, rollouts)
    expected, _ = ops.policy_gradient_loss(
        response_logits(model, batch, torch.float32),
        batch.targets,
        by_hand.float(),
        batch.cu_seqlens,
        advantages_per_token=True,
        old_logprobs=batch.old_logprobs,
        importance_weights=weights,
        loss=loss,
        aggregation="token_mean",
    )
    gradients = torch.autograd.grad(expected, [*model.parameters()])
    trained = learner(model, LossSettings(loss=loss, aggregation="token_mean"))
    objective = ZvpObjective(alpha=0.5)
    step = objective.begin(samples, trained)
    advantages = step.advantages(samples.sequences)
    trained.update(step.batch, advantages, samples.sequences, when="step 1", lr=0.0)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(
            parameter.grad, gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()) + 1e-7
        )


def test_without_a_group_of_equal_rewards_it_is_grpo_and_needs_no_forward_pass():
    rewards = torch.tensor([[1.0, 0, 1, 1], [0, 1, 0, 0], [1, 0, 0, 1]])
    objective = ZvpObjective()
    batch = collected(Samples(PROMPTS, sampled(tiny_decoder())), rewards)
    step = objective.begin(batch, None)
    assert step.batch is batch
    assert torch.equal(step.advantages(torch.arange(12)), ops.grpo_advantage(rewards).flatten())


def test_options():
    made = objective_of(parse(["--objective", "rl_zvp", "--alpha", ".3", "--eps", "1e-3"]))
    assert made == ZvpObjective(alpha=0.3, eps=1e-3)
    assert made.needs == Needs(binary=True, token_weights=True, logprob_passes=1)
    for flags, message in (
        *(
            (f"--loss {loss}", f"so loss cannot be {loss}, whose ratio is one of whole responses")
            for loss in OF_SEQUENCES
        ),
        ("--alpha 0", "alpha of rl_zvp must be a finite number above 0, got 0"),
        ("--ddof 2", "ddof of rl_zvp must be 0 or 1, got 2"),
        ("--dynamic-sampling 2", "rewards are equal, from which rl_zvp learns"),
        (
            "--overlong-buffer 2",
            "overlong_buffer makes rewards other than 0 and 1, which rl_zvp does not support",
        ),
    ):
        with refused(message):
            check(parse(["--objective", "rl_zvp", *flags.split()]))
