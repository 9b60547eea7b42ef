"""Reward functions in the trainer. Failed rewards are left out of their group, counted by kind, and
can stop a run.
"""

import re

import pytest
import torch

from maxrl_fast import ops, train
from maxrl_fast.errors import RewardError
from maxrl_fast.ops import ESTIMATORS
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.rewards import Failure
from maxrl_fast.rewards.pool import RewardPool
from maxrl_fast.rewards.user_code import InProcess
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks.maze import DONE, DOWN, UP, MazeTask
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.training.learner import Learner
from tests.tables import refused
from tests.test_train import base, read

REWARDS = """
import ctypes, os, time

def length(prompt, response):
    return len(response.split())

def moves(prompt, response):
    assert prompt.startswith("<bos> GRID_START WALL"), prompt
    words = response.split()
    if words[0] == "UP":
        raise ValueError("up is not allowed")
    if words[0] == "DOWN":
        time.sleep(100)
    if words[0] == "LEFT":
        ctypes.string_at(0)
    if words[0] == "RIGHT":
        return float("nan")
    return 1.0

def by_length(prompt, response):
    if response.startswith("RIGHT"):
        raise ValueError("right is not allowed")
    return len(response) % 2

def broken(prompt, response):
    with open(__file__ + ".calls", "a") as file:
        file.write(".")
    # after the rollouts that are scored before the first step
    if os.path.getsize(__file__ + ".calls") > 4:
        raise KeyError(response)
    return 1.0
"""


