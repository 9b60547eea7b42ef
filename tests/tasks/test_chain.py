import random

import pytest
import torch

from examples.chain import BOS, EOS, HABIT, LEFT, PAD, RIGHT, ChainTask
from maxrl_fast.records import Rollouts


def simulated_steps(task, tokens):
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
        others = rng.choices([LEFT, RIGHT, EOS, PAD, BOS, 7], k=rng.randint(1, 12))
        responses.append((right + others)[:12])
    prompts = task.prompts("train", 5, 1)
    rewards = task.score(prompts, Rollouts.given(responses))
    expected = torch.tensor([simulated_steps(task, response) / 12 for response in responses])
    assert torch.equal(rewards, expected)
    assert rewards[0] == 1
    assert rewards.unique().numel() > 8


def test_always_right_earns_a_small_reward():
    task = ChainTask(1000)
    assert (task.actions == RIGHT).float().mean() == pytest.approx(HABIT, abs=0.03)
    habit = task.score(task.prompts("train", 0, 1), Rollouts.given([[RIGHT] * 1000]))
    assert 0 < float(habit) < 0.1
    assert task.prompts("test", 4, 3).tokens.tolist() == [BOS] * 3
    assert not torch.equal(ChainTask(1000, seed=1).actions, task.actions)
