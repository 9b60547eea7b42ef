"""Tests of the weights: finite groups have the population weights where theory says so."""

import json
import subprocess
import sys

import pytest
import torch

from maxrl_fast.ops import ESTIMATORS
from tests.papers.load import FOLDER, load

weights = load("weights")


@pytest.mark.slow
def test_the_command_writes_results_and_picture(tmp_path):
    command = [
        sys.executable,
        FOLDER / "weights.py",
        *"--rollouts 8 --points 5 --out".split(),
        tmp_path,
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "W_N(p), N = 8" in run.stdout
    record = json.loads((tmp_path / "weights.json").read_text())
    assert record["settings"]["seed"] == 0
    assert record["maxrl_fast"]
    results = record["results"]
    assert results["estimators"]["8"].keys() | results["without_weight"].keys() == ESTIMATORS.keys()
    assert (tmp_path / "weights.png").read_bytes().startswith(b"\x89PNG")
    assert weights.main(["--out", str(tmp_path), "--rollouts", "8", "--k", "8"]) == 2


@pytest.fixture
def p():
    return torch.tensor([0.003, 0.1, 0.4, 0.75, 0.99], dtype=torch.float64)


@pytest.mark.parametrize("n", [3, 16])
def test_maxrl_with_n_rollouts_has_a_population_weight_exactly(p, n):
    """Algorithm 1 has the weight of order N-1; equations 6 and 7 have the weight of order N."""
    ours, population = weights.estimator_weights(p, n, 2), weights.population_weights(p, (n - 1, n))
    torch.testing.assert_close(ours["maxrl"], population[f"MaxRL, T = {n - 1}"], rtol=1e-12, atol=0)
    torch.testing.assert_close(
        ours["maxrl_ratio"], population[f"MaxRL, T = {n - 1}"], rtol=1e-12, atol=0
    )
    torch.testing.assert_close(
        ours["maxrl_conditional"], population[f"MaxRL, T = {n}"], rtol=1e-12, atol=0
    )
    torch.testing.assert_close(
        ours["maxrl_control_variate"], population[f"MaxRL, T = {n}"], rtol=1e-12, atol=0
    )
    torch.testing.assert_close(ours["rloo"], population["RL"], rtol=1e-12, atol=0)


def test_orders_go_from_reinforcement_learning_to_maximum_likelihood(p):
    population = weights.population_weights(p, (1, 100_000))
    torch.testing.assert_close(population["MaxRL, T = 1"], population["RL"], rtol=1e-12, atol=0)
    torch.testing.assert_close(
        population["MaxRL, T = 100000"], population["ML"], rtol=1e-12, atol=0
    )


@pytest.mark.slow
def test_grpo_converges_to_its_population_weight():
    p = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    population = weights.population_weights(p, ())["GRPO"]
    errors = [
        (weights.estimator_weights(p, n, 2)["grpo"] / population - 1).abs().max()
        for n in (16, 128, 1024)
    ]
    assert errors[0] > 5 * errors[1] > 25 * errors[2]  # as 1/N
    assert errors[2] < 8e-3
