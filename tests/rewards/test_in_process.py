"""Reward functions in a thread of this process: called as in worker processes, with time limits,
and nothing contained.
"""

import asyncio
import json
import math
import threading
import time

import pytest

from maxrl_fast.errors import RewardError
from maxrl_fast.rewards.pool import MAX_HUNG, InProcessReward, RewardPool
from tests.tables import refused

ROWS = [{"prompt": f"p{i // 2}", "response": "x" * i, "answer": (i, i)} for i in range(6)]


def source(function, seconds=20.0, **options):
    return InProcessReward(function, "python:f", seconds, **options)


def length(prompt, response, **columns):
    return {"length": len(response), "answer": columns["answer"][1]}


def of_lists(completions, prompts, **columns):
    return [len(prompts) + len(completion) for completion in completions]


async def of_one(prompt, response, **columns):
    return len(response)


@pytest.mark.parametrize("name", ["length", "of_lists", "of_one"])
def test_the_rewards_are_those_of_worker_processes(name):
    function = globals()[name]
    with RewardPool(f"{__name__}:{name}", workers=1, time_limit=20, memory_limit=10**9) as pool:
        wanted = pool.score(ROWS, group=2)
    ours = source(function)
    scores = ours.score(ROWS, group=2)
    assert (scores.rewards, scores.failures, scores.num_left) == (
        wanted.rewards,
        wanted.failures,
        wanted.num_left,
    )
    assert scores.components == wanted.components
    assert json.dumps(scores.rewards) == json.dumps([float(x) for x in scores.rewards])
    ours.close()


def test_a_call_cannot_change_the_rows():
    def spoil(prompt, response, answer):
        answer.append(prompt)
        return len(answer)

    rows = [{"prompt": "p", "response": "r", "answer": [1, 2]}] * 2
    assert source(spoil).score(rows).rewards == [3.0, 3.0]
    assert rows[0]["answer"] == [1, 2]


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (None, "invalid"),
        (math.nan, "invalid"),
        ("1", "invalid"),
        (SystemExit(3), "exception"),
        (MemoryError(), "memory"),
    ],
)
def test_what_is_no_reward_fails_alone(result, kind):
    def score(prompt, response, **columns):
        if response != "xx":
            return 1.0
        if isinstance(result, BaseException):
            raise result
        return result

    scores = source(score).score(ROWS)
    assert [(failure.index, failure.kind) for failure in scores.failures] == [(2, kind)]
    assert scores.rewards == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]


def test_a_cancelled_async_call_fails_alone():
    async def score(prompt, response, **columns):
        if response == "xx":
            raise asyncio.CancelledError
        return 1.0

    scores = source(score).score(ROWS)
    assert [(failure.index, failure.kind) for failure in scores.failures] == [(2, "exception")]
    assert scores.rewards == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]


def test_not_applying_is_allowed_among_several():
    rewards = source(lambda **row: None, is_optional=True).score(ROWS[:2]).rewards
    assert all(map(math.isnan, rewards))


def test_a_call_that_is_too_long_fails_and_the_next_one_is_made():
    release, beats, others = threading.Event(), [], set(threading.enumerate())

    def score(prompt, response, **columns):
        if response == "x":
            release.wait()
        return len(response)

    ours = source(score, 2.0)
    scores = ours.score(ROWS, on_progress=lambda: beats.append(1))
    assert [(failure.index, failure.kind, failure.message) for failure in scores.failures] == [
        (1, "timeout", "the call ran longer than 2 s")
    ]
    assert scores.rewards == [0.0, 0.0, 2.0, 3.0, 4.0, 5.0]
    assert len(beats) >= len(ROWS)
    release.set()
    ours.close()
    deadline = time.monotonic() + 20
    while set(threading.enumerate()) - others:
        assert time.monotonic() < deadline, "a thread whose call has ended must end"
        time.sleep(0.01)


def test_no_thread_is_started_once_too_many_hang():
    release = threading.Event()
    with pytest.raises(
        RewardError,
        match=rf"{MAX_HUNG} calls of the reward function python:f have not ended after 0.1 s",
    ):
        source(lambda **row: release.wait(), 0.1).score(ROWS)
    release.set()


def test_enough_failures_end_a_batch():
    scores = source(lambda **row: 1 / 0).score(ROWS, max_failures=1)
    assert (len(scores.failures), scores.num_left) == (2, 4)
    assert (
        "ZeroDivisionError: division by zero (test_in_process.py, line"
        in scores.failures[0].message
    )


def test_its_lines_say_that_nothing_contains_it():
    (line,) = source(of_lists).lines()
    assert line.startswith(
        "reward python:f: called with all responses to a prompt at once, in a thread of this "
        "process"
    )
    assert "a call of more than 20 s counts as failed but runs on" in line


def test_parameters_that_do_not_fit_are_refused():
    with refused("the reward python:f: your function does not take `answer`"):
        source(lambda prompt, response: 1.0).check(ROWS[0])
