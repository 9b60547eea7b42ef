"""Tests of classification with exact and with sampled gradients. No test depends on how well the
classifier learns.
"""

import json
import subprocess
import sys
from itertools import product

import pytest
import torch

from maxrl_fast.ops import effective_weight
from tests.papers.load import FOLDER, load
from tests.tables import refused

script = load("exact_likelihood")
TINY = """--steps 4 --rollouts 4 8 --sweep 32 --classes 5 --dimensions 3 --train-inputs 50 
    --test-inputs 20 --test-digits 1700 --batch 8 --threads 1"""
LOGITS = torch.tensor([0.3, -1.1, 0.8, 0.1, -0.2], dtype=torch.float64)


def settings(**changes):
    small = {
        "steps": 4,
        "rollouts": (4, 8),
        "sweep": (32.0,),
        "classes": 5,
        "dimensions": 3,
        "batch": 8,
    }
    return script.ExactLikelihood(
        **{**small, "train_inputs": 50, "test_inputs": 20, "test_digits": 1700, **changes}
    )


def command(*arguments):
    return subprocess.run(
        [sys.executable, str(FOLDER / "exact_likelihood.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def gradient_of_pass_rate(logits, label):
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(logits.softmax(-1)[label], logits)[0]


@pytest.mark.slow
def test_command_writes_results_and_picture(tmp_path):
    done = command(*TINY.split(), "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "exact_likelihood.json").read_text())
    assert (tmp_path / "exact_likelihood.png").read_bytes().startswith(b"\x89PNG")
    assert "Gaussian classes" in done.stdout
    assert "REINFORCE, N = 8" in done.stdout
    results = record["results"]
    assert results == json.loads(json.dumps(script.experiment(settings()))), (
        "the same seed must give the same results"
    )
    assert results["steps"] == [0, 1, 2, 3, 4]
    for data, start in (("Gaussian classes", 1 / 5), ("digits", 1 / 10)):
        rows = results["curves"][data]
        assert [row["label"] for row in rows] == ["cross-entropy"] + [
            f"{name}, N = {n}" for name in ("MaxRL", "GRPO", "REINFORCE") for n in (4, 8)
        ]
        for row in rows:
            assert row["curves"]["pass@1"]["mean"][0] == pytest.approx(start, rel=1e-5)
            assert row["final"]["pass@1"]["mean"] == row["curves"]["pass@1"]["mean"][-1]
            assert row["coverage"]["mean"][0] == pytest.approx(
                row["final"]["pass@1"]["mean"], rel=1e-5
            )
        assert {(row["label"], row["learning_rate"]) for row in results["sweep"][data]} == {
            (label, rate)
            for label in ("cross-entropy", "MaxRL, N = 8", "GRPO, N = 8", "REINFORCE, N = 8")
            for rate in (4.0, 32.0)
        }


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"classes": 1}, "--classes must be at least 2, got 1"),
        ({"train_inputs": 0}, "--train-inputs must be at least 1, got 0"),
        ({"rollouts": (16, 1)}, "--rollouts must be one or more numbers from 2"),
        ({"rollouts": ()}, "--rollouts must be one or more numbers from 2"),
        ({"learning_rate": 0.0}, "must be above 0 and finite"),
        ({"sweep": (float("nan"),)}, "must be above 0 and finite"),
        ({"noise": -1.0}, "--noise must be at least 0 and finite, got -1.0"),
        ({"test_digits": 1797}, "--test-digits must be from 1 to 1796, got 1797"),
    ],
)
def test_bad_settings_are_refused(changes, sentence):
    with refused(sentence):
        script.experiment(settings(**changes))


def test_missing_scikit_learn_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with refused("pip install scikit-learn"):
        script.digits(settings())


@pytest.mark.parametrize("objective", ["MaxRL", "GRPO", "REINFORCE"])
@pytest.mark.parametrize("n", [2, 5])
def test_expected_scores_by_enumeration(objective, n):
    """The mean over all rollouts of three classes is W_N(p) grad p."""
    logits, label = LOGITS[:3], 1
    probabilities = logits.softmax(-1)
    rollouts = torch.tensor(list(product(range(3), repeat=n)))  # [3^n, n]
    likelihoods = probabilities[rollouts].prod(-1)
    labels = torch.full((len(rollouts),), label)
    scores = script.sampled_scores(
        probabilities.expand(len(rollouts), 3), labels, rollouts, objective
    )
    p = float(probabilities[label])
    options = script.OPTIONS[objective]
    weight = effective_weight(
        script.ESTIMATORS[objective], n, torch.tensor(p, dtype=torch.float64), **options
    )
    if objective != "GRPO":
        known = {"MaxRL": (1 - (1 - p) ** (n - 1)) / p, "REINFORCE": (n - 1) / n}[objective]
        assert float(weight) == pytest.approx(known, rel=1e-9)
    expected = weight * gradient_of_pass_rate(logits, label)
    torch.testing.assert_close(likelihoods @ scores, expected, rtol=1e-9, atol=1e-12)


