"""Tests of the chain maze: its walks and gradients against exact values, and its command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from maxrl_fast.records import Rollouts
from maxrl_fast.tasks.chain import LEFT, RIGHT, ChainTask
from tests.papers.load import FOLDER, load

chain_maze = load("chain_maze")
LENGTH = 6
SIGN = torch.tensor([-1.0, -1.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
DEAD_END = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)


def parameters(seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return differentiable theta [L, 2] and b [2], with the habitual action before the rarer
    one.
    """
    rng = torch.Generator().manual_seed(seed)
    theta, b = (
        scale * torch.randn(*shape, 2, generator=rng, dtype=torch.float64)
        for shape in ((LENGTH,), ())
    )
    return theta.requires_grad_(), b.requires_grad_()


def log_odds_of(theta: Tensor, b: Tensor) -> Tensor:
    return theta[:, 1] - theta[:, 0] + b[1] - b[0]


def logprobs(theta: Tensor, b: Tensor, forward: int) -> Tensor:
    """Return the log-probs of an episode's actions, from the softmax, action by action."""
    taken = []
    for state in range(min(forward + 1, LENGTH)):
        leads_on = int(SIGN[state] > 0)
        action = leads_on if state < forward else 1 - leads_on
        taken.append((theta[state] + b).log_softmax(0)[action])
    return torch.stack(taken)


def exact_return(theta: Tensor, b: Tensor) -> Tensor:
    """Return the expected return as a sum over all possible episodes."""
    return sum(
        logprobs(theta, b, forward).sum().exp() * (forward + DEAD_END[forward])
        for forward in range(LENGTH + 1)
    )


def test_mazes_are_the_chains_of_the_task() -> None:
    mazes = chain_maze.mazes_of(40, range(3, 6))
    forward = torch.arange(41)
    for row, seed in enumerate(range(3, 6)):
        task = ChainTask(40, seed)
        assert [sign > 0 for sign in mazes.sign[row].tolist()] == (task.actions == LEFT).tolist()
        # [41, 40]
        walks = torch.where(
            torch.arange(40) < forward[:, None], task.actions, LEFT + RIGHT - task.actions
        )
        rewards = task.score(task.prompts("train", 0, 41), Rollouts.given(walks.tolist()))
        returns = chain_maze.returns_of(forward[None], mazes.dead_end[row : row + 1])[0]
        torch.testing.assert_close(returns, 40 * rewards)
        assert returns[-1] == 40
    assert 0.27 < chain_maze.mazes_of(1000, range(5), 0.7).sign.gt(0).double().mean() < 0.33
    assert 0.08 < chain_maze.mazes_of(1000, range(5)).sign.gt(0).double().mean() < 0.12


def test_expected_return_is_the_sum_over_all_walks() -> None:
    for seed in range(5):
        theta, b = parameters(seed)
        hazards = chain_maze.hazard(log_odds_of(theta, b), SIGN)
        torch.testing.assert_close(
            chain_maze.expected_return(hazards, DEAD_END),
            exact_return(theta, b),
            rtol=1e-12,
            atol=0,
        )


def test_walk_lengths_follow_their_distribution() -> None:
    theta, b = parameters(1)
    episodes = 200_000
    hazards = chain_maze.hazard(log_odds_of(theta, b), SIGN).detach()
    forward = chain_maze.walk(hazards, episodes, torch.Generator().manual_seed(0))
    exact = torch.tensor(
        [logprobs(theta, b, n).sum().exp().item() for n in range(LENGTH + 1)], dtype=torch.float64
    )
    assert exact.sum().item() == pytest.approx(1, abs=1e-12)
    share = torch.bincount(forward, minlength=LENGTH + 1) / episodes
    assert ((share - exact).abs() < 5 * (exact * (1 - exact) / episodes).sqrt()).all()
    returns = chain_maze.returns_of(forward, DEAD_END)
    error = returns.std() / episodes**0.5
    assert abs(returns.mean() - exact_return(theta, b)) < 5 * error


