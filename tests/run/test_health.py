"""Warnings of training that goes wrong: each sign comes once, with its number, and none in a healthy run."""

import pytest

from maxrl_fast.run.health import SIGNS, STEPS, Health

HEALTHY = {
    "reward_mean": 0.3,
    "pass_at_1": 0.3,
    "frac_groups_dead": 0.4,
    "truncated": 0.1,
    "entropy": 1.0,
    "logprob_diff": 1e-3,
    "grad_norm": 0.5,
}
ILL = {
    "no_reward": (
        {"reward_mean": 0.0, "pass_at_1": 0.0, "frac_groups_dead": 1.0},
        0.0,
        "every reward of the last 10 steps was 0",
    ),
    "all_solved": ({"reward_mean": 1.0, "pass_at_1": 1.0, "frac_groups_dead": 1.0}, 1.0, "every rollout of the last 10 steps"),
    "truncated": ({"truncated": 0.75}, 0.75, "75% of the responses of the last 10 steps were cut at --max-new-tokens"),
    "dead_groups": ({"frac_groups_dead": 0.95}, 0.95, "95% of the prompts of the last 10 steps"),
    "entropy": ({"entropy": 0.05}, 0.05, "the entropy fell to 0.05 nats a token from 1 in the first steps"),
    "logprob_diff": ({"logprob_diff": 0.04}, 0.04, "differ by 0.04 nats a token, 0.001 in the first steps"),
}


def observed(health, records):
    return [(i, sign) for i, record in enumerate(records) for sign in health.observe(record)]


def test_a_healthy_run_gets_no_warning():
    assert observed(Health(), [HEALTHY | {"grad_norm": 0.1 + 0.09 * (i % 10)} for i in range(60)]) == []


@pytest.mark.parametrize("kind", ILL)
def test_a_sign_that_lasts_is_told_once_with_its_number(kind):
    changes, _, _ = ILL[kind]
    health = Health()
    told = observed(health, [HEALTHY] * STEPS + [HEALTHY | changes] * 3 * STEPS)
    # Before all groups of ten steps are dead, most of them are.
    assert [sign.kind for _, sign in told] == (["dead_groups"] if changes.get("frac_groups_dead") == 1 else []) + [kind]
    assert told[0][0] > STEPS
    observed(health, [HEALTHY] * 2 * STEPS)
    again = observed(health, [HEALTHY | changes] * STEPS * 2)
    assert again[-1][1].kind == kind  # it had gone, and is back


@pytest.mark.parametrize("kind", ILL)
def test_the_number_and_the_words(kind):
    changes, value, words = ILL[kind]
    sick = [HEALTHY | changes] * STEPS
    found = SIGNS[kind]([HEALTHY] * STEPS, sick)
    assert found is not None
    assert found[0] == pytest.approx(value)
    assert words in found[1]
    assert SIGNS[kind]([HEALTHY] * STEPS, [HEALTHY] * STEPS) is None
    assert all(rule([HEALTHY] * STEPS, sick) is None for name, rule in SIGNS.items() if name != kind)


def test_a_spike_of_the_gradient_is_told_against_the_steps_before():
    told = observed(Health(), [HEALTHY] * 15 + [HEALTHY | {"grad_norm": 6.0}] + [HEALTHY] * 5)
    assert [(i, sign.kind, sign.value) for i, sign in told] == [(15, "grad_norm", 6.0)]
    assert "is 6, 12 times the median of the 15 steps before" in told[0][1].message
    assert observed(Health(), [HEALTHY | {"grad_norm": 0.0}] * 15 + [HEALTHY]) == []  # nothing was learned before


@pytest.mark.parametrize("reward", [0.5, -1.0])
def test_groups_of_equal_rewards_of_any_height_are_dead(reward):
    sick = HEALTHY | {"reward_mean": reward, "pass_at_1": 0.0, "frac_groups_dead": 1.0}
    assert [sign.kind for _, sign in observed(Health(), [sick] * STEPS)] == ["dead_groups"]


def test_high_rewards_that_differ_are_no_sign():
    assert observed(Health(), [HEALTHY | {"reward_mean": 37.0, "pass_at_1": 1.0}] * 3 * STEPS) == []


def test_a_sign_that_comes_and_goes_is_not_told_each_time():
    told = observed(Health(), [HEALTHY | {"truncated": 0.3 if i % 12 < 6 else 0.72} for i in range(200)])
    assert [sign.kind for _, sign in told] == ["truncated"]


def test_nothing_is_said_of_the_first_steps():
    assert observed(Health(), [HEALTHY | {"truncated": 1.0}] * (STEPS - 1)) == []
