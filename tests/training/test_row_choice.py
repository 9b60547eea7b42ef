"""lp_reg and simko in the trainer: what it takes from the sampling policy's rows, the gradient of an update, and resuming."""

import json
import math

import pytest
import torch

from maxrl_fast.config.checks import check
from maxrl_fast.config.parse import parse
from maxrl_fast.errors import InputError
from maxrl_fast.training.learner import LossSettings
from maxrl_fast.training.token_choice import TokenChoice
from tests.batches import one_batch
from tests.models import response_logits, tiny_decoder
from tests.training.test_learner import PROMPTS, learner
from tests.training.test_token_choice import (
    ADVANTAGES,
    assert_close,
    expected_gradients,
    gradients,
    off_policy,
    resumed_bitwise,
)

LP_REG = LossSettings("lp_reg", "token_mean", loss_options={"share": 0.8, "min_p": 0.1, "low": 0.5, "high": 0.4})
SIMKO = LossSettings("simko", "token_mean", 0.5, 0.6, loss_options={"alpha": 0.3, "k": 2, "tau": 0.5, "penalty": 2.0})


def log_probs(model, rollouts, temperature=1.0):
    """Return the log-probs [T, V] of the model at the rollouts' tokens, in float64."""
    with torch.no_grad():
        return (response_logits(model, one_batch(PROMPTS, rollouts), torch.float32).double() / temperature).log_softmax(-1)


def by_hand(settings, model, samples, sequences=range(12)):
    """Return the token_statistics and top_tokens that the loss needs of the tokens of these sequences, 0 for others."""
    rollouts, options = samples.rollouts, settings.loss_options
    log_p = log_probs(model, rollouts, settings.temperature)
    bounds = rollouts.cu_seqlens.tolist()
    tokens = [t for s in sequences for t in range(bounds[s], bounds[s + 1])]
    a = ADVANTAGES.repeat_interleave(rollouts.lengths).tolist()
    statistics = torch.zeros(len(rollouts.tokens))
    if settings.loss == "lp_reg":
        negative = sorted((rollouts.logprobs[t].item(), t) for t in tokens if a[t] < 0)
        statistics[tokens] = -math.inf
        for _, t in negative[: int(options["share"] * len(negative))]:
            p = log_p[t].exp()
            kept = torch.where(p >= options["min_p"] * p.max(), p, 0.0)
            statistics[t] = (kept / kept.sum())[rollouts.tokens[t]].log()
        return {"token_statistics": statistics}
    entropies = -(log_p.exp() * log_p).sum(-1)
    for s in sequences:
        own = range(bounds[s], bounds[s + 1])
        threshold = torch.quantile(entropies[own], options["tau"])
        for t in own:
            is_top = int(log_p[t].argmax()) == int(rollouts.tokens[t])
            statistics[t] = bool(entropies[t] > threshold) and (a[t] > 0 or (a[t] < 0 and is_top))
    return {"token_statistics": statistics, "top_tokens": log_p.topk(options["k"]).indices}


@pytest.mark.parametrize("budget", [1, 25, 10_000])
@pytest.mark.parametrize("settings", [LP_REG, SIMKO], ids=lambda settings: settings.loss)
def test_an_update_is_that_of_the_whole_batch(settings, budget):
    model = tiny_decoder()
    samples = off_policy(model)
    statistics = by_hand(settings, model, samples)
    takes_part = statistics["token_statistics"] > (-math.inf if settings.loss == "lp_reg" else 0)
    by_token = ADVANTAGES.repeat_interleave(samples.rollouts.lengths)
    assert int((takes_part & (by_token < 0)).sum()) >= 2
    assert settings.loss == "lp_reg" or int((takes_part & (by_token > 0)).sum()) >= 4
    trained = learner(model, settings, budget=budget)
    choice = TokenChoice(trained)
    choice.begin(samples)
    updated = choice.apply(samples, ADVANTAGES, samples.sequences, 0)
    for name, expected in statistics.items():
        torch.testing.assert_close(getattr(updated.rollouts, name), expected, rtol=1e-4, atol=1e-5)
    _, actual = gradients(trained, updated)
    options = {"loss": settings.loss, "loss_options": settings.loss_options}
    options |= {"clip_low": settings.clip_low, "clip_high": settings.clip_high}
    assert_close(actual, expected_gradients(model, samples.rollouts, **statistics, **options))
    nobody = torch.full_like(statistics["token_statistics"], -math.inf if settings.loss == "lp_reg" else 0.0)
    plain = expected_gradients(model, samples.rollouts, **(statistics | {"token_statistics": nobody}), **options)
    assert max(float((actual[name] - plain[name]).abs().max()) for name in plain) > 1e-3
    assert choice.end() == {"tokens_chosen": int(takes_part.sum())}


