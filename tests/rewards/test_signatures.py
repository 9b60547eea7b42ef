"""How reward functions are called: with one response, with lists as in TRL, and async."""

import math
from decimal import Decimal

import numpy
import pytest
import sympy

from maxrl_fast.rewards.function import CUT, mismatch, result_of, signature_of
from tests.rewards import pools
from tests.tables import table

FUNCTIONS = """
import asyncio, time
import os

def trl(completions, prompts, answer, **columns):
    assert columns == {"level": [1] * len(prompts)}, columns
    return [float(a in c) + len(completions) for c, a in zip(completions, answer)]

def chat(completions, **columns):
    return [len(c[0]["content"]) if c[0]["role"] == "assistant" else None for c in completions]

def texts(prompts, responses, **columns):
    if prompts[0] == "dict":
        return {"wrong": 1}
    return [float(r) for r in responses][: 1 if prompts[0] == "short" else None]

async def single(prompt, response, **columns):
    if response == "late":
        await asyncio.sleep(1000)
    if response == "bad":
        raise ValueError("no good")
    if response == "exit":
        os._exit(3)
    return {"reward": float(response), "pid": os.getpid()}

running, most = 0, 0

async def meeting(prompt, response, **columns):
    "Wait until `response` calls run at the same time; return how many did."
    global running, most
    running += 1
    most = max(most, running)
    while most < int(response):
        await asyncio.sleep(0.001)
    running -= 1
    return most

async def gathered(completions, **columns):
    return await asyncio.gather(*(asyncio.sleep(0, len(c)) for c in completions))

def cut(completions, prompts, truncated):
    return [float(x) for x in truncated]

def uncut(prompt, response, truncated):
    assert isinstance(truncated, (bool, int))
    return 1.0 - truncated

class Judge:
    async def __call__(self, prompt, response):
        return 1.0

judge = Judge()

def client(prompt, response):
    return 1.0
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def pool(file, name, workers=1, **options):
    return pools.pool(name, workers, file=file, **options)


def rows(*responses, prompt="p", **columns):
    return [{"prompt": prompt, "response": response, **columns} for response in responses]


def test_a_function_of_trl_gets_each_group_as_lists(file):
    with pool(file, "trl", workers=2) as two:
        scores = two.score(rows("a", "b", "ab", "c", answer="b", level=1), group=2)
        assert scores.rewards == [2.0, 3.0, 3.0, 2.0]
        two.check(rows("", answer="b", level=1)[0])
        assert "called with all responses to a prompt at once" in two.lines()[1]
    with pool(file, "chat") as one:  # as in TRL, completions of chat prompts are messages
        asked = rows("a", "abc", prompt=[{"role": "user", "content": "x"}])
        assert one.score(asked, group=2).rewards == [1.0, 3.0]
    with pool(file, "gathered") as one:
        assert one.score(rows("a", "abc"), group=2).rewards == [1.0, 3.0]


def test_functions_that_ask_for_it_learn_which_responses_were_truncated(file):
    asked = [row | {CUT: i == 1} for i, row in enumerate(rows("a", "b", "c", "d"))]
    for name, rewards in (("cut", [0, 1, 0, 0]), ("uncut", [1, 0, 1, 1]), ("client", [1] * 4)):
        with pool(file, name) as one:
            one.check(rows("")[0])
            assert one.score(asked, group=2).rewards == rewards
    with pool(file, "cut") as one:  # a column of the data has this name
        assert one.score([row | {"truncated": 3} for row in asked]).rewards == [3.0] * 4


def test_a_list_must_have_a_reward_for_each_response(file):
    with pool(file, "texts") as one:
        asked = [*rows("1", "2", prompt="short"), *rows("3", "4"), *rows("1", "2", prompt="dict")]
        scores = one.score(asked, group=2)
        assert scores.rewards == [0.0, 0.0, 3.0, 4.0, 0.0, 0.0]
        assert [failure.kind for failure in scores.failures] == ["invalid"] * 4
        message = "must return a list with a number for each of the 2 completions, got a list of 1"
        assert message in scores.failures[0].message
        # one element that is no number fails alone
        failed = one.score(rows("1", "nan", "3"), group=3)
        assert failed.rewards == [1.0, 0.0, 3.0]
        assert [failure.index for failure in failed.failures] == [1]


def test_async_calls_run_together_up_to_the_limit(file):
    """Every call waits for eight at the same time, which a limit of eight allows, and never sees
    more.
    """
    with pool(file, "meeting", concurrency=8) as one:
        assert one.score(rows(*["8"] * 32)).rewards == [8.0] * 32
        assert "async, called with each response, at most 8 at a time" in one.lines()[1]
    with pool(file, "judge") as one:
        assert one.score(rows("x")).rewards == [1.0]


def test_async_calls_fail_alone(file):
    with pool(file, "single", time_limit=0.5, concurrency=4) as one:
        scores = one.score(rows("1", "late", "bad", "2", "3"))
        assert scores.rewards == [1.0, 0.0, 0.0, 2.0, 3.0]
        failed = [(failure.index, failure.kind) for failure in scores.failures]
        assert failed == [(1, "timeout"), (2, "exception")]
        assert "ValueError: no good (functions.py, line" in scores.failures[1].message
        assert scores.components[0]["pid"] == scores.components[4]["pid"]
        crashed = one.score(rows("exit", "1", "2", "3", "4"))
        # those of the process
        assert [failure.kind for failure in crashed.failures] == ["crash"] * 4
        assert crashed.rewards[4] == 4.0


def of(parameters):
    scope: dict = {}
    exec(f"def f({parameters}): pass", scope)
    return signature_of(scope["f"])


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        *(("prompt, response, answer", ""), ("response, **columns", "")),
        ("completions, prompts, answer", ""),
        *table("""
        prompt, completion, **c | asks for `completion`: rename it to `response`
        question, response | asks for `question`: rename it to `prompt`
        data_source, solution_str, ground_truth, extra_info=None | has verl's arguments
        response, answers, **c | `answers`: rename it to `answer`, or ask for `completions` and
        response, anwser, **c | did you mean `answer`? the arguments are prompt, response, answer
        prompt, response | does not take `answer`: add **columns to its parameters
        """),
    ],
)
def test_parameters_that_do_not_fit_are_named_with_the_nearest_fix(parameters, sentence):
    signature = of(parameters)
    found = mismatch(signature, {"prompt": "p", "response": "r", "answer": "a"})
    assert found.startswith("your function") == bool(sentence)
    assert sentence in found


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (True, {"reward": 1.0}),
        (Decimal("0.5"), {"reward": 0.5}),
        (sympy.Rational(3, 4), {"reward": 0.75}),
        (numpy.bool_(True), {"reward": 1.0}),
        (numpy.array([0.25]), {"reward": 0.25}),
        # as verl's functions return it: other values are not kept
        ({"score": 1.0, "acc": True, "pred": "7"}, {"reward": 1.0, "components": {"acc": 1.0}}),
        ({"reward": 1, "score": 2}, {"reward": 1.0, "components": {"score": 2.0}}),
    ],
)
def test_numbers_and_dicts_of_verl_are_rewards(value, result):
    assert result_of(value) == result
    assert type(result_of(value)["reward"]) is float


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "must be a finite number of float32, got nan"),
        (1e39, "must be a finite number of float32, got 1e+39"),
        (10**400, "got an integer that is too large"),
        (None, "must be a number, got None of type NoneType"),
        ({"score": None, "acc": True}, "must have a reward"),
        (numpy.array([0.25, 0.5]), "of type ndarray"),
        ({"a": "1", "b": 2}, "must be a number"),
    ],
)
def test_other_results_are_invalid(value, message):
    found = result_of(value)
    assert found["kind"] == "invalid"
    assert message in found["message"]
