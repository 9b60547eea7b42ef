import dataclasses
import math

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.records import Samples
from maxrl_fast.rollout.native import native_engine
from maxrl_fast.training.correction import make_correction
from maxrl_fast.training.learner import Learner, LossSettings
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.trainer import OptimizerOptions, Trainer
from tests.batches import collected, one_batch
from tests.models import response_logits, tiny_decoder
from tests.training.test_learner import PROMPTS, learner
from tests.training.test_learner import sampled as sampled_by

REWARDS = torch.tensor([[1.0, 0, 1, 1], [0, 1, 0, 0], [1, 0, 0, 1]])
BOUNDS = {
    "tis": {"importance_cap": 1.7},
    "tis_sequence": {"importance_cap": 1.7},
    "icepop": {"low": 0.6, "high": 2.5},
    "mis": {"low": 0.2, "high": 3.0},
}


def sampled(model):
    rollouts = sampled_by(model, stop_ids=(3, 8, 12, 20, 25))
    assert len(rollouts.lengths.unique()) > 3
    return rollouts


def disturbed(model, spread=1.5):
    """Return rollouts whose engine gave other log-probs, and policy's minus engine's log-prob of
    each token, in float64.
    """
    rollouts, generator = sampled(model), torch.Generator().manual_seed(4)
    off = spread * torch.randn(len(rollouts.tokens), generator=generator, dtype=torch.float64)
    return dataclasses.replace(rollouts, logprobs=(rollouts.logprobs.double() - off).float()), off


def by_definition(name, off, lengths, *bounds):
    weights, low, high = [], bounds[0], bounds[-1]
    for part in off.split(lengths.tolist()):
        ratios = [math.exp(x) for x in part.tolist()]
        product = math.prod(ratios)
        weights += {
            "tis": [min(ratio, high) for ratio in ratios],
            "tis_sequence": [min(product, high)] * len(ratios),
            "icepop": [ratio if low <= ratio <= high else 0.0 for ratio in ratios],
            "mis": [product if low <= product <= high else 0.0] * len(ratios),
        }[name]
    return torch.tensor(weights, dtype=torch.float64)


@pytest.mark.parametrize("name", BOUNDS)
def test_weights_follow_their_definitions(name):
    model = tiny_decoder()
    rollouts, off = disturbed(model, spread=0.5 if name in ("mis", "tis_sequence") else 1.5)
    given = BOUNDS[name]
    batch = collected(Samples(PROMPTS, rollouts), REWARDS)
    weighted = make_correction(name, given)(batch, learner(model))
    metrics = weighted.metrics
    expected = by_definition(name, off, rollouts.lengths, *given.values())
    weights = weighted.weighted(weighted.rollouts.logprobs).rollouts.sampler_weights
    assert torch.equal(weights, weighted.rollouts.importance_weights)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-4, atol=1e-6)
    bounded = expected == (0.0 if "low" in given else 1.7)
    assert 0.05 < bounded.double().mean() < 0.95  # both kinds are there
    assert expected[~bounded].std() > 0.05
    own = sampled(model).logprobs  # the policy's
    torch.testing.assert_close(weighted.rollouts.logprobs, own, rtol=0, atol=2e-5)
    assert metrics["logprob_diff"] == pytest.approx(float(off.abs().mean()), rel=1e-3)
    assert metrics["importance_weight"] == pytest.approx(float(expected.mean()), rel=1e-3)
    assert metrics["importance_bounded"] == pytest.approx(float(bounded.double().mean()), abs=1e-6)
    size = expected.sum() ** 2 / (expected**2).sum() / len(expected)
    assert metrics["importance_sample_size"] == pytest.approx(float(size), rel=1e-3)


def test_weights_that_are_all_0_have_no_sample_size():
    rollouts, _ = disturbed(model := tiny_decoder())
    correction = make_correction("icepop", {"low": 1e8, "high": 1e9})
    batch = collected(Samples(PROMPTS, rollouts), REWARDS)
    metrics = correction(batch, learner(model)).metrics
    nothing = {"importance_weight": 0.0, "importance_bounded": 1.0, "importance_sample_size": 0.0}
    assert nothing.items() <= metrics.items()


