import contextlib

import pytest

from maxrl_fast.config.options import Reward
from maxrl_fast.records import Rollouts
from maxrl_fast.rewards import MajorityVote, Outcome, RewardSource, WeightedRewards
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks.maze import DONE, DOWN, UP, MazeTask
from maxrl_fast.tasks.scorer import Scorer

FUNCTIONS = """
NAN = float("nan")

def length(prompt, response):
    return len(response.split())

def parts(prompt, response):
    first = response.split()[0]
    reward = {"UP": 1.0, "DOWN": NAN}.get(first, 0.5)
    return {"reward": reward, "up": first == "UP", "down": 1.0 if first == "DOWN" else None}

def never(prompt, response):
    return None

def fails_up(prompt, response):
    if response.startswith("UP"):
        raise ValueError("up is not allowed")
    return 1.0
"""
RESPONSES = [[UP, DONE], [DOWN], [DOWN, DOWN, DONE], [UP, UP, UP, UP]]  # of 2, 1, 3 and 4 words


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def scored(functions, names, weights=()):
    task = MazeTask(5)
    rewards = tuple(f"{functions}:{name}" for name in names.split())
    options = Reward(
        reward=rewards, reward_weights=weights, reward_workers=1, max_reward_error_rate=1.0
    )
    with contextlib.closing(Scorer.of(options, task)) as scorer:
        values = scorer.score(task.prompts("train", 0, 2), Rollouts.given(RESPONSES)).tolist()
        return values, scorer.pop_metrics().over(Ranks()), *scorer.failures(Ranks(), "now")


def test_the_reward_is_the_weighted_sum_and_every_part_has_a_mean(functions):
    rewards, means, failures, _ = scored(functions, "length parts", (1.0, 0.5))
    assert rewards == [2.5, 1.0, 3.0, 4.5]  # parts does not apply to responses that begin with DOWN
    # A component that does not apply, by None or NaN, is not in the mean.
    expected = {"length": 2.5, "parts": 1.0, "parts.up": 1.0}
    assert means == {f"reward/{name}": mean for name, mean in expected.items()}
    assert sum(failures.values()) == 0


def test_a_response_to_which_no_reward_applies_has_failed(functions):
    rewards, _, failures, complaint = scored(functions, "parts length never", (1.0, 0.0, 1.0))
    assert [reward == reward for reward in rewards] == [True] * 4
    rewards, _, failures, complaint = scored(functions, "parts never")
    assert [reward == reward for reward in rewards] == [True, False, False, True]
    assert failures["invalid"] == 2
    assert "no reward applies to this response" in complaint


def test_a_function_that_fails_fails_the_response_and_is_named(functions):
    rewards, means, failures, complaint = scored(functions, "length fails_up")
    assert rewards[1:3] == [2.0, 4.0]
    assert [reward == reward for reward in rewards] == [False, True, True, False]
    assert failures["exception"] == 2
    assert "fails_up: ValueError: up is not allowed (functions.py, line" in complaint
    # of the responses that have a reward
    assert means == {"reward/length": 2.0, "reward/fails_up": 1.0}


def test_a_sum_beyond_float32_is_a_failure():
    class Large(RewardSource):
        name = "a:f"

        def outcomes(self, rows, group):
            yield from enumerate([Outcome(3e38), Outcome(1.0)])

    large, small = WeightedRewards([Large()], [2.0]).score([{}, {}])
    assert small.reward == 2.0
    assert large.message.startswith("a reward must be a finite number of float32, got 6e+38")


def votes(responses, group):
    rows = [{"prompt": "", "response": response} for response in responses]
    return [x.reward for x in MajorityVote(lambda text: text.strip()).score(rows, group)]


def test_the_most_frequent_answer_of_each_group_is_right():
    assert votes(["3", "4", "3 ", "", "4", "4", "4", "3"], 4) == [1, 0, 1, 0, 1, 1, 1, 0]
    assert votes(["1", "2", "2", "1"], 4) == [1, 0, 0, 1]  # of a tie, the answer sampled first
    assert votes(["", "", ""], 3) == [0, 0, 0]  # no answer gets no vote
    assert votes(["", "", "5"], 3) == [0, 0, 1]
    assert votes(["7", ""], 1) == [1, 0]  # a group of one agrees with itself
