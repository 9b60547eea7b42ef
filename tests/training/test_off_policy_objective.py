"""Off-policy max@k in the trainer: ratios of every update, the gradient of its loss, and groups
that need no forward pass.
"""

import dataclasses
from fractions import Fraction

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.records import Samples
from maxrl_fast.training.objectives.group import GroupObjective
from tests.batches import collected
from tests.models import tiny_decoder, updated
from tests.ops.definitions import OFF_POLICY
from tests.training.test_pacs_objective import (
    PROMPTS,
    N,
    logprobs,
    make_learner,
    sampled,
)

REWARDS = torch.tensor([[1.0, 0, 0.5, 0.5], [0, 0, 0, 0], [0, 1, 0.25, 0]])
OPTIONS = {
    "maxpo_off_policy": {"k": 3},
    "maxrl_off_policy": {"order": 3},
    "bon_off_policy": {"k": 2},
}


def sums(values, rollouts):
    return torch.stack([part.sum() for part in values.split(rollouts.lengths.tolist())])


@pytest.mark.parametrize("name", OPTIONS)
def test_each_update_has_the_advantages_of_the_definition(name):
    model = tiny_decoder()
    rollouts = sampled(model)
    samples, learner = collected(Samples(PROMPTS, rollouts), REWARDS), make_learner(model, lr=0.005)
    objective = GroupObjective(name, OPTIONS[name])
    step = objective.begin(samples, learner)
    farthest = 0.0
    for sequences in samples.minibatches(3):
        logp = sums(logprobs(model, rollouts), rollouts)
        ratios = (logp.detach() - sums(rollouts.logprobs, rollouts)).double().exp()
        farthest = max(farthest, float((ratios[sequences] - 1).abs().max()))
        group = int(sequences[0]) // N
        exact = [[Fraction(float(x)) for x in part] for part in (REWARDS[group], ratios[sequences])]
        values = OFF_POLICY[name](exact[0], next(iter(OPTIONS[name].values())), exact[1])
        advantages = step.advantages(sequences)
        torch.testing.assert_close(
            advantages[sequences], torch.tensor([float(x) for x in values]), rtol=1e-3, atol=1e-4
        )
        updated(learner, samples, advantages, sequences, when="step 1", lr=0.005)
    assert farthest > 0.05  # the earlier updates have moved the policy
    metrics = step.finish()
    low, mean, high = (metrics[f"sequence_ratio_{x}"] for x in ("min", "mean", "max"))
    assert low <= mean <= high
    assert high - low > 0.05


def test_rollouts_without_a_reward_are_left_out():
    name, model = "maxrl_off_policy", tiny_decoder()
    rollouts, generator = sampled(model), torch.Generator().manual_seed(0)
    noise = torch.randn(rollouts.logprobs.shape, generator=generator) / 20
    # another policy has sampled
    rollouts = dataclasses.replace(rollouts, logprobs=rollouts.logprobs + noise)
    valid = torch.ones(3, N, dtype=torch.bool)
    valid[0, 1] = valid[2, 0] = False
    samples = collected(Samples(PROMPTS, rollouts), REWARDS * valid, valid)
    step = GroupObjective(name, {"order": N - 1}).begin(samples, make_learner(model))
    advantages = step.advantages(samples.minibatches(1)[0]).view(3, N)
    ratios = sums(logprobs(model, rollouts).detach() - rollouts.logprobs, rollouts).view(3, N)
    assert ratios.abs().max() > 0.05
    for g, own in enumerate(valid):
        # the full order of the rollouts that there are
        expected = ops.group_advantage(REWARDS[g][None, own], name, log_ratios=ratios[g][None, own])
        torch.testing.assert_close(advantages[g][None, own], expected, rtol=1e-4, atol=1e-5)
        assert (advantages[g][~own] == 0).all()
    assert advantages.abs().max() > 0.1
