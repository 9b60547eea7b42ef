"""Tests of the task of sorting digits: prompts by index, the split, and the score against a plain
definition.
"""

import random
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.sort_task import BOS, EOS, PAD, SORT, WORDS, SortTask
from maxrl_fast import train
from maxrl_fast.records import Rollouts
from tests.tables import refused
from tests.test_train import read

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sort_task.py"
GOLDEN = "<bos> 9 6 6 0 1 2 SORT"  # prompt 7 of seed 5, as first generated


def test_the_guide_shows_the_example():
    blocks = re.findall(
        r"^```python\n(.*?)^```$",
        (ROOT / "docs" / "adding_a_task.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert EXAMPLE.read_text() in blocks


def test_prompts_depend_on_seed_split_and_index_alone():
    task = SortTask(6, seed=5)
    assert task.decode(task.prompts("train", 7, 1).tokens.tolist()) == GOLDEN
    prompts = task.prompts("train", 3, 4)
    for place, i in enumerate(range(3, 7)):
        assert prompts.take(place, 1).tokens.tolist() == task.prompts("train", i, 1).tokens.tolist()
    assert prompts.ids.tolist() == [3, 4, 5, 6]
    assert prompts.lengths.tolist() == [task.prompt_length] * 4
    others = (SortTask(6, seed=6).prompts("train", 3, 4), task.prompts("test", 3, 4))
    assert all(other.tokens.tolist() != prompts.tokens.tolist() for other in others)


@pytest.mark.parametrize("length", [2, 3, 6])
def test_no_test_digits_are_ever_trained_on(length):
    train_digits, test_digits = (
        {
            tuple(sorted(SortTask(length, seed).digits(split, i)))
            for seed in (0, 1)
            for i in range(300)
        }
        for split in ("train", "test")
    )
    assert len(train_digits) > 30
    assert len(test_digits) > 5
    assert not train_digits & test_digits


def test_rewards_are_those_of_a_sorted_list():
    task, rng = SortTask(4, seed=3), random.Random(0)
    prompts, (responses, expected) = task.prompts("train", 0, 8), ([], [])
    for tokens in prompts.tokens.view(8, -1).tolist():
        right = [*sorted(tokens[1:-1]), EOS]
        swapped = [right[1], right[0], *right[2:]]
        tried = [
            right,
            swapped,
            right[:-1],
            right[:2],
            [EOS],
            [*right[:-1], PAD],
            [*right[:-1], SORT, EOS],
        ]
        tried += [[*rng.choices(range(16), k=rng.randint(1, 4)), EOS] for _ in range(20)]
        responses += tried
        expected += [float(response == right) for response in tried]
    rewards = task.score(prompts, Rollouts.given(responses))
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == expected
    assert 8 <= sum(expected) < 16
    assert task.score(prompts.take(0, 1), Rollouts.given([[EOS], [BOS]])).tolist() == [0, 0]


def test_demonstrations_earn_the_reward():
    task = SortTask(6)
    prompts, solutions = task.demonstrations(4, 16)
    assert task.score(prompts, solutions).tolist() == [1.0] * 16
    assert solutions.lengths.max() <= task.max_new_tokens
    shifted, _ = task.demonstrations(5, 16)
    assert task.score(shifted, solutions).mean() < 0.5


def test_answers_are_text_before_the_end():
    task = SortTask(4)
    assert task.answer("1 2 2 9 <eos>") == "1 2 2 9"
    assert task.answer("1 2 2 9") == task.answer("<eos>") == ""


def test_bad_lengths():
    for length in (1, 65):
        with refused(f"length must be from 2 to 64, got {length}"):
            SortTask(length)


@pytest.mark.slow
def test_it_is_learned_and_its_checkpoints_load(tmp_path):
    task = [f"--task={EXAMPLE}:SortTask", '--task-args={"length": 3}']
    flags = "--sft-steps 120 --steps 3 --prompts 8 --rollouts 8 --eval-prompts 16 --eval-samples 4"
    sizes = (
        "--hidden-size 64 --intermediate-size 96 --layers 2 --heads 4 --kv-heads 4 --dtype float32 "
        "--threads 1"
    )
    assert train.main([*task, *flags.split(), *sizes.split(), "--out", str(tmp_path / "run")]) == 0
    assert read(tmp_path / "run" / "metrics.jsonl")[-1]["reward_mean"] > 0.3
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "latest")
    assert tokenizer("<bos> 3 1 2 SORT")["input_ids"] == [BOS, *map(WORDS.index, "312"), SORT]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "latest").config.vocab_size == 16
