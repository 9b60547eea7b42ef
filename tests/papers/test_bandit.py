"""Tests of the bandits: closed forms against enumeration and autograd, sums against explicit
gradients, and the command.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from maxrl_fast.ops import group_advantage
from tests.papers.load import FOLDER, load

bandit = load("bandit")
TINY = (
    "--threads 1 --seeds 3 --num-actions 6 --num-rollouts 5 --k 3 --bias-batches 150 "
    "--variance-batches 50 --rollouts-swept 4 6 --actions-swept 2 5"
).split()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny_bandits(ties: bool = False):
    """Return three bandits with four actions."""
    drawn = bandit.Bandits.draw(3, 4, generator(1))
    rewards, flatter = drawn.rewards.clone(), drawn.probabilities.sqrt()
    if ties:
        rewards[:, 2] = rewards[:, 1]
    return bandit.Bandits(rewards, flatter / flatter.sum(-1, keepdim=True))


def tuples(num_actions: int, size: int) -> Tensor:
    """Return all groups of this size, [num_actions ** size, size]."""
    return torch.cartesian_prod(*[torch.arange(num_actions)] * size)


def gradients(probabilities: Tensor, actions: Tensor, advantages: Tensor) -> Tensor:
    """Return ghat [M, A] of each batch by its definition, from actions and advantages [M, N] of one
    bandit.
    """
    scores = torch.eye(len(probabilities), dtype=torch.float64)[actions] - probabilities
    return (advantages[..., None] * scores).mean(1)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_the_exact_gradient_equals_the_enumerated_objectives(k: int, ties: bool) -> None:
    bandits = tiny_bandits(ties)
    groups = tuples(4, k)
    for rewards, probabilities, exact in zip(
        bandits.rewards, bandits.probabilities, bandits.exact_gradient(k), strict=True
    ):
        logits = probabilities.log().requires_grad_()
        chances = logits.softmax(-1)[groups].prod(-1)
        (chances * rewards[groups].amax(-1)).sum().backward()
        assert logits.grad is not None
        assert logits.grad.norm() > 1e-3
        torch.testing.assert_close(k * exact, logits.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("n", "k"), [(3, 2), (5, 2), (5, 3), (5, 4), (6, 4)])
def test_ei_and_l2o_are_unbiased_and_l1o_has_its_closed_form_bias(
    n: int, k: int, ties: bool
) -> None:
    bandits = tiny_bandits(ties)
    groups = tuples(4, n)
    exact, bias = bandits.exact_gradient(k), bandits.exact_bias(k, n)
    assert (bias.norm(dim=-1) > 0.02 * exact.norm(dim=-1)).all()
    for name in bandit.LABELS:
        wanted = exact + bias if name == "ei_l1o" else exact
        for s, probabilities in enumerate(bandits.probabilities):
            advantages = group_advantage(bandits.rewards[s][groups], name, k=k)
            chances = probabilities[groups].prod(-1)
            mean = chances @ gradients(probabilities, groups, advantages)
            torch.testing.assert_close(mean, wanted[s], rtol=1e-9, atol=1e-12)


def explicit(bandits, actions: Tensor, name: str, k: int) -> Tensor:
    """Return ghat [S, M, A] for actions [S, M, N]."""
    return torch.stack(
        [
            gradients(probabilities, of_seed, group_advantage(rewards[of_seed], name, k=k))
            for rewards, probabilities, of_seed in zip(
                bandits.rewards, bandits.probabilities, actions, strict=True
            )
        ]
    )


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", list(bandit.LABELS))
def test_mean_and_squared_norms_equal_explicit_gradients(name: str, ties: bool) -> None:
    bandits = tiny_bandits(ties)
    batches = bandits.sample(50, 7, generator())
    wanted = explicit(bandits, batches.actions, name, 3)
    advantages = group_advantage(batches.rewards, name, k=3)
    assert wanted.abs().max() > 0.05
    torch.testing.assert_close(
        batches.mean_gradient(advantages), wanted.mean(1), rtol=1e-10, atol=1e-14
    )
    torch.testing.assert_close(
        batches.squared_norms(advantages), wanted.square().sum(-1), rtol=1e-10, atol=1e-14
    )


def test_variances_are_traces_of_the_sample_covariance(monkeypatch: pytest.MonkeyPatch) -> None:
    bandits, n, ks = tiny_bandits(), 5, (2, 4)
    monkeypatch.setattr(bandit, "CHUNK", 30 * n * 3)  # chunks of 30 batches, and a remainder
    found = bandit.variances(bandits, n, ks, 100, generator(5))
    again = generator(5)
    actions = torch.cat([bandits.sample(size, n, again).actions for size in (30, 30, 30, 10)], 1)
    for e, name in enumerate(("expected_improvement", "maxpo")):
        for i, k in enumerate(ks):
            for s, of_seed in enumerate(explicit(bandits, actions, name, k)):
                torch.testing.assert_close(
                    found[e, i, s], of_seed.T.cov().trace(), rtol=1e-10, atol=0
                )


def test_errors_use_the_mean_of_all_batches_so_far() -> None:
    bandits, n, k = tiny_bandits(), 5, 3
    found = bandit.errors(bandits, n, k, [1, 7], generator(6))
    again = generator(6)
    actions = torch.cat([bandits.sample(size, n, again).actions for size in (1, 6)], 1)
    for e, name in enumerate(bandit.LABELS):
        of_all = explicit(bandits, actions, name, k)
        for i, num_batches in enumerate((1, 7)):
            wanted = (of_all[:, :num_batches].mean(1) - bandits.exact_gradient(k)).norm(dim=-1)
            torch.testing.assert_close(found[e, i], wanted, rtol=1e-10, atol=0)


def test_slopes_and_crossings() -> None:
    num_batches = [1, 3, 10, 32]
    powers = torch.tensor([-0.5, 0.25], dtype=torch.float64)
    of_powers = 3 * torch.tensor(num_batches, dtype=torch.float64)[:, None] ** powers
    torch.testing.assert_close(bandit.slopes(num_batches, of_powers), powers)
    # The ratio exceeds 1 between K = 3 and 5; from the first K on; never; only at K = 3.
    ratio = torch.tensor(
        [[0.5, 1.2, 0.5, 0.9], [0.8, 1.3, 0.6, 1.1], [1.6, 1.4, 0.7, 0.9]], dtype=torch.float64
    )
    assert bandit.crossings([2, 3, 5], ratio).tolist() == pytest.approx([3.5, 2.0, 2.5])


def test_the_ratio_is_a_geometric_mean_and_counts_two_zeros_as_equal() -> None:
    # [2, 1, S]
    variance = torch.tensor([[[1.0, 2.0, 0.0]], [[4.0, 4.0, 0.0]]], dtype=torch.float64)
    found = bandit.compared(variance)
    assert found["ratio"]["mean"] == pytest.approx([2.0], rel=1e-5)
    assert found["seeds_raised"] == [2]
    assert found["maxpo"]["mean"] == pytest.approx([8 / 3], rel=1e-5)
    assert found["maxpo"]["standard_error"] == pytest.approx([4 / 3], rel=1e-5)


@pytest.mark.slow
def test_command_writes_results_and_picture(tmp_path: Path) -> None:
    command = [sys.executable, FOLDER / "bandit.py", *TINY, "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "slope" in done.stdout
    # no NaN
    record = json.loads((tmp_path / "bandit.json").read_text(), parse_constant=pytest.fail)
    results = record["results"]
    assert record["settings"]["k"] == 3
    assert results["error"]["num_batches"] == [1, 3, 10, 32, 100, 150]
    assert results["variance_by_k"]["6"]["k"] == [2, 3, 4, 5]
    assert results["variance_by_num_actions"]["4"]["num_actions"] == [2, 5]
    for row in (*results["variance_by_k"].values(), *results["variance_by_num_actions"].values()):
        for name in ("expected_improvement", "maxpo", "ratio"):
            assert min(row[name]["mean"]) > 0
    assert (tmp_path / "bandit.png").read_bytes().startswith(b"\x89PNG")
