import copy
import dataclasses
from fractions import Fraction

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.algorithms.estimators import ESTIMATORS
from maxrl_fast.ops import group_advantage, log_ratio_reward, pacs_loss, token_logprobs
from maxrl_fast.records import Samples
from maxrl_fast.training.learner import LossSettings
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.objectives.registry import make_objective
from tests.batches import collected, one_batch
from tests.models import response_logits, tiny_decoder, updated
from tests.ops.definitions import OFF_POLICY
from tests.training.test_learner import PROMPTS
from tests.training.test_learner import learner as learner_of
from tests.training.test_learner import sampled as sampled_by

N = 4
LABELS = torch.tensor([[1.0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1]])
SETTINGS = LossSettings(loss="reinforce", aggregation="seq_mean_token_sum", temperature=0.9)


def make_pacs(name="pacs", updates_per_step=1, **options):
    return make_objective(name, {"beta": 0.7, **options}, N, updates_per_step)


def make_learner(model, reference=None, lr=0.05):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return learner_of(model, SETTINGS, 40, optimizer, reference=reference)


def sampled(model):
    return sampled_by(model, PROMPTS, 0.9)


def logprobs(model, rollouts):
    batch = one_batch(PROMPTS, rollouts)
    return token_logprobs(
        response_logits(model, batch, torch.float32), batch.targets, temperature=0.9
    )[0]


def whole_gradient(model, rollouts, reference, sequences, score, class_weight, actor):
    """Return the gradient of (1/B) sum w BCE over the chosen rollouts, plus the actor's -(1/B) sum
    (l - b) logp, b by the name `actor`, unless it is "".
    """
    logp = logprobs(model, rollouts)
    proxies = log_ratio_reward(logp, reference, rollouts.cu_seqlens, 0.7)[sequences]
    loss, metrics = pacs_loss(
        proxies, LABELS.flatten()[sequences], N, score=score, weight=class_weight
    )
    if actor:
        sums = log_ratio_reward(logp, torch.zeros_like(logp), rollouts.cu_seqlens)[sequences]
        terms = metrics["cross_entropy"].detach().view(-1, N)
        others = [terms[:, [j for j in range(N) if j != i]].mean(1) for i in range(N)]
        terms = terms - torch.stack(others, 1) * (actor == "rloo")
        loss = loss + (terms.flatten() * sums).mean()
    parameters = dict(model.named_parameters())
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def assert_same(actual, expected):
    assert max(float(x.abs().max()) for x in expected.values()) > 1e-3
    for name, gradient in expected.items():
        assert (
            float((actual[name] - gradient).abs().max())
            <= 2e-4 * float(gradient.abs().max()) + 1e-6
        ), name


@pytest.mark.parametrize(
    ("actor", "score", "class_weight"),
    [
        ("", "rloo", "balanced"),
        ("", "naive", "none"),
        ("none", "rloo", "none"),
        ("none", "dr_grpo", "balanced"),
        ("rloo", "naive", "balanced"),
    ],
)
def test_each_update_has_the_gradient_of_the_loss(actor, score, class_weight):
    model, reference = tiny_decoder(), tiny_decoder(seed=1) if actor else None
    rollouts, learner = sampled(model), make_learner(model, reference)
    own = {"baseline": actor} if actor else {}
    pacs = make_pacs(
        "pacs_paper" if actor else "pacs", 3, score=score, class_weight=class_weight, **own
    )
    ref_logprobs = logprobs(reference or model, rollouts).detach()
    rollouts = learner.with_reference(Samples(PROMPTS, rollouts), num_updates=3)
    samples = collected(Samples(PROMPTS, rollouts), LABELS)
    step = pacs.begin(samples, learner)
    for sequences in samples.minibatches(3):
        expected = whole_gradient(
            copy.deepcopy(model), rollouts, ref_logprobs, sequences, score, class_weight, actor
        )
        advantages = step.advantages(sequences)
        updated(learner, samples, advantages, sequences, when="step 1", lr=0.05)
        if any(float(x.abs().max()) > 1e-3 for x in expected.values()):
            assert_same({name: p.grad for name, p in model.named_parameters()}, expected)
        elif score != "naive":
            # the group without a correct response, if it comes first
            assert (advantages[sequences] == 0).all()
    names = "pacs_loss pacs_accuracy pacs_reward_proxy pacs_score_correct pacs_score_wrong"
    ratios = "sequence_ratio_mean sequence_ratio_min sequence_ratio_max"
    assert step.finish().keys() == {*names.split(), *ratios.split()}


@pytest.mark.parametrize("score", ["rloo", "grpo", "dr_grpo", "naive"])
def test_the_closed_form_is_the_slope_of_the_loss(score):
    generator, (groups, n) = torch.Generator().manual_seed(0), (6, 5)
    labels = (torch.rand(groups, n, generator=generator) < 0.4).double()
    labels[0], labels[1] = 0, 1
    ratios = torch.randn(groups, n, generator=generator, dtype=torch.float64)
    valid = torch.rand(groups, n, generator=generator) < 0.8
    ratios[2] = 0.5  # all alike
    for weight in ("balanced", "none"):
        row, metrics = ESTIMATORS["pacs"], {}
        options = {"beta": 0.7, "score": score, "class_weight": weight}
        options |= {"old_log_ratios": ratios, "metrics": metrics}
        actual = group_advantage(labels, row, valid=valid, **options)
        proxies = (0.7 * ratios[valid]).requires_grad_()
        offsets = torch.cat([torch.zeros(1), valid.sum(1).cumsum(0)]).long()
        loss, expected = pacs_loss(
            proxies, labels[valid], offsets, score=score, weight=weight, denominator=1.0
        )
        (slope,) = torch.autograd.grad(loss, proxies)
        torch.testing.assert_close(actual[valid], -0.7 * slope)
        assert not actual[~valid].any()
        del expected["cross_entropy"]
        for name, value in expected.items():
            torch.testing.assert_close(metrics[f"pacs_{name}"], value)
        torch.testing.assert_close(metrics["pacs_loss"].double(), loss.detach() / len(proxies))
    if score == "rloo":  # at the sampling policy
        first = group_advantage(labels, "pacs_first_update", valid=valid)
        given = {"old_log_ratios": 0 * ratios, "metrics": {}}
        torch.testing.assert_close(group_advantage(labels, row, valid=valid, **given), first)


def test_the_reference_and_the_optimizer_are_reset():
    model = tiny_decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    copied = copy.deepcopy(model).requires_grad_(False)
    learner = learner_of(model, SETTINGS, 1000, optimizer, reference=copied)
    rollouts, everything = sampled(model), torch.arange(3 * N)
    pacs = make_pacs("pacs_paper", ref_reset_interval=2)
    for n in (1, 2, 3):
        known = learner.with_reference(Samples(PROMPTS, rollouts))
        samples = collected(Samples(PROMPTS, known), LABELS, step=n)
        step = pacs.begin(samples, learner)
        updated(learner, samples, step.advantages(everything), everything, when="step", lr=1e-2)
        step.finish()
        is_reset = n == 2
        weights, reference = model.state_dict(), learner.reference.state_dict()
        assert all(torch.equal(weights[name], reference[name]) for name in weights) == is_reset
        assert (len(optimizer.state) == 0) == is_reset


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