def test_score_and_step_equal_the_gradient_of_the_log_probability() -> None:
    theta, b = parameters(2)
    forward = torch.tensor([0, 0, 2, 3, 6, 5, 6, 1])  # every kind of end, including the goal
    weights = torch.tensor([0.7, -1.1, 0.4, 2.0, -0.3, 0.9, 1.3, -0.2], dtype=torch.float64)
    sum(
        weight * logprobs(theta, b, n).sum()
        for weight, n in zip(weights, forward.tolist(), strict=True)
    ).backward()
    gradient = chain_maze.score(log_odds_of(theta, b).detach(), SIGN, forward, weights)
    torch.testing.assert_close(gradient, theta.grad[:, 1], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(-gradient, theta.grad[:, 0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient.sum(), b.grad[1], rtol=1e-10, atol=1e-12)
    # A step along both gradients moves the log-odds as the training does.
    moved = log_odds_of(theta + 0.1 * theta.grad, b + 0.1 * b.grad)
    torch.testing.assert_close(moved, log_odds_of(theta, b) + 0.2 * (gradient + gradient.sum()))


def test_entropy_gradient_covers_the_visited_states() -> None:
    theta, b = parameters(3)
    forward = torch.tensor([0, 2, 6, 3])
    logp = (theta + b).log_softmax(1)
    entropy = -(logp.exp() * logp).sum(1)
    sum(entropy[: n + 1].sum() / 4 for n in forward.tolist()).backward()
    gradient = chain_maze.entropy_gradient(log_odds_of(theta, b).detach(), forward)
    torch.testing.assert_close(gradient, theta.grad[:, 1], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient.sum(), b.grad[1], rtol=1e-10, atol=1e-12)


def test_the_variance_ratio_equals_explicit_gradients() -> None:
    """Compare with K = 2 written out, over all of theta and b, with gradients by autograd."""
    mazes = chain_maze.Mazes(SIGN[None].float(), DEAD_END[None].float())
    theta, b = parameters(5)
    log_odds = log_odds_of(theta, b).detach().float()
    arm = chain_maze.Arm("EI + L2O", 5, 2)
    ratio = chain_maze.variance_ratio(
        log_odds[None], mazes, arm, 30, torch.Generator().manual_seed(7)
    )
    forward = chain_maze.walk(
        chain_maze.hazard(log_odds, SIGN.float())[None], 150, torch.Generator().manual_seed(7)
    ).view(30, 5)
    totals = []
    for is_centred in (True, False):
        batches = []
        for walks in forward.tolist():
            returns = [n + float(DEAD_END[n]) for n in walks]
            ei = [
                sum(max(x - y, 0) for j, y in enumerate(returns) if j != i) / 4
                for i, x in enumerate(returns)
            ]
            others = [
                sum(max(x - y, 0) for m, y in enumerate(returns) if m not in (i, j)) / 3 / 4
                for i in range(5)
                for j, x in enumerate(returns)
                if j != i
            ]
            l2o = [sum(others[4 * i : 4 * i + 4]) for i in range(5)]
            theta.grad = b.grad = None
            for n, improvement, baseline in zip(walks, ei, l2o, strict=True):
                ((improvement - is_centred * baseline) / 5 * logprobs(theta, b, n).sum()).backward()
            batches.append(torch.cat([theta.grad.flatten(), b.grad]))
        totals.append(torch.stack(batches).var(0).sum())
    torch.testing.assert_close(ratio[0].double(), totals[0] / totals[1], rtol=1e-4, atol=0)


def test_training_steps_along_autograds_gradients() -> None:
    mazes = chain_maze.Mazes(SIGN[None].float(), DEAD_END[None].float())
    arms = [
        chain_maze.Arm(method, n, None)
        for method, n in (("REINFORCE", 4), ("REINFORCE + entropy", 5))
    ]
    rates = torch.tensor([[0.1, 0.5], [0.2, 0.7]])
    settings = chain_maze.ChainMaze(iterations=2, records=2)
    _, (_, before, b_before), (_, after, b_after) = chain_maze.train(
        settings, arms, rates, mazes, torch.Generator().manual_seed(3), "test"
    )
    generator = torch.Generator().manual_seed(3)
    for log_odds in (torch.zeros_like(before), before):
        # [A, P, 1, 5]
        forward = chain_maze.walk(chain_maze.hazard(log_odds, mazes.sign), 5, generator)
    for a, arm in enumerate(arms):
        for i in range(2):
            theta, b = (
                torch.zeros(LENGTH, 2, dtype=torch.float64),
                torch.zeros(2, dtype=torch.float64),
            )
            theta[:, 1], b[1] = before[a, i, 0] - b_before[a, i, 0], b_before[a, i, 0]
            theta, b = theta.requires_grad_(), b.requires_grad_()
            logp = (theta + b).log_softmax(1)
            entropy = -(logp.exp() * logp).sum(1)
            walks = forward[a, i, 0, : arm.n].tolist()
            returns = [n + DEAD_END[n] for n in walks]
            objective = torch.zeros((), dtype=torch.float64)
            for n, value in zip(walks, returns, strict=True):
                advantage = value - (sum(returns) - value) / (arm.n - 1)
                objective = (
                    objective
                    + advantage * logprobs(theta, b, n).sum() / arm.n
                    + a * 0.01 * entropy[: n + 1].sum() / arm.n
                )
            objective.backward()
            rate = rates[a, i].double()
            log_odds = log_odds_of(theta + rate * theta.grad, b + rate * b.grad)
            torch.testing.assert_close(after[a, i, 0], log_odds.float(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(
                b_after[a, i, 0], (b + rate * b.grad).diff()[0].float(), rtol=1e-5, atol=1e-6
            )
            assert (after[a, i, 0] - before[a, i, 0]).abs().max() > 0.01


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, FOLDER / "chain_maze.py", *arguments], capture_output=True, text=True
    )


TINY = (
    "--length 30 --iterations 40 --batch-sizes 4 8 --ks 2 4 --learning-rates 0.01 0.3 "
    "--search-seeds 2 --seeds 3 --records 4 --variance-batches 8 --threads 1"
).split()


@pytest.mark.slow
def test_command_writes_its_result_and_picture(tmp_path: Path) -> None:
    done = command(*TINY, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "chain_maze.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "chain_maze.json").read_text())["results"]
    assert results["steps"] == [0, 10, 20, 30, 40]
    arms = {(arm["method"], arm["n"], arm["k"]): arm for arm in results["arms"]}
    assert len(arms) == 10  # K must be below N
    assert ("EI", 4, 4) not in arms
    for arm in arms.values():
        curve = arm["curves"]["return"]["mean"]
        assert curve[0] == pytest.approx(arms["EI", 8, 2]["curves"]["return"]["mean"][0], rel=1e-6)
        assert curve[-1] > 1.5 * curve[0], arm
        assert arm["curves"]["rarer"]["median"][0] == 0.5
        assert arm["learning_rate"] == (0.01, 0.3)[arm["searched"].index(max(arm["searched"]))]
    gain = arms["EI + L2O", 8, 4]["gain_over_ei"]["mean"][0]
    returns = [arms[method, 8, 4]["curves"]["return"]["mean"][-1] for method in ("EI + L2O", "EI")]
    assert gain == pytest.approx(returns[0] - returns[1], abs=1e-3)
