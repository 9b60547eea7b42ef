"""reasoning-gym: questions by index, a split by content, and scores by each data set's own
verifier.
"""

import os
import subprocess
import sys
import threading
import time

import pytest
import reasoning_gym
import torch
from reasoning_gym.factory import DATASETS

from maxrl_fast.config.options import RewardOptions, TaskOptions
from maxrl_fast.errors import RewardError
from maxrl_fast.job.build_task import build_scorer, build_task
from maxrl_fast.records import Rollouts
from maxrl_fast.rewards import verifiers
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks.gym import HASHED
from tests.job.test_resume import resumes_bitwise
from tests.tables import refused
from tests.test_train import read

COMPOSITE = (
    '{"datasets": [{"name": "gcd", "weight": 1, "config": {}}, {"name": "lcm", "weight": 1, '
    '"config": {}}]}'
)
NEEDS = {"composite": COMPOSITE}


@pytest.fixture
def without_hash_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def task_of(name, policy, seed=0, **options):
    return build_task(
        TaskOptions(task=f"gym:{name}", **{"max_prompt_tokens": 10**6, **options}), seed, policy
    )


def scored(task, prompts, responses):
    scorer = build_scorer(RewardOptions(reward_seconds=60.0, reward_workers=1), task)
    try:
        rewards = scorer.score(
            prompts,
            Rollouts.given(
                [task.conversation.demonstration("", response)[1] for response in responses]
            ),
        )
        return rewards, scorer.failures(Ranks(), "now")[1]
    finally:
        scorer.close()


@pytest.mark.usefixtures("without_hash_seed")
@pytest.mark.parametrize("name", sorted(DATASETS))
def test_every_data_set(name, policy, monkeypatch):
    """Every data set has a question at an index. If it gives the answer as text, that answer gets
    reward 1.
    """
    if name in HASHED:
        with refused(
            f"reasoning-gym's {name} generates other questions in every .*PYTHONHASHSEED=0"
        ):
            task_of(name, policy)
        monkeypatch.setenv("PYTHONHASHSEED", "0")  # as if this process had been started with it
    task = task_of(name, policy, gym_config=NEEDS.get(name, ""))
    prompts = task.prompts("train", 1, 1)
    (line,) = prompts.columns
    assert line["question"] in task.decode(prompts.tokens.tolist())
    made = verifiers.gym_entry(line["name"], line["config"], line["seed"], line["index"])
    assert made["question"] == line["question"]
    if task.has_demonstrations:
        answer = f"<answer>{made['answer']}</answer>"
        assert (
            verifiers.gym_dataset(line["name"], line["config"], line["seed"]).score_answer(
                verifiers.gym_answer(answer), made
            )
            == 1.0
        )


QUESTIONS = """
import hashlib, reasoning_gym
from reasoning_gym.factory import DATASETS
for name in sorted(set(DATASETS) - {"composite"}):
    data = reasoning_gym.create_dataset(name, seed=3)
    print(name, hashlib.sha256(data[1]["question"].encode()).hexdigest())
"""


