"""Tokens chosen over the samples of an update: the choice, the gradient of an update with it, and runs that resume."""

import dataclasses
import json
import math

import pytest
import torch

from maxrl_fast import ops, train
from maxrl_fast.config.checks import check
from maxrl_fast.config.parse import parse
from maxrl_fast.errors import InputError
from maxrl_fast.records import Samples
from maxrl_fast.training.learner import Learner, LossSettings
from maxrl_fast.training.token_choice import TokenChoice, highest
from tests.batches import collected, one_batch
from tests.models import response_logits, tiny_decoder
from tests.run.test_resume import assert_same, stop_at
from tests.test_train import base, read
from tests.training.test_collect import CHAIN
from tests.training.test_learner import PROMPTS, learner, sampled

ADVANTAGES = torch.tensor([1.0, 1.5, 0.7, -0.8, 0, 0, 0, 0, 2.0, 1.2, -0.3, 1.5])  # a group of equal rewards
KL_COV = LossSettings(loss="kl_cov", aggregation="token_mean", loss_options={"share": 0.15, "coef": 0.7})
CLIP_COV = LossSettings(loss="clip_cov", aggregation="token_mean", loss_options={"share": 0.1, "low": 0.05, "high": 3.0})


def off_policy(model, seed=0):
    """Return samples whose log-probs are not the model's, as in a later update of a step."""
    rollouts = sampled(model)
    noise = 0.3 * torch.randn(len(rollouts.tokens), generator=torch.Generator().manual_seed(seed))
    rollouts = dataclasses.replace(rollouts, logprobs=rollouts.logprobs + noise)
    return collected(Samples(PROMPTS, rollouts), ADVANTAGES.view(3, 4))


def covariances(rollouts, advantages):
    a, logp = advantages.double().repeat_interleave(rollouts.lengths), rollouts.logprobs.double()
    return (a - a.mean()) * (logp - logp.mean())


def gradients(trained, samples, sequences=None):
    sequences = samples.sequences if sequences is None else sequences
    metrics = trained.update(samples, ADVANTAGES, sequences, when="step 1", lr=0.0)
    return metrics, {name: p.grad.clone() for name, p in trained.model.named_parameters()}


def expected_gradients(model, rollouts, **options):
    """Return the gradient of the whole batch in one call of the operator."""
    batch = one_batch(PROMPTS, rollouts)
    given = {"advantages": ADVANTAGES, "old_logprobs": batch.old_logprobs} | options
    logits = response_logits(model, batch, torch.float32)
    loss, _ = ops.policy_gradient_loss(logits, batch.targets, given.pop("advantages"), batch.cu_seqlens, **given)
    parameters = dict(model.named_parameters())
    return dict(zip(parameters, torch.autograd.grad(loss, [*parameters.values()]), strict=True))


def assert_close(actual, expected):
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()) + 1e-7)


@pytest.mark.parametrize("budget", [1, 25, 10_000])
def test_an_update_with_kl_cov_is_that_of_the_whole_batch(budget):
    model = tiny_decoder()
    samples = off_policy(model)
    covariance = covariances(samples.rollouts, ADVANTAGES)
    count = int(0.15 * len(covariance))
    chosen = torch.zeros_like(covariance).index_fill(0, covariance.topk(count).indices, 1.0)
    trained = learner(model, KL_COV, budget=budget)
    choice = TokenChoice(trained)
    choice.begin(samples)
    metrics, actual = gradients(trained, choice.apply(samples, ADVANTAGES, samples.sequences, 0))
    options = {"loss": "kl_cov", "loss_options": {"coef": 0.7}}
    assert_close(actual, expected_gradients(model, samples.rollouts, token_statistics=chosen, **options))
    plain = expected_gradients(model, samples.rollouts, token_statistics=0 * chosen, **options)
    assert max(float((actual[name] - plain[name]).abs().max()) for name in plain) > 1e-3
    of_equal_rewards = chosen.split(samples.rollouts.lengths.tolist())[4:8]
    assert metrics.num_sequences == 8 + sum(bool(tokens.any()) for tokens in of_equal_rewards) > 8
    assert choice.end() == {"tokens_chosen": count}