@pytest.fixture
def rewards(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


def pool(path, name, **options):
    return RewardPool(
        f"{path}:{name}", workers=2, time_limit=options.get("time_limit", 1.0), memory_limit=10**9
    )


def test_prompts_and_responses_reach_the_function_as_text(rewards):
    task = MazeTask(5)
    prompts = task.prompts("train", 0, 2)
    responses = Rollouts.given([[UP, DONE], [UP], [DOWN, DOWN, DONE], [UP, UP, UP, UP]])
    with pool(rewards, "length") as workers:
        scorer = Scorer(task, workers)
        assert scorer.score(prompts, responses).tolist() == [2, 1, 3, 4]
        assert scorer.failures(Ranks(), "step 1") == (
            dict.fromkeys(("exception", "timeout", "crash", "memory", "invalid"), 0),
            "",
        )


def test_failures_are_nan_and_counted_by_kind_with_an_example(rewards):
    task = MazeTask(5)
    responses = Rollouts.given([[UP], [DOWN], [DONE], [15], [16], [UP]])
    with pool(rewards, "moves", time_limit=0.5) as workers:
        scorer = Scorer(task, workers)
        scored = scorer.score(task.prompts("train", 0, 1), responses)
        assert scored.isnan().tolist() == [True, True, False, True, True, True]
        assert scored[2] == 1
        counts, sentence = scorer.failures(Ranks(), "step 7")
    assert counts == {"exception": 2, "timeout": 1, "crash": 1, "memory": 0, "invalid": 1}
    assert sentence.startswith(
        "step 7: 5 of 6 rewards failed (exception 2, timeout 1, crash 1, invalid 1), for example: "
        "ValueError"
    )
    assert "up is not allowed" in sentence


@pytest.mark.parametrize(("num_ranks", "has_given_up"), [(1, True), (2, False)])
def test_a_process_gives_up_only_above_the_failures_that_all_processes_may_have(
    num_ranks, has_given_up
):
    def score(prompt, response):
        return 1 / response.count("UP")

    # 2 of 6 fail, and 3 of 12 may
    task, responses = MazeTask(5), Rollouts.given([[DOWN], [DOWN], *[[UP]] * 4])
    scorer = Scorer(task, InProcess(score, "f"), max_error_rate=0.25, num_ranks=num_ranks)
    scored = scorer.score(task.prompts("train", 0, 1), responses)
    assert bool(scored.isnan().all()) == has_given_up
    assert scored.isnan()[:2].all()


def test_a_column_that_is_no_json_value_is_named():
    prompts = Prompts(
        torch.tensor([1, 2]),
        torch.tensor([0, 2]),
        torch.tensor([0]),
        columns=({"prompt": "p", "answer": {1}},),
    )
    scorer = Scorer(MazeTask(5), InProcess(lambda prompt, response, answer: 1.0, "f"))
    with refused(r"the column answer of a prompt must be a JSON value, for rewards: .*set"):
        scorer.score(prompts, Rollouts.given([[UP]]))


def test_the_task_scores_without_a_function():
    task = MazeTask(5)
    prompts, solutions = task.demonstrations(0, 4)
    scorer = Scorer(task, None)
    assert scorer.score(prompts, solutions).tolist() == [1, 1, 1, 1]
    assert scorer.failures(Ranks(), "step 1") == ({}, "")


FLAGS = ("--max-reward-error-rate", "1", "--reward-workers", "1", "--steps", "2")


@pytest.mark.parametrize("objective", ["maxpo --k 2", "opo --entropy-coef 0.1"])
@pytest.mark.slow
def test_failed_rewards_are_left_out_of_their_groups(
    rewards, tmp_path, monkeypatch, capsys, objective
):
    """Rollouts whose reward failed have zero advantage, and the others' advantages are computed
    without them.
    """
    task, seen, update = MazeTask(5), [], Learner.update

    def spy(self, samples, advantages, sequences, *, when, **options):
        seen.append((when, samples.rollouts, advantages.clone()))
        return update(self, samples, advantages, sequences, when=when, **options)

    monkeypatch.setattr(Learner, "update", spy)
    out = tmp_path / "run"
    job = f"--reward {rewards}:by_length --objective {objective} --out {out}"
    assert train.main([*base(), *FLAGS, *job.split()]) == 0
    (_, rollouts, advantages) = next(entry for entry in seen if entry[0] == "step 1")
    parts = rollouts.tokens.split(rollouts.lengths.tolist())
    texts = [task.decode(part.tolist()) for part in parts]
    failed = torch.tensor([text.startswith("RIGHT") for text in texts])
    outcome = torch.tensor([len(text) % 2 for text in texts]).float()
    assert 0 < failed.sum() < 16
    assert (advantages[failed] == 0).all()
    assert (advantages != 0).any()
    name, *more = objective.split()
    if name in ESTIMATORS:
        for g in range(4):
            own = slice(4 * g, 4 * g + 4)
            kept = ~failed[own]
            inputs = {"lengths": rollouts.lengths[own][kept]} if name == "opo" else {}
            options = {"k": 2} if name == "maxpo" else {}
            if kept.sum() > options.get("k", 0):
                expected = ops.group_advantage(outcome[own][kept], name, **inputs, **options)
                torch.testing.assert_close(advantages[own][kept], expected)
    record, count = read(out / "metrics.jsonl")[0], int(failed.sum())
    assert (record["reward_exception"], record["reward_timeout"]) == (count, 0)
    if "--entropy-coef" in more:
        assert record["num_sequences_trained"] == 16 - count
    assert record["reward_mean"] == pytest.approx(float(outcome[~failed].mean()))
    warning = f"warning: step 1: {count} of 16 rewards failed (exception"
    assert warning in capsys.readouterr().err
    assert read(out / "eval.jsonl")[0]["reward_errors"] > 0


def test_nonfinite_rewards_of_a_task_stop_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        MazeTask,
        "score",
        lambda self, prompts, rollouts: torch.full((len(rollouts.lengths),), float("inf")),
    )
    assert train.main([*base(), "--objective", "rloo", "--out", str(tmp_path / "run")]) == 1
    assert (
        "step 1: the reward of rollout 0 of prompt 320 is inf; the last good checkpoint"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_too_many_failures_stop_the_run_without_losing_a_step(rewards, tmp_path, capsys):
    out = tmp_path / "run"
    flags = f"--objective rloo --reward {rewards}:broken --reward-workers 1 --out {out}".split()
    assert train.main([*base(), *flags]) == 1
    error = capsys.readouterr().err
    # The run stops after the third failure of 24 calls.
    which = r"error: evaluation at step 0: (\d) of \1 rewards failed \(exception \1\), .*: KeyError"
    assert re.search(which, error)
    assert "that is more than --max-reward-error-rate 0.1 allows; the last good" in error
    assert "Fix the reward and continue with --resume --allow-changes, or raise" in error
    rewards.write_text(REWARDS.replace("raise KeyError(response)", "return 1.0"))
    assert train.main(["--resume", str(out), "--allow-changes"]) == 0
    assert [record["step"] for record in read(out / "metrics.jsonl")] == [1, 2, 3]
    assert [record["step"] for record in read(out / "eval.jsonl")] == [0, 3]


@pytest.mark.parametrize(
    ("kinds", "advice"),
    [
        (["exception"] * 3 + ["timeout"], "Fix the reward and continue with --resume --allow-"),
        (["crash"], "Fix the reward and continue with --resume --allow-"),
        (["timeout"] * 2 + ["exception"], "Raise --reward-seconds and continue with --resume."),
        (["memory"] * 2 + ["timeout"], "Raise --reward-memory-gb and continue with --resume."),
    ],
)
def test_the_advice_is_that_of_the_most_frequent_failure(kinds, advice):
    scorer = Scorer(MazeTask(5), InProcess(lambda prompt, response: 1.0, "one"), 0.1)
    scorer._num_scored = 8
    scorer._failures = [Failure(i, kind, "no idea") for i, kind in enumerate(kinds)]
    with pytest.raises(RewardError) as error:
        scorer.failures(Ranks(), "step 1")
    assert error.value.advice.startswith(advice)
