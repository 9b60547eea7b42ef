"""Off-policy max@k in the trainer: ratios of every update, the gradient of its loss, and groups
that need no forward pass.
"""

import copy
import dataclasses
from fractions import Fraction

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.config.checks import check, objective_of
from maxrl_fast.config.parse import parse
from maxrl_fast.errors import NonFiniteError
from maxrl_fast.records import Samples
from maxrl_fast.training.objectives.objective import Needs
from maxrl_fast.training.objectives.off_policy import OffPolicyObjective
from maxrl_fast.training.passes import Passes
from tests.batches import collected
from tests.models import tiny_decoder
from tests.ops.definitions import OFF_POLICY
from tests.tables import refused, table
from tests.training.test_pacs_objective import (
    PROMPTS,
    N,
    assert_same,
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
    """Return the sum over each response, [S]."""
    return torch.stack([part.sum() for part in values.split(rollouts.lengths.tolist())])


@pytest.mark.parametrize("name", OPTIONS)
def test_each_update_has_the_gradient_of_the_definition(name):
    model = tiny_decoder()
    rollouts = sampled(model)
    samples, learner = collected(Samples(PROMPTS, rollouts), REWARDS), make_learner(model, lr=0.005)
    objective = OffPolicyObjective(name, OPTIONS[name])
    step = objective.begin(samples, learner)
    farthest = 0.0
    for sequences in samples.minibatches(3):
        logp = sums(logprobs(model, rollouts), rollouts)
        ratios = (logp.detach() - sums(rollouts.logprobs, rollouts)).double().exp()
        farthest = max(farthest, float((ratios[sequences] - 1).abs().max()))
        group = int(sequences[0]) // N
        exact = [[Fraction(float(x)) for x in part] for part in (REWARDS[group], ratios[sequences])]
        values = OFF_POLICY[name](exact[0], next(iter(OPTIONS[name].values())), exact[1])
        loss = -(torch.tensor([float(x) for x in values]) * logp[sequences]).mean()
        parameters = dict(model.named_parameters())
        expected = dict(
            zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)
        )
        expected = copy.deepcopy(expected)
        advantages = step.advantages(sequences)
        torch.testing.assert_close(
            advantages[sequences], torch.tensor([float(x) for x in values]), rtol=1e-3, atol=1e-4
        )
        learner.update(samples, advantages, sequences, when="step 1", lr=0.005)
        if advantages[sequences].any():
            assert_same({name: p.grad for name, p in model.named_parameters()}, expected)
    assert farthest > 0.05  # the earlier updates have moved the policy
    metrics = step.finish()
    assert (
        metrics["sequence_ratio_min"]
        <= metrics["sequence_ratio_mean"]
        <= metrics["sequence_ratio_max"]
    )
    assert metrics["sequence_ratio_max"] - metrics["sequence_ratio_min"] > 0.05


def test_groups_without_advantages_need_no_forward_pass(monkeypatch):
    seen, plain = [], Passes.logprobs

    def spy(self, model, samples, sequences):
        seen.append(sequences.tolist())
        return plain(self, model, samples, sequences)

    monkeypatch.setattr(Passes, "logprobs", spy)
    model = tiny_decoder()
    rewards = torch.tensor([[1.0, 0, 0.5, 0.5], [0, 0, 0, 0], [0, 1, 1, 1]])
    samples = collected(Samples(PROMPTS, sampled(model)), rewards)
    # one wrong of four: any two solve it
    for k, expected in ((1, [[0, 1, 2, 3, 8, 9, 10, 11]]), (2, [[0, 1, 2, 3]])):
        objective = OffPolicyObjective("maxpo_off_policy", {"k": k})
        objective.begin(samples, make_learner(model)).advantages(samples.scored_indices)
        assert seen == expected
        seen.clear()
    step = objective.begin(collected(samples, 0 * REWARDS), make_learner(model))
    assert not step.advantages(samples.scored_indices).any()
    assert step.finish() == {}
    assert not seen


