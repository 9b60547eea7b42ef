"""Rewards by majority vote: against a count by hand, in groups, and in a run whose evaluation keeps
its own rewards.
"""

import json

import pytest
import torch

from maxrl_fast import train
from maxrl_fast.config.checks import check
from maxrl_fast.config.parse import parse
from maxrl_fast.records import Rollouts
from maxrl_fast.rewards.combined import MajorityVote
from maxrl_fast.tasks.maze import DONE, UP, MazeTask
from maxrl_fast.tasks.scorer import Scorer
from tests.tables import refused
from tests.test_train import base, read


def votes(responses, group):
    rows = [{"prompt": "", "response": response} for response in responses]
    return MajorityVote(lambda text: text.strip()).score(rows, group=group).rewards


def test_the_most_frequent_answer_of_each_group_is_right():
    assert votes(["3", "4", "3 ", "", "4", "4", "4", "3"], 4) == [1, 0, 1, 0, 1, 1, 1, 0]
    assert votes(["1", "2", "2", "1"], 4) == [1, 0, 0, 1]  # of a tie, the answer sampled first
    assert votes(["", "", ""], 3) == [0, 0, 0]  # no answer gets no vote
    assert votes(["", "", "5"], 3) == [0, 0, 1]
    assert votes(["7", ""], 1) == [1, 0]  # a group of one agrees with itself


def test_a_scorer_gives_rollouts_the_votes_of_their_prompt():
    task = MazeTask(5)
    responses = [[UP, DONE], [DONE], [UP, DONE], [UP, UP, DONE], [UP, UP, DONE], [UP, DONE]]
    scorer = Scorer(task, MajorityVote(task.answer))
    rewards = scorer.score(task.prompts("train", 0, 2), Rollouts.given(responses))
    assert rewards.tolist() == [1, 0, 1, 1, 1, 0]
    assert scorer.describe().startswith("reward: 1 for the answer that most")


@pytest.mark.slow
def test_training_learns_from_votes_and_the_evaluation_from_labels(tmp_path, monkeypatch):
    scored = []
    score = MazeTask.score
    monkeypatch.setattr(
        MazeTask, "score", lambda self, *given: scored.append(len(given[1])) or score(self, *given)
    )
    monkeypatch.setattr(MazeTask, "answer", lambda self, text: str(len(text.split()) % 2))
    flags = "--reward-source vote --objective rloo --steps 2 --eval-prompts 4 --keep-rollouts 16"
    assert train.main([*base(), "--out", str(tmp_path / "run"), *flags.split()]) == 0
    assert len(scored) == len(read(tmp_path / "run" / "eval.jsonl"))  # once for each evaluation
    for record in read(tmp_path / "run" / "metrics.jsonl"):
        if "reward_mean" in record:
            assert 0.5 <= record["reward_mean"] <= 1
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    ]
    for i in range(0, len(lines), 4):
        of_prompt = lines[i : i + 4]
        lengths = torch.tensor([len(line["response"].split()) % 2 for line in of_prompt])
        agree = torch.tensor([line["reward"] for line in of_prompt]) == 1
        assert lengths[agree].unique().numel() == 1
        assert agree.sum() >= 2


def test_objectives_with_other_rewards_refuse_votes():
    for name in ("self", "remax"):
        with refused(f"--reward-source vote does not support {name}: it needs individual rewards"):
            check(parse(["--objective", name, "--reward-source", "vote"]))
    check(parse(["--objective", "maxrl", "--reward-source", "vote"]))