@pytest.mark.parametrize("settings", [LP_REG, SIMKO], ids=lambda settings: settings.loss)
def test_each_update_chooses_among_its_own_samples_by_the_policy_at_the_beginning_of_the_step(settings):
    model = tiny_decoder()
    samples, trained = off_policy(model), learner(model, settings)
    choice = TokenChoice(trained)
    choice.begin(samples)
    expected = [by_hand(settings, model, samples, part.tolist()) for part in samples.minibatches(3)]
    trained.settings = LossSettings("ppo", "token_mean")
    trained.update(samples, ADVANTAGES, samples.sequences, when="step 1", lr=0.1)
    trained.settings = settings
    for i, (part, wanted) in enumerate(zip(samples.minibatches(3), expected, strict=True)):
        rollouts = choice.apply(samples, ADVANTAGES, part, i).rollouts
        for name, values in wanted.items():
            torch.testing.assert_close(getattr(rollouts, name), values, rtol=1e-4, atol=1e-5)


def test_temperature_and_weights_of_tokens():
    """The rows are at the loss's temperature; the sign that decides is that of advantage times weight."""
    settings = LossSettings("lp_reg", "token_mean", temperature=0.6, loss_options=LP_REG.loss_options)
    model = tiny_decoder()
    samples, trained = off_policy(model), learner(model, settings)
    weights = torch.ones(len(samples.rollouts.tokens))
    weights[::2] = 0
    choice = TokenChoice(trained)
    choice.begin(samples)
    plain = choice.apply(samples, ADVANTAGES, samples.sequences, 0).rollouts.token_statistics
    torch.testing.assert_close(plain, by_hand(settings, model, samples)["token_statistics"], rtol=1e-4, atol=1e-5)
    weighted = choice.apply(samples.weighted(weights), ADVANTAGES, samples.sequences, 0).rollouts.token_statistics
    assert (weighted[::2] == -math.inf).all()
    assert (weighted[1::2] > -math.inf).any()


JOBS = {
    "lp_reg": "--loss lp_reg --loss-options share=.3 min_p=.2",
    "simko": "--loss simko --loss-options alpha=.2 k=2 tau=.4 --clip-high .3 --top-entropy .6",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_stopped_run_resumes_bitwise(name, tmp_path, monkeypatch):
    steps = resumed_bitwise(JOBS[name].split(), tmp_path, monkeypatch)
    assert sum(step["tokens_chosen"] for step in steps) >= 2
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["loss"] == name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--loss lp_reg --loss-options share=0", "share of lp_reg must be a number above 0 and at most 1, got 0.0"),
        ("--loss lp_reg --loss-options min_p=2", "min_p of lp_reg must be a number above 0 and at most 1, got 2.0"),
        ("--loss lp_reg --clip-low .1", "loss lp_reg takes no clip_low"),
        ("--loss simko --loss-options k=9", "k of simko must be an integer from 1 to 8, got 9.0"),
        ("--loss simko --loss-options k=2.5", "k of simko must be an integer from 1 to 8, got 2.5"),
        ("--loss simko --loss-options alpha=1.1", "alpha of simko must be a number from 0 to 1, got 1.1"),
        ("--objective pacs --loss simko", "loss must be reinforce for pacs"),
    ],
)
def test_wrong_options_are_refused(flags, message):
    with pytest.raises(InputError, match=message):
        check(parse(flags.split()))
