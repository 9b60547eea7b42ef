import asyncio
import inspect
import threading

import pytest

from maxrl_fast.rewards.pool import UserCode
from tests.rewards.pools import pool, rewards
from tests.tables import refused

ROWS = [{"prompt": f"p{i // 2}", "response": "x" * i, "answer": (i, i)} for i in range(6)]


def source(function, **options):
    return UserCode(function, "python:f", **options)


def length(prompt, response, **columns):
    return {"length": len(response), "answer": columns["answer"][1]}


def of_lists(completions, prompts, **columns):
    return [len(prompts) + len(completion) for completion in completions]


async def of_one(prompt, response):
    return len(response)


@pytest.mark.parametrize("name", ["length", "of_lists", "of_one"])
def test_the_rewards_are_those_of_worker_processes(name, tmp_path):
    (own := tmp_path / "own.py").write_text(inspect.getsource(globals()[name]))
    with pool(name, file=own) as workers:
        wanted = workers.score(ROWS, 2)
    assert source(globals()[name]).score(ROWS, 2) == wanted


def test_a_function_runs_in_the_main_thread_with_copies_of_its_arguments():
    def spoil(prompt, response, answer):
        answer.append(prompt)
        assert threading.current_thread() is threading.main_thread()
        return len(answer)

    rows = [{"prompt": "p", "response": "r", "answer": [1, 2]}] * 2
    assert rewards(source(spoil).score(rows)) == [3.0, 3.0]
    assert rows[0]["answer"] == [1, 2]


def test_an_async_function_can_be_called_in_a_notebook():
    loops = set()

    async def score(prompt, response, **columns):
        await asyncio.sleep(0)
        loops.add(asyncio.get_running_loop())
        return len(response)

    async def cell():
        return rewards(source(score).score(ROWS))

    assert asyncio.run(cell()) == rewards(source(score).score(ROWS)) == [*map(float, range(6))]
    assert len(loops) == 1


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (None, "invalid"),
        (SystemExit(3), "exception"),
        (MemoryError(), "memory"),
        (asyncio.CancelledError(), "exception"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_no_reward_fails_alone(result, kind, is_async):
    def score(prompt, response, **columns):
        if response != "xx":
            return 1.0
        if isinstance(result, BaseException):
            raise result
        return result

    async def later(prompt, response, **columns):
        return score(prompt, response)

    outcomes = source(later if is_async else score).score(ROWS)
    assert rewards(outcomes) == [1.0, 1.0, None, 1.0, 1.0, 1.0]
    assert outcomes[2].kind == kind


@pytest.mark.parametrize("is_async", [False, True])
def test_an_interrupt_is_no_failure_of_the_function(is_async):
    def interrupted(prompt, response, **columns):
        raise KeyboardInterrupt

    async def later(prompt, response):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source(later if is_async else interrupted).score(ROWS)


def test_columns_that_are_no_json_are_refused():
    with refused("the columns of prompts must be JSON values, for rewards: Object of type set"):
        source(length).score([{**ROWS[0], "answer": {1}}])
