import contextlib
import itertools

import pytest
from reasoning_gym.factory import DATASETS

from maxrl_fast.config.options import Reward
from maxrl_fast.job.build_parts import build_task
from maxrl_fast.rewards import verifiers
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks.scorer import Scorer
from tests.tasks.test_dataset import responses, texts_of

NEEDS = {"composite": {"datasets": [{"name": "gcd", "weight": 1, "config": {}}]}}


def task_of(name, policy, seed=0, **options):
    return build_task(f"gym:{name}", {"max_prompt_tokens": 10**6, **options}, seed, policy)


def scored(task, prompts, texts):
    options = Reward(reward_seconds=60.0, reward_workers=1)
    with contextlib.closing(Scorer.of(options, task)) as scorer:
        rewards = scorer.score(prompts, responses(task, texts))
        return rewards, scorer.failures(Ranks(), "now")[1]


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_every_data_set(name, policy):
    task = task_of(name, policy, **NEEDS.get(name, {}))
    prompts = task.prompts("train", 1, 1)
    (line,) = prompts.columns
    assert line["question"] in task.decode(prompts.tokens.tolist())
    made = verifiers.gym_entry(line["name"], line["config"], line["seed"], line["index"])
    assert made["question"] == line["question"]
    if task.has_demonstrations:
        answer = verifiers.gym_answer(f"<answer>{made['answer']}</answer>")
        dataset = verifiers.gym_dataset(line["name"], line["config"], line["seed"])
        assert dataset.score_answer(answer, made) == 1.0


def test_rewards_come_from_the_verifier(policy):
    task = task_of("chain_sum", policy)
    prompts, solutions = task.demonstrations(0, 3)
    a, b, c = texts_of(task, solutions)
    right = [f"I add: <answer>{a}</answer>", f"\\boxed{{{b}}}"]
    right.append(f"<answer>1</answer><answer>{c}</answer>")
    wrong = ["<answer>x</answer>", f"{b}, I think, or else {c}", "\\boxed{}"]
    pairs = zip(right, wrong, strict=True)
    rewards, complaint = scored(task, prompts, [*itertools.chain(*pairs)])
    assert (rewards[::2].tolist(), complaint) == ([1, 1, 1], "")
    # the verifier gives a small reward for an answer of the right form
    assert rewards[1::2].max() < 0.5
    for text in ("so <answer> 12 </answer>.", "\\boxed{12}", " 12\n"):
        assert task.answer(text) == "12"


def test_questions_depend_only_on_seed_split_and_index(policy):
    task, again = (task_of("lcm", policy) for _ in range(2))
    ahead = [line["question"] for line in again.prompts("train", 3, 4).columns]
    assert [line["question"] for line in task.prompts("train", 0, 7).columns][3:] == ahead
    assert len({line["question"] for line in task.prompts("train", 0, 40).columns}) > 35
    other = task_of("lcm", policy, seed=1)
    assert other.prompts("train", 0, 7).columns != task.prompts("train", 0, 7).columns
    far = task.prompts("train", 10**6, 2)  # beyond the size of one data set
    assert far.ids.tolist() == [10**6, 10**6 + 1]
    assert far.columns != task.prompts("train", 0, 2).columns  # another epoch of it


def test_no_question_is_in_both_splits(policy):
    # so few that questions repeat
    task = task_of("gcd", policy, min_value=1, max_value=12)
    train_questions, test_questions = (
        {line["question"] for line in task.prompts(split, 0, 150).columns}
        for split in ("train", "test")
    )
    assert len(train_questions) > 40
    assert len(test_questions) > 8
    assert not train_questions & test_questions