@pytest.mark.parametrize("name", OPTIONS)
def test_rollouts_without_a_reward_are_left_out(name):
    model = tiny_decoder()
    rollouts = sampled(model)
    noise = torch.randn(rollouts.logprobs.shape, generator=torch.Generator().manual_seed(0)) / 20
    # another policy has sampled
    rollouts = dataclasses.replace(rollouts, logprobs=rollouts.logprobs + noise)
    valid = torch.ones(3, N, dtype=torch.bool)
    valid[0, 1] = valid[2, 0] = False
    samples = collected(Samples(PROMPTS, rollouts), REWARDS * valid, valid)
    options = {"order": N - 1} if name == "maxrl_off_policy" else {"k": 2}
    objective = OffPolicyObjective(name, options)
    step = objective.begin(samples, make_learner(model))
    advantages = step.advantages(samples.scored_indices).view(3, N)
    log_ratios = (
        sums(logprobs(model, rollouts).detach(), rollouts) - sums(rollouts.logprobs, rollouts)
    ).view(3, N)
    assert log_ratios.abs().max() > 0.05
    for g in range(3):
        own = valid[g]
        # the full order of the rollouts that there are
        size = {} if "order" in options else options
        expected = ops.group_advantage(REWARDS[g][own], name, log_ratios=log_ratios[g][own], **size)
        torch.testing.assert_close(advantages[g][own], expected, rtol=1e-4, atol=1e-5)
        assert (advantages[g][~own] == 0).all()
    assert advantages.abs().max() > 0.1


def test_a_policy_that_is_not_finite_ends_the_update_with_its_name():
    model = tiny_decoder()
    samples, learner = collected(Samples(PROMPTS, sampled(model)), REWARDS), make_learner(model)
    objective = OffPolicyObjective("maxpo_off_policy", {"k": 2})
    step = objective.begin(samples, learner)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    advantages = step.advantages(samples.scored_indices)
    with pytest.raises(NonFiniteError, match=r"step 1: the weight model.norm.weight is not finite"):
        learner.update(samples, advantages, samples.scored_indices, when="step 1", lr=1e-3)


def test_advantages_that_are_too_large_name_the_step():
    model = tiny_decoder()
    rollouts = sampled(model)
    objective, learner = OffPolicyObjective("maxpo_off_policy", {"k": 2}), make_learner(model)
    objective.begin(collected(Samples(PROMPTS, rollouts), 3e37 * REWARDS), learner)
    far = dataclasses.replace(rollouts, logprobs=rollouts.logprobs - 5)
    samples = collected(Samples(PROMPTS, far), 3e37 * REWARDS, step=4)
    step = objective.begin(samples, learner)
    with refused("step 4: the advantages of maxpo_off_policy must be finite"):
        step.advantages(samples.scored_indices)


def test_the_options_choose_the_objective():
    made = objective_of(
        parse(["--objective", "maxpo_off_policy", "--k", "3", "--clamp-delta", "0.5"])
    )
    assert made == OffPolicyObjective("maxpo_off_policy", {"k": 3, "clamp_delta": 0.5})
    assert (made.loss, made.aggregation, made.needs) == (
        "reinforce",
        "seq_mean_token_sum",
        Needs(logprob_passes=1),
    )
    assert not made.learns_from_equal_rewards(8)
    assert objective_of(parse(["--objective", "maxrl_off_policy"])).options == {
        "order": 15,
        "clamp_delta": 0.0,
    }
    assert objective_of(parse(["--objective", "bon_off_policy"])).learns_from_equal_rewards(8)
    for flags, message in table("""
        --loss ppo | loss must be reinforce for maxpo_off_policy
        --importance-cap 2 | maxpo_off_policy does not support --correction: .*, got tis
        --clamp-delta -1 | clamp_delta of maxpo_off_policy must be a finite number of at least 0,
            got -1
        --k 16 | maxpo_off_policy needs 1 <= k <= N-1 = 15
        """):
        with refused(message):
            check(parse(["--objective", "maxpo_off_policy", *flags.split()]))
