import re

import pytest
import torch

from maxrl_fast import ops, train
from maxrl_fast.records import Rollouts
from maxrl_fast.rewards.pool import UserCode
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks.maze import DONE, DOWN, UP, MazeTask
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.training.learner import Learner
from tests.rewards.pools import pool
from tests.test_train import base, read

REWARDS = """
import ctypes, os, time

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


def test_failures_are_nan_and_counted_by_kind_with_an_example(rewards):
    task = MazeTask(5)
    responses = Rollouts.given([[UP], [DOWN], [DONE], [15], [16], [UP]])
    with pool("moves", file=rewards, time_limit=0.5) as workers:
        scorer = Scorer(task, workers)
        scored = scorer.score(task.prompts("train", 0, 1), responses)
        assert scored.isnan().tolist() == [True, True, False, True, True, True]
        assert scored[2] == 1
        counts, sentence = scorer.failures(Ranks(), "step 7")
    assert counts == {"exception": 2, "timeout": 1, "crash": 1, "memory": 0, "invalid": 1}
    kinds = "(exception 2, timeout 1, crash 1, invalid 1)"
    wanted = f"step 7: 5 of 6 rewards failed {kinds}, for example: ValueError: up is not allowed"
    assert sentence.startswith(wanted)


@pytest.mark.parametrize(("num_ranks", "has_given_up"), [(1, True), (2, False)])
def test_a_process_gives_up_only_above_the_failures_that_all_processes_may_have(
    num_ranks, has_given_up
):
    def score(prompt, response):
        return 1 / response.count("UP")

    # 2 of 6 fail, and 3 of 12 may
    task, responses = MazeTask(5), Rollouts.given([[DOWN], [UP], [DOWN], *[[UP]] * 3])
    scorer = Scorer(task, UserCode(score, "f"), max_error_rate=0.25, num_ranks=num_ranks)
    scored = scorer.score(task.prompts("train", 0, 1), responses)
    assert bool(scored.isnan().all()) == has_given_up
    assert scored[[0, 2]].isnan().all()


FLAGS = ("--max-reward-error-rate", "1", "--reward-workers", "1", "--steps", "2")


@pytest.mark.slow
def test_failed_rewards_are_left_out_of_their_groups(rewards, tmp_path, monkeypatch, capsys):
    task, seen, pass_ = MazeTask(5), [], Learner.forward_backward

    def spy(self, samples, advantages, sequences, draw=(0, 0)):
        seen.append((draw[0], samples.rollouts, advantages.clone()))
        pass_(self, samples, advantages, sequences, draw)

    monkeypatch.setattr(Learner, "forward_backward", spy)
    out = tmp_path / "run"
    job = f"--reward {rewards}:by_length --objective opo --entropy-coef 0.1 --out {out}"
    assert train.main([*base(), *FLAGS, *job.split()]) == 0
    (_, rollouts, advantages) = next(entry for entry in seen if entry[0] == 1)
    parts = rollouts.tokens.split(rollouts.lengths.tolist())
    texts = [task.decode(part.tolist()) for part in parts]
    failed = torch.tensor([text.startswith("RIGHT") for text in texts])
    outcome = torch.tensor([len(text) % 2 for text in texts]).float()
    assert 0 < failed.sum() < 16
    assert (advantages[failed] == 0).all()
    assert (advantages != 0).any()
    for g in range(4):
        own = slice(4 * g, 4 * g + 4)
        if (kept := ~failed[own]).any():
            lengths = rollouts.lengths[own][None, kept]
            expected = ops.group_advantage(outcome[own][None, kept], "opo", lengths=lengths)
            torch.testing.assert_close(advantages[own][None, kept], expected)
    record, count = read(out / "metrics.jsonl")[0], int(failed.sum())
    assert (record["reward_exception"], record["reward_timeout"]) == (count, 0)
    assert record["num_sequences_trained"] == 16 - count
    assert record["reward_mean"] == pytest.approx(float(outcome[~failed].mean()))
    warning = f"warning: step 1: {count} of 16 rewards failed (exception"
    assert warning in capsys.readouterr().err
    assert read(out / "eval.jsonl")[0]["reward_errors"] > 0


def test_nonfinite_rewards_of_a_task_stop_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(MazeTask, "score", lambda self, _, x: x.lengths / 0)
    flags = ["--objective", "rloo", "--sft-steps", "1", "--out", str(tmp_path / "run")]
    assert train.main([*base(), *flags]) == 1
    wanted = "step 1: the reward of rollout 0 of prompt 8 is inf; the last good checkpoint"
    assert wanted in capsys.readouterr().err


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