@pytest.mark.slow
def test_questions_do_not_depend_on_pythons_hash_seed():
    """Ranks, the trainer and its reward workers see the same questions, except for the data sets in
    HASHED.
    """
    command = [sys.executable, "-c", QUESTIONS]
    printed = [
        subprocess.run(
            command,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    lines = zip(*(text.splitlines() for text in printed), strict=True)
    assert {line[0].split()[0] for line in lines if len(set(line)) > 1} <= set(HASHED)


@pytest.mark.slow
def test_rewards_come_from_the_verifier(policy):
    task = task_of("chain_sum", policy)
    prompts, solutions = task.demonstrations(0, 3)
    answers = [
        task.decode(part.tolist()) for part in solutions.tokens.split(solutions.lengths.tolist())
    ]
    rewards, complaint = scored(task, prompts, answers)
    assert (rewards.tolist(), complaint) == ([1, 1, 1], "")
    first, second, third = answers
    responses = [
        f"I add: <answer>{first}</answer>",
        f"\\boxed{{{second}}}",
        f"<answer>1</answer><answer>{third}</answer>",
    ]
    assert scored(task, prompts, responses)[0].tolist() == [1, 1, 1]
    responses = ["<answer>x</answer>", f"{second}, I think, or else {third}", "\\boxed{}"]
    # the verifier gives a small reward for an answer of the right form
    assert scored(task, prompts, responses)[0].max() < 0.5
    assert (
        task.answer("so <answer> 12 </answer>.")
        == task.answer("\\boxed{12}")
        == task.answer(" 12\n")
        == "12"
    )


def test_questions_depend_only_on_seed_split_and_index(policy):
    task, again = (task_of("lcm", policy) for _ in range(2))
    ahead = [line["question"] for line in again.prompts("train", 3, 4).columns]
    assert [line["question"] for line in task.prompts("train", 0, 7).columns][3:] == ahead
    assert len({line["question"] for line in task.prompts("train", 0, 40).columns}) > 35
    other = task_of("lcm", policy, seed=1)
    assert other.prompts("train", 0, 7).columns != task.prompts("train", 0, 7).columns
    far = task.prompts("train", 10**6, 2)  # beyond the size of one data set
    assert far.ids.tolist() == [10**6, 10**6 + 1]


def test_questions_are_generated_one_at_a_time(policy, monkeypatch):
    """Training prompts are made in a thread, and some generators seed NumPy's global random
    numbers.
    """
    task, own, busy, overlaps = task_of("lcm", policy), verifiers.gym_entry, threading.Lock(), []

    def entry(*arguments):
        is_alone = busy.acquire(blocking=False)
        overlaps.append(not is_alone)
        time.sleep(0.002)
        if is_alone:
            busy.release()
        return own(*arguments)

    monkeypatch.setattr(verifiers, "gym_entry", entry)
    thread = threading.Thread(target=task.prompts, args=("train", 0, 30))
    thread.start()
    task.prompts("test", 0, 30)
    thread.join()
    assert len(overlaps) >= 60
    assert not any(overlaps)


def test_no_question_is_in_both_splits(policy):
    # so few that questions repeat
    task = task_of("gcd", policy, gym_config='{"min_value": 1, "max_value": 12}')
    train_questions, test_questions = (
        {line["question"] for line in task.prompts(split, 0, 150).columns}
        for split in ("train", "test")
    )
    assert len(train_questions) > 40
    assert len(test_questions) > 8
    assert not train_questions & test_questions


def test_data_sets_that_cannot_be_created_are_refused(policy):
    for name, options, message in (
        ("sums", {}, r"reasoning-gym cannot create 'sums' with --gym-config '\{\}': ValueError"),
        (
            "gcd",
            {"gym_config": '{"min_value": -1}'},
            r"cannot create 'gcd' with --gym-config '.*': AssertionError",
        ),
        ("gcd", {"gym_config": '{"colour": 1}'}, "cannot create 'gcd' with .*: TypeError"),
        ("composite", {}, "cannot create 'composite' with .*: AssertionError: Must specify"),
    ):
        with refused(message):
            task_of(name, policy, **options)
    short = task_of("lcm", policy, max_prompt_tokens=3)
    with refused(
        "must have questions of at most 3 tokens for the train split, got none in 200 draws"
    ):
        short.prompts("train", 0, 1)


def test_a_changed_question_is_a_failure(policy):
    task = task_of("lcm", policy)
    prompts = task.prompts("train", 0, 2)
    columns = ({**prompts.columns[0], "question": "What?"}, prompts.columns[1])
    other = type(prompts)(prompts.tokens, prompts.cu_seqlens, prompts.ids, columns)
    with pytest.raises(
        RewardError, match="ValueError: reasoning-gym's lcm must repeat its question for seed"
    ):
        scored(task, other, ["1", "1"])


@pytest.mark.slow
def test_training_with_a_warm_start_and_resuming(policy, tmp_path, monkeypatch):
    sizes = (
        "--prompts 4 --rollouts 4 --k 2 --steps 4 --sft-steps 3 --sft-batch 4 --max-new-tokens 4 "
        "--eval-prompts 4"
    )
    more = (
        "--max-prompt-tokens 200 --eval-samples 2 --threads 1 --dtype float32 --reward-workers 1 "
        "--task gym:lcm"
    )
    flags = [*sizes.split(), *more.split(), "--model", str(policy)]
    resumes_bitwise(monkeypatch, tmp_path, flags, "step 2")
    samples = read(tmp_path / "whole" / "samples.jsonl")
    assert len(samples) == 2 * 4 * 2  # evaluations, prompts, samples
    assert {sample["step"] for sample in samples} == {0, 4}
    entry = reasoning_gym.create_dataset("lcm", seed=0)[0]
    assert entry["question"][:20] in samples[0]["prompt"]
    assert all(sample["reward"] in (0, 1) or 0 <= sample["reward"] <= 1 for sample in samples)
    assert torch.tensor([sample["tokens"] for sample in samples]).max() <= 4
    for record in (*samples, *read(tmp_path / "whole" / "rollouts.jsonl")):
        columns = record["columns"]
        made = verifiers.gym_entry(
            columns["name"], columns["config"], columns["seed"], columns["index"]
        )
        assert (record["answer"], columns["question"]) == (made["answer"], made["question"])
