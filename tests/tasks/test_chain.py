"""The chain task against a step-by-step simulation."""

import random

import pytest
import torch

from maxrl_fast import train
from maxrl_fast.records import Rollouts
from maxrl_fast.tasks.chain import BOS, EOS, HABIT, LEFT, PAD, RIGHT, ChainTask
from tests.tables import refused
from tests.test_train import read


def simulated_steps(task, tokens):
    """Return the number of rewarded steps by simulating one step at a time."""
    steps = 0
    for state, token in enumerate(tokens):
        if token == task.actions[state]:
            steps += 1
            continue
        return steps + (token in (LEFT, RIGHT) and bool(task.has_dead_end[state]))
    return steps


def test_rewards_equal_a_simulation():
    task, rng = ChainTask(12, seed=3), random.Random(0)
    responses = [task.actions[:n].tolist() for n in (12, 11, 1)]
    for _ in range(400):
        right = task.actions[: rng.randint(0, 12)].tolist()
        responses.append(
            (right + rng.choices([LEFT, RIGHT, EOS, PAD, BOS, 7], k=rng.randint(1, 12)))[:12]
        )
    prompts = task.prompts("train", 5, 1)
    rewards = task.score(prompts, Rollouts.given(responses))
    assert torch.equal(
        rewards, torch.tensor([simulated_steps(task, response) / 12 for response in responses])
    )
    assert rewards[0] == 1
    assert rewards.unique().numel() > 8


def test_always_right_earns_a_small_reward():
    task = ChainTask(1000)
    assert (task.actions == RIGHT).float().mean() == pytest.approx(HABIT, abs=0.03)
    habit = task.score(task.prompts("train", 0, 1), Rollouts.given([[RIGHT] * 1000]))
    assert 0 < float(habit) < 0.1
    assert not torch.equal(ChainTask(1000, seed=1).actions, task.actions)
    assert torch.equal(ChainTask(1000).actions, task.actions)


def test_every_prompt_is_one_bos_token():
    prompts = ChainTask(8).prompts("test", 4, 3)
    assert (prompts.tokens.tolist(), prompts.cu_seqlens.tolist(), prompts.ids.tolist()) == (
        [BOS] * 3,
        [0, 1, 2, 3],
        [4, 5, 6],
    )
    with refused("chain_length must be at least 2, got 1"):
        ChainTask(1)


@pytest.mark.slow
def test_it_is_learned(tmp_path):
    flags = (
        "--task chain --chain-length 8 --objective maxpo --k 4 --steps 40 --prompts 8 --rollouts "
        "16 --hidden-size 32"
    )
    sizes = (
        "--intermediate-size 64 --layers 2 --heads 4 --kv-heads 4 --lr 3e-3 --warmup-steps 5 "
        "--eval-prompts 4 --threads 1"
    )
    assert (
        train.main(
            [*flags.split(), *sizes.split(), "--eval-samples", "4", "--out", str(tmp_path / "run")]
        )
        == 0
    )
    rewards = [record["reward_mean"] for record in read(tmp_path / "run" / "metrics.jsonl")]
    assert sum(rewards[-5:]) / 5 > 3 * rewards[0]


def test_verifree_learns_the_chain_from_its_exact_gradient(tmp_path):
    flags = (
        "--task chain --chain-length 4 --objective verifree --prompts 1 --rollouts 2 --steps 40 "
        "--lr 1e-2 --warmup-steps 1"
    )
    flags += (
        " --eval-prompts 1 --eval-samples 2 --hidden-size 32 --intermediate-size 48 --layers 1 "
        "--heads 2 --kv-heads 1"
    )
    flags += " --threads 1 --dtype float32 --device cpu"
    assert train.main([*flags.split(), "--out", str(tmp_path / "run")]) == 0
    metrics = read(tmp_path / "run" / "metrics.jsonl")
    first, last = metrics[0], metrics[-1]
    assert first["reward_mean"] < 0.01
    assert last["reward_mean"] > 0.5
    assert last["reward/answer_leads"] == 1.0