@pytest.mark.parametrize("budget", [1, 10_000])
def test_an_update_with_clip_cov_leaves_out_a_draw_from_the_tokens_between_the_bounds(budget):
    model = tiny_decoder()
    samples = off_policy(model)
    covariance = covariances(samples.rollouts, ADVANTAGES)
    trained = learner(model, CLIP_COV, budget=budget)
    choice = TokenChoice(trained, seed=4)
    choice.begin(samples)
    updated = choice.apply(samples, ADVANTAGES, samples.sequences, 0)
    statistics = updated.rollouts.token_statistics
    assert int(statistics.sum()) == int(0.1 * len(covariance)) > 1
    assert ((covariance > 0.05) & (covariance < 3))[statistics == 1].all()
    options = {"loss": "ppo", "advantages_per_token": True}
    by_token = ADVANTAGES.repeat_interleave(samples.rollouts.lengths)
    _, actual = gradients(trained, updated)
    assert_close(actual, expected_gradients(model, samples.rollouts, advantages=by_token * (1 - statistics), **options))
    plain = expected_gradients(model, samples.rollouts, advantages=by_token, **options)
    assert max(float((actual[name] - plain[name]).abs().max()) for name in plain) > 1e-3


def test_a_draw_depends_on_seed_step_and_update_alone():
    model = tiny_decoder()
    samples, trained = off_policy(model), learner(model, CLIP_COV)
    draws = {}
    for seed, step, update in ((0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0), (2**62 + 1, 1, 0)):
        torch.manual_seed(len(draws))  # the global generator plays no part
        at_step = dataclasses.replace(samples, step=step)
        for _ in range(2):
            choice = TokenChoice(trained, seed=seed)
            drawn = choice.apply(at_step, ADVANTAGES, samples.sequences, update).rollouts.token_statistics
            assert torch.equal(draws.setdefault((seed, step, update), drawn), drawn)
    assert len({tuple(drawn.tolist()) for drawn in draws.values()}) == len(draws)


def test_the_choice_is_made_over_the_samples_of_one_update():
    """With weights of tokens the covariance has their product with the advantages."""
    model = tiny_decoder()
    samples, trained = off_policy(model), learner(model, KL_COV)
    weights = torch.rand(len(samples.rollouts.tokens), generator=torch.Generator().manual_seed(1))
    weighted = samples.weighted(weights)
    sequences = torch.arange(4, 12)
    chosen = TokenChoice(trained).apply(weighted, ADVANTAGES, sequences, 1).rollouts.token_statistics
    inside = torch.arange(12).repeat_interleave(samples.rollouts.lengths) >= 4
    a = (ADVANTAGES.repeat_interleave(samples.rollouts.lengths) * weights).double()[inside]
    logp = samples.rollouts.logprobs.double()[inside]
    expected = ((a - a.mean()) * (logp - logp.mean())).topk(int(0.15 * len(a))).indices
    assert not chosen[~inside].any()
    assert set(chosen[inside].nonzero()[:, 0].tolist()) == set(expected.tolist())