def test_rollouts_are_independent_draws():
    """The counts of rollouts have the mean and covariances of a multinomial distribution."""
    draws, n = 40_000, 7
    p = LOGITS.softmax(-1)
    rollouts = script.sample(p.expand(draws, 5), n, torch.Generator().manual_seed(0))
    assert rollouts.shape == (draws, n)
    assert bool((rollouts.diff(dim=-1) >= 0).all())
    counts = torch.nn.functional.one_hot(rollouts, 5).sum(1).double()
    errors = (n * p * (1 - p) / draws).sqrt()
    assert float(((counts.mean(0) - n * p) / errors).abs().max()) < 4
    products = torch.einsum("di,dj->dij", counts - n * p, counts - n * p)
    covariances = n * (p.diag() - torch.outer(p, p))
    assert (
        float(((products.mean(0) - covariances) / (products.std(0) / draws**0.5)).abs().max()) < 4
    )


def test_the_cross_entropy_step_is_autograds_gradient():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 6, 4, generator=generator, dtype=torch.float64)
    weights = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(5, (3, 6), generator=generator)
    losses = torch.nn.functional.cross_entropy(
        (inputs @ weights).flatten(0, 1), labels.flatten(), reduction="none"
    )
    (expected,) = torch.autograd.grad(-losses.view(3, 6).mean(-1).sum(), weights)
    job = script.Job(script.EXACT, 0, 1.0)
    gradient = script.ascent(weights.detach(), inputs, labels, job, generator)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_gradient_norms():
    """Compare cross-entropy with autograd. The norm of MaxRL is (1 - (1-p)^(N-1)) times as large,
    so equal for large N.
    """
    generator = torch.Generator().manual_seed(0)
    weights = 0.3 * torch.randn(4, 5, generator=generator, dtype=torch.float64)
    inputs = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (6,), generator=generator)
    exact = script.gradient_norms(weights, inputs, labels, script.Job(script.EXACT, 0, 1.0))
    p = (inputs @ weights).softmax(-1)[torch.arange(6), labels]
    for i in range(6):
        leaf = weights.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((inputs[i] @ leaf).log_softmax(-1)[labels[i]], leaf)
        assert float(exact[i]) == pytest.approx(float(gradient.norm()), rel=1e-9)
    factors = {
        ("MaxRL", 16): 1 - (1 - p) ** 15,
        ("MaxRL", 1000): torch.ones(6, dtype=torch.float64),
        ("REINFORCE", 16): 15 / 16 * p,
    }
    assert float(p.min()) > 0.02  # so that 1000 rollouts are many
    for (objective, n), factor in factors.items():
        norms = script.gradient_norms(weights, inputs, labels, script.Job(objective, n, 1.0))
        torch.testing.assert_close(norms, factor * exact, rtol=1e-7, atol=0)


def test_metrics_use_the_labels():
    data = script.Data(
        *(torch.zeros(2, 0), torch.zeros(2, 0)),
        torch.eye(3).expand(2, 3, 3),
        torch.tensor([[0, 1, 2]] * 2),
        3,
    )
    p = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.1, 0.3], [0.98, 0.01, 0.01]])
    metrics = script.measure(torch.stack([p.log(), p.flip(1).log()]), data)
    of_first, of_second = (
        torch.tensor([0.5, 0.1, 0.01]).double(),
        torch.tensor([0.2, 0.1, 0.98]).double(),
    )
    for k in (1, 128):
        expected = torch.stack([(1 - (1 - of) ** k).mean() for of in (of_first, of_second)])
        torch.testing.assert_close(metrics[f"pass@{k}"], expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        metrics["nll"].double(),
        -torch.stack([of_first, of_second]).log().mean(-1),
        rtol=1e-5,
        atol=0,
    )
    torch.testing.assert_close(metrics["accuracy"], torch.tensor([1 / 3, 1 / 3]).double())


@pytest.mark.parametrize("make", [script.gaussian_classes, script.digits])
def test_data_depends_on_the_seed_and_test_inputs_are_held_out(make):
    data, again, other = (
        make(settings(test_digits=497)),
        make(settings(test_digits=497)),
        make(settings(seed=1)),
    )
    for name in ("inputs", "labels", "test_inputs", "test_labels"):
        assert torch.equal(getattr(data, name), getattr(again, name))
    assert not torch.equal(data.test_inputs[:, :20], other.test_inputs[:, :20])
    assert torch.equal(data.test_inputs[1, :20], other.test_inputs[0, :20]), "seeds count up"
    for inputs, test_inputs in zip(data.inputs, data.test_inputs, strict=True):
        rows, test_rows = ({tuple(row) for row in part.tolist()} for part in (inputs, test_inputs))
        assert len(rows) + len(test_rows) == len(inputs) + len(test_inputs)
        assert not rows & test_rows


def test_digits_keep_their_labels():
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    data = script.digits(settings(test_digits=497))
    inputs, labels = (
        torch.cat(parts, 1)[0]
        for parts in ((data.test_inputs, data.inputs), (data.test_labels, data.labels))
    )
    assert float(inputs.mean(0).abs().max()) < 1e-6
    assert float(inputs.square().sum(-1).mean()) == pytest.approx(1, rel=1e-5)
    wanted = torch.from_numpy(pixels)
    wanted = (wanted - wanted.mean(0)).float()
    wanted = wanted / wanted.square().sum(-1).mean().sqrt()
    nearest = torch.cdist(inputs, wanted).argmin(-1)
    assert torch.equal(nearest.sort().values, torch.arange(len(wanted)))
    assert torch.equal(torch.from_numpy(digits)[nearest].long(), labels)
