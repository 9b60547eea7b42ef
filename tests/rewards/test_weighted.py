"""Several rewards: weights, components, and what does not apply."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from maxrl_fast import evaluate, train
from maxrl_fast.config import evaluation
from maxrl_fast.config.checks import check
from maxrl_fast.config.options import RewardOptions
from maxrl_fast.config.parse import parse
from maxrl_fast.job.build_task import build_scorer
from maxrl_fast.records import Rollouts
from maxrl_fast.report.reading import read_folder
from maxrl_fast.rewards import RewardSource, Scores
from maxrl_fast.rewards.combined import WeightedRewards, short_names
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks.maze import DONE, DOWN, UP, MazeTask
from tests.tables import refused
from tests.test_train import base, read

FUNCTIONS = """
NAN = float("nan")

def length(prompt, response):
    return len(response.split())

def parts(prompt, response):
    first = response.split()[0]
    reward = {"UP": 1.0, "DOWN": NAN}.get(first, 0.5)
    return {"reward": reward, "up": first == "UP", "down": 1.0 if first == "DOWN" else None}

def summed(prompt, response):
    return {"a": 1.0, "b": len(response.split()), "c": None}

def never(prompt, response):
    return None

def fails_up(prompt, response):
    if response.startswith("UP"):
        raise ValueError("up is not allowed")
    return 1.0

def odd_names(prompt, response):
    return {1: 2.0}