@pytest.mark.parametrize("share", [0.01, 0.2, 0.3, 0.5, 0.99])
def test_the_highest_are_a_share_of_all_rounded_up(share):
    for n in (1, 2, 5, 15, 41, 100):
        entropies = torch.rand(n, generator=torch.Generator().manual_seed(n)) + 0.01 * torch.arange(n)
        keep, threshold = highest(entropies, share)
        by_size = sorted(entropies.tolist(), reverse=True)
        count = -(-n * round(share * 100) // 100)
        assert sorted(entropies[keep].tolist(), reverse=True) == by_size[:count]
        assert threshold.item() == by_size[count - 1]
    keep, _ = highest(torch.tensor([0.5, 2.0, 2.0 - 1e-6, 0.5, 2.0 + 1e-6]), share)
    assert keep[[1, 2, 4]].all()  # equal but for rounding
    assert highest(torch.zeros(0), share)[0].shape == (0,)


@pytest.mark.parametrize("budget", [1, 25, 10_000])
@pytest.mark.parametrize(("loss", "aggregation"), [("ppo", "token_mean"), ("gspo", "seq_mean_token_mean")])
def test_only_tokens_of_high_entropy_have_a_policy_gradient(loss, aggregation, budget):
    """The others have the factor 0 and count in the average."""
    model = tiny_decoder()
    samples = off_policy(model)
    with torch.no_grad():
        logp = response_logits(model, one_batch(PROMPTS, samples.rollouts), torch.float32).double().log_softmax(-1)
    entropies = -(logp.exp() * logp).sum(-1)
    count = math.ceil(0.3 * len(entropies))
    kept = entropies >= entropies.topk(count).values[-1] - 1e-5
    trained = learner(model, LossSettings(loss=loss, aggregation=aggregation), budget=budget)
    choice = TokenChoice(trained, top_entropy=0.3)
    choice.begin(samples)
    updated = choice.apply(samples, ADVANTAGES, samples.sequences, 0)
    assert torch.equal(updated.rollouts.importance_weights, kept.float())
    assert choice.end() == pytest.approx({"entropy_threshold": entropies.topk(count).values[-1].item()}, rel=1e-5)
    metrics, actual = gradients(trained, updated)
    assert metrics.num_targets == int((kept & (ADVANTAGES.repeat_interleave(samples.rollouts.lengths) != 0)).sum())
    options = {"loss": loss, "aggregation": aggregation, "importance_weights": kept.float()}
    assert_close(actual, expected_gradients(model, samples.rollouts, **options))


def test_entropies_come_with_the_rows_where_the_loss_needs_those(monkeypatch):
    model = tiny_decoder()
    samples, rows = off_policy(model), learner(model, LossSettings("simko", "token_mean"))
    expected = TokenChoice(learner(model), top_entropy=0.2)
    expected.begin(samples)
    monkeypatch.setattr(Learner, "entropies", None)  # no second forward pass
    choice = TokenChoice(rows, top_entropy=0.2)
    choice.begin(samples)
    of_update = [one.apply(samples, ADVANTAGES, samples.sequences, 0).rollouts for one in (choice, expected)]
    assert torch.equal(of_update[0].importance_weights, of_update[1].importance_weights)


def test_entropies_are_those_of_the_sampling_policy_and_shares_of_each_update():
    model = tiny_decoder()
    samples, trained = off_policy(model), learner(model)
    choice = TokenChoice(trained, top_entropy=0.2)
    choice.begin(samples)
    before = [choice.apply(samples, ADVANTAGES, part, i).rollouts for i, part in enumerate(samples.minibatches(3))]
    trained.update(samples, ADVANTAGES, samples.sequences, when="step 1", lr=0.1)
    after = [choice.apply(samples, ADVANTAGES, part, i).rollouts for i, part in enumerate(samples.minibatches(3))]
    of_update = torch.arange(3).repeat_interleave(4).repeat_interleave(samples.rollouts.lengths)
    for i, (one, two) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(one.importance_weights, two.importance_weights)
        num_tokens = int((of_update == i).sum())
        assert not one.importance_weights[of_update != i].any()
        assert math.ceil(0.2 * num_tokens) <= one.importance_weights.sum() < num_tokens


JOBS = {
    "kl_cov": "--loss kl_cov --loss-options share=.1 --top-entropy .3",
    "clip_cov": "--loss clip_cov --loss-options share=.1 low=0 high=9 --clip-high .3",
}


def resumed_bitwise(flags, tmp_path, monkeypatch):
    """Return the metrics of a run on the chain, after checking that a stopped and resumed one is bitwise the same."""
    job = [*base()[2:], *CHAIN, "--objective", "grpo", "--steps", "4", "--save-every", "2", "--updates-per-step", "2"]
    job += ["--diagnose-every", "3"]
    job += flags
    for out in ("whole", "stopped"):
        with monkeypatch.context() as patch:
            if out == "stopped":
                stop_at(patch, "step 3")
            code = train.main([*job, "--out", str(tmp_path / out)])
            assert code == (0 if out == "whole" else 143)
    assert train.main(["--resume", str(tmp_path / "stopped")]) == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")
    return read(tmp_path / "whole" / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_stopped_run_resumes_bitwise(name, tmp_path, monkeypatch):
    steps = resumed_bitwise(JOBS[name].split(), tmp_path, monkeypatch)
    assert any(step["tokens_chosen"] >= 2 for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)
    assert all(("entropy_threshold" in step) == (name == "kl_cov") for step in steps)
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["top_entropy"] == (0.3 if name == "kl_cov" else 1.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--top-entropy 0", "top_entropy must be above 0 and at most 1, got 0.0"),
        ("--top-entropy 1.2", "top_entropy must be above 0 and at most 1, got 1.2"),
        ("--objective pacs --top-entropy .2", "pacs takes no top_entropy: its loss has no place for weights of tokens"),
        ("--loss kl_cov --loss-options share=2", "share of kl_cov must be a number above 0 and at most 1, got 2.0"),
        ("--loss clip_cov --loss-options coef=2", "loss_options of clip_cov must be among share, low, high, got 'coef'"),
        ("--loss kl_cov --clip-low .1", "loss kl_cov takes no clip_low"),
    ],
)
def test_wrong_options_are_refused(flags, message):
    with pytest.raises(InputError, match=message):
        check(parse(flags.split()))
