import json

import pytest

from maxrl_fast.rewards import verifiers
from maxrl_fast.tasks.dataset import DatasetTask
from maxrl_fast.tasks.dataset_specs import DATASETS
from tests.rewards.pools import pool
from tests.tables import refused
from tests.tasks.test_dataset import save_byte_level_policy, written

ADD = "a, b = map(int, input().split())\nprint(float(a + b))"
METHOD = (
    "class Solution:\n    def f(self, x: List[int]):\n        print(1)\n        return (a + b,)"
)
STDIN = {"inputs": ["1 2\n", ["3 4"]], "outputs": ["3", ["7\n"]]}
CALLS = {"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [[3], 7]}
PAIR = {"input": "1 2", "output": "3.00", "testtype": "stdin"}
CALL = {"input": "[1, 2]", "output": "[3]", "testtype": "functional"}


def scored(tests, *programs, seconds=30.0):
    row = {"x": json.dumps(tests), "metadata": '{"func_name": "f"}'}
    line = {"prompt": "Add.", "answer": DATASETS["code"].gold(row, "x"), **row}
    rows = [{**line, "response": f"So:\n```python\n{x}\n```\nDone."} for x in programs]
    with pool("code", 2, seconds, file="maxrl_fast.rewards.verifiers") as two:
        outcomes = two.score(rows)
    return [x.reward for x in outcomes], sum(bool(x.kind) for x in outcomes)


@pytest.mark.parametrize(
    ("tests", "right", "is_one"),
    [
        (STDIN, ADD, 0),
        (CALLS, "def f(a, b):\n    return a + b", 0),
        ([PAIR], ADD, 1),
        ([CALL], METHOD.replace("a + b", "sum(x)"), 1),
    ],
)
def test_a_program_passes_all_tests_or_has_no_reward(tests, right, is_one):
    first, wrong = (right.replace("sum(x)", x).replace("a + b", x) for x in "34")
    rewards, _ = scored(tests, right, first, wrong, "", "1 +", "raise SystemExit(1)", "\0")
    assert rewards == [1, is_one, 0, 0, 0, 0, 0]


def test_programs_end_at_their_limits():
    late = "while True: pass", "import subprocess; subprocess.run(['sleep', '60'])"
    assert scored(STDIN, *late, seconds=1.0) == ([0, 0], 2)
    assert scored(STDIN, "b = bytes(1 << 31)", "print('3' * (1 << 25))", ADD) == ([0, 0, 1], 0)
    kill = "import os; os.kill(os.getppid(), 9)"
    assert scored(STDIN, kill, "print('sNaN')", ADD) == ([0, 0, 1], 1)


PROGRAM = 'x = int(input())\nif x:\n    print("```", x)'
BLOCK = f"```python\n{PROGRAM}\n```"


@pytest.mark.parametrize(
    "response",
    [
        BLOCK.replace("\n", "\n   ").replace("```python", "1. ```python"),
        BLOCK.replace("```python", "~~~").replace("\n```", "\n~~~"),
        f"```python\n1 +\n````md\n{BLOCK}\n````",
        f"{BLOCK}\n```\n7\n```\n```sh\npython x.py\n```",
        BLOCK[:-4] + "```",
    ],
)
def test_the_program_is_found(response):
    assert verifiers.program_of(response) == PROGRAM


USUAL = "@__import__('dataclasses').dataclass\nclass A:\n    x: 'int'\n"
VALUES = [  # of a function, expected, the reward
    (0.3, "sum([0.1] * 3)", 1),
    (0.333333, "1 / 3", 1),
    (10**12, "1e12 + 1", 0),
    (float("inf"), "5.0", 0),
    ([1, 2], "1", 0),
    ([1, 2], "__import__('numpy').array([1, 2])", 1),
    (7, "reduce(gcd, [14, 21])", 1),
    ("7" * 5000, "7 * (10**5000 // 9)", 1),
    (1, "'\\ud800'", 0),
]


@pytest.mark.parametrize(("value", "code", "reward"), VALUES)
def test_values_are_equal_but_for_rounding(value, code, reward):
    tests = json.dumps({"fn_name": "f", "inputs": [[]], "outputs": [value]})
    tests = verifiers.tests_of(tests.replace(f'"{value}"', str(value)), None)  # of any length
    response = f"```\n{USUAL}def f():\n    return {code}\n```"
    assert verifiers.run_tests(response, tests) == reward


def test_a_problem_has_its_starter_code_and_its_tests(tmp_path):
    row = {"question": "Add.", "starter_code": "def f", "input_output": CALLS}
    empty = {"question": "?", "input_output": '{"inputs": [], "outputs": []}'}
    data = written(tmp_path / "taco.jsonl", [{**row, "question": f"{i}"} for i in range(30)])
    policy = save_byte_level_policy(tmp_path)
    task = DatasetTask("code", 0, policy, data=(data,))
    text = task.decode(task.prompts("test", 0, 1).tokens.tolist())
    assert "\n\n```python\ndef f\n```\n\nWrite" in text
    assert task.answer("```\n1\n```\nor\n```python\n2\n```") == "2"
    with refused("each line must have tests in the form of TACO or LiveCodeBench"):
        DatasetTask("code", 0, policy, data=(written(data, [empty]),))
