import torch

from maxrl_fast import ops
from maxrl_fast.records import Samples
from maxrl_fast.training.objectives.registry import make_objective
from tests.batches import collected, one_batch
from tests.models import response_logits, tiny_decoder
from tests.training.test_learner import PROMPTS, learner, sampled

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
    logits = response_logits(model, one_batch(PROMPTS, rollouts), torch.float32).detach().double()
    logprobs = logits.log_softmax(-1)
    parts = (-(logprobs.exp() * logprobs).sum(-1)).split(rollouts.lengths.tolist())
    return [parts[g * 4 : g * 4 + 4] for g in range(3)]


def test_tokens_of_groups_with_equal_rewards_are_pushed_by_their_entropy():
    rollouts = sampled(model := tiny_decoder())
    valid = torch.ones(3, 4, dtype=torch.bool)
    valid[0, 1] = valid[2, 1] = valid[2, 2] = False  # the last group then has equal rewards too
    for known in (None, valid):
        keep = torch.ones_like(valid) if known is None else known
        samples = collected(Samples(PROMPTS, rollouts), REWARDS * keep, known)
        expected = by_token(REWARDS, keep, entropies_of(model, rollouts), alpha=2.0)
        if known is None:
            weights = torch.linspace(0.2, 1.5, len(rollouts.tokens))
            samples, expected = samples.weighted(weights), expected * weights
        step = make_objective("rl_zvp", {"alpha": 2.0}, 4).begin(samples, learner(model))
        actual = step.advantages(samples.sequences).double().repeat_interleave(rollouts.lengths)
        actual = actual * step.batch.rollouts.importance_weights
        assert expected.abs().max() > 0.05
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert step.finish() == {}


def test_without_a_group_of_equal_rewards_it_is_grpo_and_needs_no_forward_pass():
    rewards = torch.tensor([[1.0, 0, 1, 1], [0, 1, 0, 0], [1, 0, 0, 1]])
    batch = collected(Samples(PROMPTS, sampled(tiny_decoder())), rewards)
    step = make_objective("rl_zvp", {}, 4).begin(batch, None)
    expected = ops.grpo_advantage(rewards).flatten().repeat_interleave(batch.rollouts.lengths)
    torch.testing.assert_close(step.batch.rollouts.importance_weights, expected)
    assert (step.advantages(torch.arange(12)) == 1).all()