class Collector:
    def __init__(self, batch):
        self.batch = batch

    def collect(self, step, first_prompt):
        return self.batch


def step(model, rollouts, correction, updates=1, lr=0.0, **options):
    settings = LossSettings(**{"loss": "ppo", "aggregation": "token_mean", **options})
    learning = learner(model, settings, optimizer=torch.optim.SGD(model.parameters(), lr=lr))
    engine = native_engine(model, torch.float32)
    batch = collected(Samples(PROMPTS, rollouts), REWARDS)
    options = OptimizerOptions(lr=lr, steps=10, warmup_steps=0, updates_per_step=updates)
    grpo = GroupObjective("grpo", {})
    trainer = Trainer(Collector(batch), grpo, learning, engine, options, correction)
    return trainer.step(1, 0).metrics


def distances_of(model, rollouts):
    logits = response_logits(model, one_batch(PROMPTS, rollouts), torch.float32).detach()
    own = logits.log_softmax(-1).gather(1, rollouts.tokens[:, None])[:, 0].double()
    parts = (rollouts.logprobs.double() - own).split(rollouts.lengths.tolist())
    return torch.stack([x.mean() for x in parts])


def test_the_sequence_mask_leaves_out_negative_responses_far_from_the_policy():
    assert make_correction("sequence_mask", {"delta": 0.5}) is None  # it belongs to the loss
    model = tiny_decoder()
    rollouts, _ = disturbed(model)
    advantages = ops.grpo_advantage(REWARDS).flatten()
    distances = distances_of(model, rollouts)
    delta = float(distances[advantages < 0].median()) - 1e-3
    is_masked = (advantages < 0) & (distances > delta)
    assert 1 < int(is_masked.sum()) < int((advantages < 0).sum())
    assert (distances[advantages > 0] > delta).any()  # which its sign keeps
    samples = Samples(PROMPTS, rollouts)
    learning = learner(model, LossSettings("ppo", "token_mean", sequence_mask=delta))
    for chosen in (samples.sequences, torch.tensor([2, 3, 4, 5])):
        plan = learning.plan(samples, advantages, chosen, (0, 0))
        kept = [s for s in chosen.tolist() if advantages[s] != 0 and not is_masked[s]]
        assert plan.sequences.tolist() == kept
        share = int(is_masked[chosen].sum()) / len(chosen)
        assert float(plan.own["frac_sequences_masked"]) == share
        assert plan.denominator == float(rollouts.lengths[chosen].sum())  # of all responses


def test_with_several_updates_the_mask_is_that_of_the_policy_of_each(monkeypatch):
    """The engine gives the policy's log-probs, so the first update masks nothing; then the policy
    has moved.
    """
    model, delta = tiny_decoder(), 0.05
    rollouts = sampled(model)
    masked, negative = [], 0
    made = Learner.plan

    def spied(self, samples, advantages, sequences, draw):
        nonlocal negative
        assert draw == (1, len(masked))  # the step and the update, for losses that draw tokens
        plan = made(self, samples, advantages, sequences, draw)
        is_masked = (advantages < 0) & (distances_of(self.model, rollouts) > delta)
        kept = [s for s in sequences.tolist() if advantages[s] != 0 and not is_masked[s]]
        assert plan.sequences.tolist() == kept
        negative += int((advantages[sequences] < 0).sum()) if masked else 0
        masked.append(int(is_masked[sequences].sum()))
        return plan

    monkeypatch.setattr(Learner, "plan", spied)
    metrics = step(model, rollouts, None, updates=3, lr=0.05, sequence_mask=delta)
    assert masked[0] == 0 < sum(masked) < negative
    assert metrics["frac_sequences_masked"] == pytest.approx(sum(masked) / 12)
