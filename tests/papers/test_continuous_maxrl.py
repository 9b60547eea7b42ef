"""Tests of MaxRL on continuous rewards: enumeration of every group against independent closed
forms.
"""

import itertools
import json
import random
import subprocess
import sys

import pytest
import torch

from maxrl_fast.records import Rollouts
from maxrl_fast.tasks.maze import DONE, EOS, MOVES, PATH, MazeTask, encode_maze
from tests.papers.load import FOLDER, load

LOGITS = torch.tensor([0.3, -0.4, 0.1], dtype=torch.float64)
N = 4
REWARDS = {
    "a tie and a negative reward": torch.tensor([-1.5, 0.7, 0.7], dtype=torch.float64),
    "all negative": torch.tensor([-2.0, -0.3, -1.1], dtype=torch.float64),
    "positive": torch.tensor([0.2, 1.4, 0.9], dtype=torch.float64),
}
BINARY = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)


def gradient_of_max(rewards, weights):
    """Return the gradient of sum_k weights[k - 1] E[max of k draws], enumerating every draw."""
    logits = LOGITS.clone().requires_grad_()
    policy = logits.softmax(0)
    total = torch.zeros((), dtype=torch.float64)
    for k, weight in enumerate(weights, 1):
        for draw in itertools.product(range(3), repeat=k):
            total = total + weight * policy[list(draw)].prod() * max(rewards[a] for a in draw)
    return torch.autograd.grad(total, logits)[0]


def mean_over_tuples(advantages_of, rewards):
    """Return the mean gradient over all 3^N ordered groups, with the score by autograd."""
    logits = LOGITS.clone().requires_grad_()
    policy = logits.softmax(0)
    total = torch.zeros((), dtype=torch.float64)
    for group in itertools.product(range(3), repeat=N):
        actions = torch.tensor(group)
        advantages = advantages_of(rewards[actions][None])[0]
        total = (
            total + policy[actions].prod().detach() * (advantages * policy[actions].log()).sum() / N
        )
    return torch.autograd.grad(total, logits)[0]


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("rewards", REWARDS.values(), ids=REWARDS)
def test_order_t_is_unbiased_for_its_sum_of_max_at_k(rewards, order):
    module = load("continuous_maxrl")
    wanted = gradient_of_max(rewards, [1 / k for k in range(1, order + 1)])
    assert wanted.norm() > 0.1
    found = mean_over_tuples(lambda r: module.advantages_of(order, r), rewards)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    exact = module.exact_mean(LOGITS, rewards, order, *module.all_groups(3, N))
    torch.testing.assert_close(exact, wanted, rtol=0, atol=1e-9)
    torch.testing.assert_close(module.target(LOGITS, rewards, order), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rewards", REWARDS.values(), ids=REWARDS)
def test_the_naive_extension_is_biased_except_for_binary_rewards(rewards):
    module = load("continuous_maxrl")
    groups, weights = module.all_groups(3, N), [1, 1 / 2, 1 / 3]
    wanted = gradient_of_max(rewards, weights)
    biased = module.exact_mean(LOGITS, rewards, module.NAIVE, *groups)
    torch.testing.assert_close(
        biased, mean_over_tuples(lambda r: module.advantages_of(module.NAIVE, r), rewards)
    )
    assert (biased - wanted).norm() > 0.1 * wanted.norm()
    binary = module.exact_mean(LOGITS, BINARY, module.NAIVE, *groups)
    torch.testing.assert_close(binary, gradient_of_max(BINARY, weights), rtol=0, atol=1e-9)


def test_best_of_k_equals_an_enumeration():
    module, policy = load("continuous_maxrl"), LOGITS.softmax(0)
    for rewards in REWARDS.values():
        wanted = [
            sum(
                float(policy[list(d)].prod() * rewards[list(d)].max())
                for d in itertools.product(range(3), repeat=k)
            )
            for k in range(1, 6)
        ]
        assert module.best_of_k(policy, rewards, 5).tolist() == pytest.approx(wanted, abs=1e-12)


def test_error_falls_as_the_exact_variance_over_the_number_of_groups():
    module = load("continuous_maxrl")
    settings = module.ContinuousMaxRL(arms=3, rollouts=4, groups=1024, repeats=128)
    logits, rewards = module.bandit(settings)
    assert rewards[0] == rewards[1]
    actions, counts = module.all_groups(3, 4)
    chance = torch.distributions.Multinomial(4, logits=logits).log_prob(counts.double()).exp()
    assert float(chance.sum()) == pytest.approx(1)
    found = module.convergence(settings)
    assert found["groups"] == [2**i for i in range(4, 11)]
    for order in (1, 2, 3):
        wanted = module.target(logits, rewards, order)
        estimates = module.policy_gradient(
            logits.softmax(0), actions, module.advantages_of(order, rewards[actions])
        )
        variance = float(chance @ (estimates - wanted).square().sum(1) / wanted.square().sum())
        for size, error in zip(found["groups"], found["errors"][str(order)], strict=True):
            assert error == pytest.approx((variance / size) ** 0.5, rel=0.25)
        assert found["slopes"][str(order)] == pytest.approx(-0.5, abs=0.08)


# A 5x5 maze. The solution is RIGHT RIGHT DOWN DOWN; DOWN DOWN is a dead end.
GRID = [[c == "." for c in row] for row in ("#####", "#...#", "#.#.#", "#.#.#", "#####")]
WAY = "RIGHT RIGHT DOWN DOWN"


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (f"{WAY} DONE", 1),
        (f"{WAY} DONE <eos>", 1),
        (f"DOWN UP {WAY} DONE", 1),
        (f"{WAY} UP UP LEFT DONE", 1),  # moves after the goal are ignored
        (f"{WAY} DOWN DONE", 1),
        (WAY, 0.75),  # no DONE
        (f"{WAY} PATH DONE", 0.75),  # PATH is not a move
        ("", 0),
        ("DONE", 0),
        ("<eos>", 0),
        ("DOWN DOWN DONE", 0),
        ("UP RIGHT RIGHT DONE", 0),
        ("DOWN UP RIGHT DONE", 0.25),
        ("RIGHT RIGHT", 0.5),
        ("RIGHT RIGHT LEFT LEFT DONE", 0.5),  # the closest point counts
        ("RIGHT RIGHT RIGHT DOWN DOWN DONE", 0.5),  # into a wall
        ("RIGHT RIGHT DONE DOWN DOWN DONE", 0.5),
        ("RIGHT GOAL RIGHT DOWN DOWN DONE", 0.25),
        ("RIGHT RIGHT DOWN", 0.75),
    ],
)
def test_partial_credit_of_walks(response, reward):
    assert (
        load("maze_progress").fraction_of_the_way(MazeTask(5).decode(encode_maze(GRID)), response)
        == reward
    )