"""
RESPONSES = [[UP, DONE], [DOWN], [DOWN, DOWN, DONE], [UP, UP, UP, UP]]  # of 2, 1, 3 and 4 words


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def scored(functions, names, weights=()):
    """Return rewards, component means, failure counts and the complaint for RESPONSES."""
    task = MazeTask(5)
    rewards = tuple(f"{functions}:{name}" for name in names.split())
    scorer = build_scorer(
        RewardOptions(
            reward=rewards, reward_weights=weights, reward_workers=1, max_reward_error_rate=1.0
        ),
        task,
    )
    try:
        values = scorer.score(task.prompts("train", 0, 2), Rollouts.given(RESPONSES)).tolist()
        return values, scorer.pop_metrics().over(Ranks()), *scorer.failures(Ranks(), "now")
    finally:
        scorer.close()


def test_the_reward_is_the_weighted_sum_and_every_part_has_a_mean(functions):
    rewards, means, failures, _ = scored(functions, "length parts", (1.0, 0.5))
    assert rewards == [2.5, 1.0, 3.0, 4.5]  # parts does not apply to responses that begin with DOWN
    # A component that does not apply, by None or NaN, is not in the mean.
    expected = {"length": 2.5, "parts": 1.0, "parts.up": 1.0}
    assert means == {f"reward/{name}": mean for name, mean in expected.items()}
    assert sum(failures.values()) == 0


def test_the_components_of_one_function_have_their_own_names(functions):
    rewards, means, _, _ = scored(functions, "summed")
    assert rewards == [3.0, 2.0, 4.0, 5.0]  # without "reward" it is the sum
    assert means == {"reward/a": 1.0, "reward/b": 2.5}


def test_one_weight_scales_the_only_function(functions):
    assert scored(functions, "length", (0.5,))[0] == [1.0, 0.5, 1.5, 2.0]


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


def test_without_another_reward_none_is_a_failure_and_names_must_be_text(functions):
    with pytest.raises(
        RuntimeError,
        match=r"invalid 4\), for example: a reward must be a number, got None of type None",
    ):
        scored(functions, "never")
    with pytest.raises(RuntimeError, match="components must have at most 32 names"):
        scored(functions, "odd_names")


def test_names_are_short_and_tell_rewards_apart():
    assert short_names(["a.py:f", "pkg.mod:g"]) == ["f", "g"]
    assert short_names(["x/a.py:f", "b.py:f"]) == ["a.f", "b.f"]
    assert short_names(["x/a.py:f", "y/a.py:f"]) == ["a.f_1", "a.f_2"]
    with refused(r"--reward must name each function once, got a\.py:f twice"):
        short_names(["a.py:f", "a.py:f"])


def test_a_sum_beyond_float32_is_a_failure():
    class Large(RewardSource):
        name = "a:f"

        def score(self, rows, *_):
            return Scores([3e38, 1.0], [], 0, [{}, {}])

    scores = WeightedRewards([Large()], [2.0]).score([{}, {}])
    assert scores.rewards == [0.0, 2.0]
    assert scores.failures[0].message == "a reward must be a finite number of float32, got 6e+38"


class Timed(RewardSource):
    """A reward of 1 that takes some seconds of a clock."""

    def __init__(self, name, seconds, clock):
        self.name, self.seconds, self.clock = name, seconds, clock

    def score(self, rows, *_):
        self.clock[0] += self.seconds
        return Scores([1.0] * len(rows), [], 0, [{} for _ in rows])

    def faster(self, factor):
        return f"{self.name} {factor:g}"


def test_the_cure_for_slow_rewards_is_that_of_the_slowest(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("maxrl_fast.rewards.combined.time.perf_counter", lambda: clock[0])
    rewards = WeightedRewards(
        [Timed("a:f", 1, clock), Timed("a:g", 5, clock), Timed("a:h", 2, clock)], [1, 1, 1]
    )
    assert rewards.score([{}]).rewards == [3.0]
    assert rewards.faster(4) == "a:g 4"


def test_a_checkpoint_behind_the_rewards_of_an_evaluation_is_not_one_of_them(tmp_path):
    for flags in (
        ["--reward", "a.py:f", "b.py:g", str(tmp_path)],
        ["--reward", "a.py:f", str(tmp_path), "--samples", "2"],
    ):
        with refused(f"CHECKPOINT must be .*, got {tmp_path}"):
            evaluation.parse(flags)


def test_rewards_and_weights_as_flags_and_in_files(tmp_path):
    flags = ["--reward", "a.py:f", "b.py:g", "--reward-weights", "1", "-.2", "--seed", "3"]
    file = tmp_path / "run.toml"
    file.write_text('reward = ["a.py:f", "b.py:g"]\nreward_weights = [1, -0.2]\nseed = 3\n')
    for config in (parse(flags), parse(["--config", str(file)])):
        assert (config.reward.reward, config.reward.reward_weights, config.run.seed) == (
            ("a.py:f", "b.py:g"),
            (1.0, -0.2),
            3,
        )
        check(config)
    file.write_text('reward = "a.py:f"\n')
    assert parse(["--config", str(file)]).flat()["reward"] == "a.py:f"
    for wrong in (["--reward-weights", "1", "2", "3"], ["--reward-weights", "1", "nan"]):
        with refused(r"reward_weights must be (a number for each reward|finite)"):
            check(parse([*flags, *wrong]))
    with refused("--reward-weights needs --reward"):
        parse(["--reward-weights", "1"])


@pytest.mark.slow
def test_a_run_with_two_rewards_logs_them_and_resumes_only_with_the_same(
    functions, tmp_path, capsys
):
    out = tmp_path / "run"
    job = f"--objective rloo --steps 2 --reward {functions}:length {functions}:summed"
    flags = [*job.split(), "--log-to", "tensorboard"]
    assert train.main([*base(), *flags, "--reward-weights", "1", "0.1", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "reward: 1 length + 0.1 summed" in said
    for record in (*read(out / "metrics.jsonl"), read(out / "eval.jsonl")[0]):
        assert record["reward/summed.a"] == 1.0
        total = record["reward/length"] + 0.1 * record["reward/summed"]
        assert record.get("reward_mean", total) == pytest.approx(total, rel=1e-5)
    board = EventAccumulator(str(out / "tensorboard")).Reload()
    assert {"metrics/reward/length", "metrics/reward/summed.b", "eval/reward/length"} <= {
        *board.Tags()["scalars"]
    }
    assert "reward/summed.b" in read_folder(out, "run").metrics
    assert json.loads((out / "config.json").read_text())["reward_weights"] == [1.0, 0.1]
    for other in (
        ["--reward-weights", "1", "0.2"],
        ["--reward", f"{functions}:length", f"{functions}:parts"],
    ):
        assert train.main(["--resume", str(out), *other]) == 2
        assert f"{other[0][2:].replace('-', '_')}: [" in capsys.readouterr().err
    assert (
        evaluate.main(
            [
                *(str(out), *"--eval-prompts 2 --samples 2 --out".split()),
                str(tmp_path / "evaluation"),
            ]
        )
        == 0
    )
    assert json.loads((tmp_path / "evaluation" / "eval.json").read_text())["reward/summed.a"] == 1.0
    capsys.readouterr()
    functions.write_text(FUNCTIONS + "\n")
    assert train.main(["--resume", str(out)]) == 2
    error = capsys.readouterr().err
    assert "the file of --reward: changed" in error
    assert "the file of --reward 2: changed" in error
