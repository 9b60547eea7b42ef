import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from maxrl_fast.job.loop import STEPS, Health, RunLoop, conditions, verdict
from maxrl_fast.records import Rollouts
from maxrl_fast.tasks.text_codec import prompts_of

HEALTHY = {"reward_mean": 0.3, "pass_at_1": 0.3, "frac_groups_zero_variance": 0.4}
HEALTHY |= {"truncated": 0.1, "entropy": 1.0, "logprob_diff": 1e-3, "grad_norm": 0.5}
EQUAL = {"frac_groups_zero_variance": 1.0}
UNHEALTHY = {  # metrics, the value of the warning, and its words
    "truncated": ({"truncated": 0.75}, 0.75, "75% of the responses of 10 steps were"),
    "zero_variance_groups": (
        {"frac_groups_zero_variance": 0.95, "reward_mean": 0.0},
        *(0.95, "95% of the groups of 10 steps had equal rewards, of mean 0, and zero advantage"),
    ),
    "entropy": ({"entropy": 0.05}, 0.05, "fell to 0.05 nats per token from 1"),
    "logprob_diff": ({"logprob_diff": 0.04}, 0.04, "by 0.04 nats per token, 0.001 at first"),
}


def observed(health, records):
    return [(i, warning) for i, record in enumerate(records) for warning in health.observe(record)]


def test_gradients_far_above_their_clip_are_reported():
    records = [HEALTHY | {"grad_norm": 7.8 + i % 3} for i in range(STEPS)]
    [(step, warning)] = observed(Health(clip_grad=0.1), records)
    assert (step, warning["kind"], warning["value"]) == (9, "grad_clipped", pytest.approx(78))
    assert "at least 78 times --clip-grad 0.1" in warning["message"]
    assert observed(Health(clip_grad=0.5), records) == []


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ((0.4, 0.3, 0.175), "pass@1 fell by 0.225: the best step is 0; lower --lr"),
        ((0.4, 0.7, 0.35), ""),  # noise
    ],
)
def test_a_run_that_ends_below_its_start_gets_a_verdict(rates, words):
    records = [{"pass_at_k": {"1": x, "4": 0.9}, "num_prompts": 256} for x in rates]
    assert verdict(dict(enumerate(records))) == words


def test_rewards_that_are_equal_from_the_start_warn_after_three_steps():
    equal = HEALTHY | EQUAL
    [(step, warning)] = observed(Health(), [equal] * 5)
    assert observed(Health(needs_no_rewards=True), [equal] * 12) == []
    assert (step, warning["kind"], warning["value"]) == (2, "zero_variance_groups", 1)
    assert "100% of the groups of 3 steps had equal rewards, of mean 0.3" in warning["message"]
    assert observed(Health(), [equal, equal, HEALTHY, equal, equal]) == []


def test_a_healthy_run_gets_no_warning():
    records = [HEALTHY | {"grad_norm": 0.1 + 0.09 * (i % 10)} for i in range(60)]
    assert observed(Health(), records) == []


@pytest.mark.parametrize("kind", UNHEALTHY)
def test_a_lasting_condition_is_reported_once_with_its_number(kind):
    changes, value, words = UNHEALTHY[kind]
    found = conditions([HEALTHY] * STEPS, [HEALTHY | changes] * STEPS, math.inf)
    [(_, _, number, said)] = (x for x in found if x[1])
    assert number == pytest.approx(value)
    assert words in said
    health = Health()
    [(step, warned)] = observed(health, [HEALTHY] * STEPS + [HEALTHY | changes] * 3 * STEPS)
    assert (warned["kind"], step > STEPS) == (kind, True)
    observed(health, [HEALTHY] * 2 * STEPS)
    again = observed(health, [HEALTHY | changes] * STEPS * 2)
    assert again[-1][1]["kind"] == kind  # reported again after ten steps without it


def by_form(rewards, texts=("1", "2"), truncated=False):
    """Return the warnings of twelve steps with 50 rollouts of each of five prompts."""
    task = SimpleNamespace(decode=lambda tokens, _: texts[tokens[0]], answer=str.strip)
    loop = SimpleNamespace(context=SimpleNamespace(task=task), failed=Counter(), by_form=set())
    rollouts = Rollouts.given([[i % 2] for i in range(250)])
    rollouts = replace(rollouts, truncated=torch.full((250,), truncated))
    batch = SimpleNamespace(prompts=prompts_of([[0]] * 5, range(7, 12), [{}] * 5))
    batch.raw_rollouts, batch.sequences, warned = rollouts, torch.arange(250), []
    for step in range(12):
        batch.all_rewards = torch.tensor(rewards(step))[:, None].repeat(1, 50)
        warned += [(step, warning["message"]) for warning in RunLoop._by_form(loop, batch)]
    return warned


def test_prompts_that_fail_by_form_are_named_once_and_hard_ones_are_not():
    def hard(step):  # the fourth is solved in time, one reward of the fifth fails
        return [0.0, 0.0, 0.0, float(step % 4 == 3), float("nan")]

    for own in ({"texts": ("", " ")}, {"truncated": True}):
        (step, said), *_ = by_form(hard, **own)
        assert (step, said[:40]) == (3, "prompts [7, 8, 9] fail by form: no succe")
        assert not by_form(lambda _: [0.0, 0.0, 1.0, 1.0, 1.0], **own)  # two are not yet a pattern
    assert not by_form(hard)
    assert not by_form(hard, texts=("1", ""))  # half of the responses have an answer
