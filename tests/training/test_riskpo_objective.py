import statistics
from types import SimpleNamespace

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.objectives.registry import make_objective
from tests.batches import collected, make_prompts, one_batch
from tests.models import response_logits, tiny_decoder
from tests.training.test_learner import PROMPTS, learner, sampled

REWARDS = torch.tensor(
    [
        [1.0, 0, 1, 0.5],
        [0, 0, 1, 1],
        [1, 1, 1, 1],
        [0, 0, 0, 0],
        [0, 1, 0, 0],
        [0.25, 0, 0, 1],
        [1, 1, 1, 1],
        [0, 0, 0, 0],
    ]
)


def started(size):
    objective = GroupObjective("riskpo", {"bundle_size": size})
    return objective, SimpleNamespace(objective_state=objective.state)


def begun(run, rewards, valid=None):
    objective, learner = run
    samples = Samples(make_prompts([[1] for _ in rewards]), Rollouts.given([[5]] * rewards.numel()))
    return objective.begin(collected(samples, rewards, valid), learner)


def advantages_of(step):
    return step.values.view(step.batch.rewards.shape)


def spread(values):
    return s if len(values) > 1 and (s := statistics.stdev(values)) > 1e-3 else 1.0


def paper_by_paper(rewards, keep, size, low, high):
    advantages = [[0.0] * len(row) for row in rewards]
    for first in range(0, len(rewards), size):
        prompts = range(first, first + size)
        papers = [n for n in range(len(rewards[0])) if all(keep[q][n] for q in prompts)]
        scores = {n: sum(rewards[q][n] for q in prompts) for n in papers}
        for n, score in scores.items():
            value = (max(score - low, 0) - max(score - high, 0) + low - high) / 0.7
            tail = -max(low - score, 0) / 0.2
            advantage = (1.5 * tail + value) / 2.5 / spread([*scores.values()])
            for q in prompts:
                known = [r for r, known in zip(rewards[q], keep[q], strict=True) if known]
                advantages[q][n] = advantage / spread(known)
    return torch.tensor(advantages)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_paper_has_the_authors_advantage(size):
    valid = torch.ones(8, 4, dtype=torch.bool)
    valid[0, 1] = valid[5, 3] = False
    for known in (None, valid):
        keep = torch.ones_like(valid) if known is None else known
        run = started(size)
        actual = advantages_of(begun(run, REWARDS * keep, known))
        has_score = keep.view(-1, size, 4).all(1)
        scores = (REWARDS * keep).view(-1, size, 4).sum(1)[has_score].double()
        levels = torch.tensor([0.2, 0.9], dtype=torch.float64)
        low, high = torch.quantile(scores, levels).tolist()
        assert low < high
        expected = paper_by_paper(REWARDS.tolist(), keep.tolist(), size, low, high)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        assert (expected < 0).any()
        assert (actual <= 0).all()
        assert (actual.view(-1, size, 4).masked_select(~has_score[:, None]) == 0).all()


def test_the_quantiles_follow_the_scores_by_gradient_descent():
    run = started(2)
    step = begun(run, REWARDS)
    scores, expected = REWARDS.view(4, 2, 4).sum(1).flatten(), []
    low, high = torch.quantile(scores, torch.tensor([0.2, 0.9])).tolist()
    for q, level in ((low, 0.2), (high, 0.9)):
        expected.append(q + 0.1 * (level - float((scores < q).float().mean())))
    assert [*step.finish().values()] == pytest.approx(expected)
    second = advantages_of(begun(run, REWARDS.flip(0)))
    by_hand = paper_by_paper(REWARDS.flip(0).tolist(), [[True] * 4] * 8, 2, *expected)
    torch.testing.assert_close(second, by_hand, rtol=1e-4, atol=1e-5)
    nothing = started(2)
    assert not begun(nothing, 0 * REWARDS, torch.zeros(8, 4, dtype=torch.bool)).values.any()
    assert nothing[1].objective_state["quantiles"].isnan().all()


EQUAL = torch.tensor([[1.0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 1]])


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
        samples = collected(Samples(PROMPTS, rollouts), EQUAL * keep, known)
        expected = by_token(EQUAL, keep, entropies_of(model, rollouts), alpha=2.0)
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