@pytest.mark.parametrize("size", [5, 9])
def test_partial_credit_is_1_exactly_where_the_maze_task_says_solved(size):
    task, rng, score = MazeTask(size), random.Random(0), load("maze_progress").fraction_of_the_way
    prompts, solutions = task.demonstrations(0, 16)
    responses = []
    for tokens in (part.tolist() for part in solutions.tokens.split(solutions.lengths.tolist())):
        *way, _, _ = tokens
        noise = [[*rng.choices([*MOVES, DONE], k=size), DONE] for _ in range(10)]
        responses += [
            [*way, DONE],
            tokens,
            [*way, EOS],
            way[:-1],
            [*way, way[0], DONE],
            [*way, PATH, DONE],
            *noise,
        ]
    solved = task.score(prompts, Rollouts.given(responses)).tolist()
    texts = [task.decode(part.tolist()) for part in prompts.tokens.split(prompts.lengths.tolist())]
    rewards = [score(texts[i // 16], task.decode(response)) for i, response in enumerate(responses)]
    assert [reward == 1 for reward in rewards] == [s == 1 for s in solved]
    assert sum(solved) >= 48
    assert all(0 <= reward <= 1 for reward in rewards)
    assert len(set(rewards)) >= 5


SMALL = "--threads 1 --arms 3 --rollouts 4 --groups 64 --repeats 2 --learned 3 --updates 3"


@pytest.mark.slow
def test_the_command_runs_with_mazes(tmp_path):
    mazes = (
        "--maze 5 --warm-steps 2 --maze-steps 1 --maze-prompts 2 --eval-mazes 3 --eval-samples 4 "
        "--objectives maxrl-2"
    )
    command = [
        sys.executable,
        str(FOLDER / "continuous_maxrl.py"),
        *SMALL.split(),
        *mazes.split(),
        "--out",
        str(tmp_path),
    ]
    command += ["--work", str(tmp_path / "work")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "continuous_maxrl.json").read_text())
    assert (tmp_path / "continuous_maxrl.png").read_bytes().startswith(b"\x89PNG")
    assert record["settings"]["objectives"] == ["maxrl-2"]
    assert all(bias < 1e-12 for bias in record["results"]["shifts"]["bias_by_order"].values())
    found = record["results"]["mazes"]
    assert found["k"] == [1, 2, 4]
    assert list(found["objectives"]) == ["warm start", "maxrl-2"]
    for curves in found["objectives"].values():
        assert len(curves["max_at_k"]) == len(curves["solved_at_k_error"]) == 3
        assert sorted(curves["max_at_k"]) == curves["max_at_k"]
        assert all(
            s <= m <= 1 for s, m in zip(curves["solved_at_k"], curves["max_at_k"], strict=True)
        )
    assert "maxrl-2" in done.stdout


def test_objectives_become_flags():
    objective_flags = load("partial_credit").objective_flags
    assert objective_flags("maxrl-4", 16) == {"objective": "maxrl", "order": 4}
    assert objective_flags("maxpo-8", 16) == {"objective": "maxpo", "k": 8}
    assert objective_flags("rloo", 16) == {"objective": "rloo"}
