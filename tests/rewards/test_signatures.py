import math
from decimal import Decimal

import numpy
import pytest
import sympy

from maxrl_fast.rewards import InvalidReward, outcome_of
from maxrl_fast.rewards.user_code import signature_of, taken
from tests.rewards import pools
from tests.rewards.pools import rewards
from tests.tables import table

FUNCTIONS = """
import asyncio, time
import os

def trl(completions, prompts, answer, **columns):
    assert columns["level"] == [1] * len(prompts), columns
    return [float(a in c) + len(completions) for c, a in zip(completions, answer)]

def chat(completions, **columns):
    return [len(c[0]["content"]) if c[0]["role"] == "assistant" else None for c in completions]

def texts(prompts, completions, **columns):
    if prompts[0] == "dict":
        return {"wrong": 1}
    return [float(r) for r in completions][: 1 if prompts[0] == "short" else None]

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
        asked = rows("a", "b", "ab", "c", answer="b", level=1)
        assert rewards(two.score(asked, 2)) == [2.0, 3.0, 3.0, 2.0]
        assert "called with all responses to a prompt at once" in two.lines()[0]
    with pool(file, "chat") as one:  # as in TRL, completions of chat prompts are messages
        asked = rows("a", "abc", prompt=[{"role": "user", "content": "x"}])
        assert rewards(one.score(asked, 2)) == [1.0, 3.0]
    with pool(file, "gathered") as one:
        assert rewards(one.score(rows("a", "abc"), 2)) == [1.0, 3.0]


@pytest.mark.parametrize("name", ["cut", "uncut", "client"])
def test_a_function_gets_the_columns_that_it_names(file, name):
    asked = [row | {"truncated": i == 1, "other": 7} for i, row in enumerate(rows(*"abcd"))]
    wanted = {"cut": [0, 1, 0, 0], "uncut": [1, 0, 1, 1], "client": [1] * 4}
    with pool(file, name) as one:
        assert rewards(one.score(asked, 2)) == wanted[name]


def test_a_list_must_have_a_reward_for_each_response(file):
    with pool(file, "texts") as one:
        asked = [*rows("1", "2", prompt="short"), *rows("3", "4"), *rows("1", "2", prompt="dict")]
        outcomes = one.score(asked, 2)
        assert rewards(outcomes) == [None, None, 3.0, 4.0, None, None]
        assert outcomes[0].kind == "invalid"
        message = "must return a list with a number for each of the 2 completions, got [1.0]"
        assert message in outcomes[0].message
        # one element that is no number fails alone
        assert rewards(one.score(rows("1", "nan", "3"), 3)) == [1.0, None, 3.0]


def test_async_calls_run_together_up_to_the_limit(file):
    with pool(file, "meeting", concurrency=8) as one:
        assert rewards(one.score(rows(*["8"] * 32))) == [8.0] * 32
        assert "async, called with each response, at most 8 at a time" in one.lines()[0]
    with pool(file, "judge") as one:
        assert rewards(one.score(rows("x"))) == [1.0]


def test_async_calls_fail_alone(file):
    with pool(file, "single", time_limit=0.5, concurrency=4) as one:
        outcomes = one.score(rows("1", "late", "bad", "2", "3"))
        assert rewards(outcomes) == [1.0, None, None, 2.0, 3.0]
        assert [outcome.kind for outcome in outcomes[1:3]] == ["timeout", "exception"]
        assert "ValueError: no good (functions.py, line" in outcomes[2].message
        assert outcomes[0].components["pid"] == outcomes[4].components["pid"]
        crashed = one.score(rows("exit", "1", "2", "3", "4"))
        # those of the process
        assert [outcome.kind for outcome in crashed] == ["crash"] * 4 + [""]


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
        prompt, completion, **c | your code asks for `completion`: the arguments are prompt,
        completions, answers | your code asks for `answers`: the arguments are prompts,
        """),
    ],
)
def test_parameters_that_do_not_fit_are_named_with_the_nearest_fix(parameters, sentence):
    names = "prompts completions" if "completions" in parameters else "prompt response"
    columns = dict.fromkeys(f"{names} answer".split(), "")
    if not sentence:
        assert taken(of(parameters), columns)
        return
    with pytest.raises(InvalidReward, match=sentence):
        taken(of(parameters), columns)


@pytest.mark.parametrize(
    ("value", "reward", "components"),
    [
        (True, 1.0, {}),
        (Decimal("0.5"), 0.5, {}),
        (sympy.Rational(3, 4), 0.75, {}),
        (numpy.bool_(True), 1.0, {}),
        (numpy.array([0.25]), 0.25, {}),
        # as verl's functions return it: other values are not kept
        ({"score": 1.0, "acc": True, "pred": "7"}, 1.0, {"acc": 1.0}),
        ({"reward": 1, "score": 2}, 1.0, {"score": 2.0}),
        ({"a": 1, "b": 2, "c": None}, 3.0, {"a": 1.0, "b": 2.0}),
        ({"score": None, "acc": True}, None, {"acc": 1.0}),
        ({"a": 0.5, "feedback": "no"}, 0.5, {"a": 0.5}),
        (math.nan, None, {}),
    ],
)
def test_numbers_and_dicts_of_verl_are_rewards(value, reward, components):
    outcome = outcome_of(value)
    assert (outcome.reward, outcome.components, outcome.kind) == (reward, components, "")
    assert outcome.text == (value.get("feedback") if isinstance(value, dict) else None)
    assert type(outcome.reward) in (float, type(None))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1e39, "a reward must be a finite number of float32, got 1e+39 of type float"),
        (10**400, "must be a finite number of float32, got 1000000000"),
        ("1", "must be a finite number of float32, got '1' of type str"),
        (numpy.array([0.25, 0.5]), "of type ndarray"),
        ({"a": "1", "b": 2}, "component 'a' must be a finite number of float32, got '1'"),
    ],
)
def test_other_results_are_invalid(value, message):
    outcome = outcome_of(value)
    assert (outcome.reward, outcome.kind) == (None, "invalid")
    assert message in outcome.message
