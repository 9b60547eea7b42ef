import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.sort_task import BOS, EOS, PAD, SORT, WORDS, SortTask
from maxrl_fast import train
from maxrl_fast.records import Rollouts
from tests.runs import ROOT, base, read

EXAMPLE = ROOT / "examples" / "sort_task.py"
GOLDEN = "<bos> 9 6 6 0 1 2 SORT"  # prompt 7 of seed 5, as first generated


def test_prompts_depend_on_seed_split_and_index_alone():
    task = SortTask(6, seed=5)
    prompts = task.prompts("train", 3, 5)
    assert task.decode(prompts.take(4, 1).tokens.tolist()) == GOLDEN
    assert task.decode(task.prompts("train", 7, 1).tokens.tolist()) == GOLDEN
    for other in (SortTask(6, seed=6).prompts("train", 3, 5), task.prompts("test", 3, 5)):
        assert other.tokens.tolist() != prompts.tokens.tolist()


@pytest.mark.parametrize("length", [2, 3, 6])
def test_no_test_digits_are_ever_trained_on(length):
    tasks = [SortTask(length, seed) for seed in (0, 1)]
    train_digits, test_digits = (
        {tuple(sorted(task.digits(split, i))) for task in tasks for i in range(300)}
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
        tried = [right, [right[1], right[0], *right[2:]], right[:-1], right[:2], [EOS]]
        tried += [[*right[:-1], PAD], [*right[:-1], SORT, EOS]]
        tried += [[*rng.choices(range(16), k=rng.randint(1, 4)), EOS] for _ in range(20)]
        responses += tried
        expected += [float(response == right) for response in tried]
    rewards = task.score(prompts, Rollouts.given(responses))
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == expected
    assert 8 <= sum(expected) < 16
    assert task.score(prompts.take(0, 1), Rollouts.given([[EOS], [BOS]])).tolist() == [0, 0]
    prompts, solutions = task.demonstrations(4, 16)
    assert task.score(prompts, solutions).tolist() == [1.0] * 16
    assert solutions.lengths.max() <= task.max_new_tokens


@pytest.mark.slow
def test_it_is_learned_and_its_checkpoints_load(tmp_path):
    task = [f"--task={EXAMPLE}:SortTask", "--length=3"]
    flags = f"--sft-steps 120 --objective maxrl --hidden-size 64 --out {tmp_path / 'run'}"
    assert train.main([*base()[2:], *task, *flags.split()]) == 0
    assert read(tmp_path / "run" / "metrics.jsonl")[-1]["reward_mean"] > 0.3
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "latest")
    assert tokenizer("<bos> 3 1 2 SORT")["input_ids"] == [BOS, *map(WORDS.index, "312"), SORT]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "latest").config.vocab_size == 16
