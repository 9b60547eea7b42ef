"""SIREN: the entropy of nuclei and its gradient, the tokens that count, the gradient of an update, and a run that resumes."""

import math

import numpy as np
import pytest
import torch

from maxrl_fast import train
from maxrl_fast.config.checks import check
from maxrl_fast.config.parse import parse
from maxrl_fast.errors import InputError
from maxrl_fast.ops.nucleus_entropy import _chunk_tokens, linear_nucleus_entropy
from maxrl_fast.training.learner import SIREN_NUCLEUS, LossSettings
from maxrl_fast.training.siren import QUANTILE, Siren, peak_shares
from tests.batches import one_batch
from tests.models import response_logits, tiny_decoder
from tests.run.test_resume import assert_same, stop_at
from tests.test_train import base, read
from tests.training.test_collect import CHAIN
from tests.training.test_learner import PROMPTS, learner
from tests.training.test_token_choice import assert_close, expected_gradients, gradients, off_policy

PPO = LossSettings(loss="ppo", aggregation="token_mean", siren=0.7)


def nucleus_entropy(logits, top_p):
    """Return the entropy of one row's nucleus, token by token, in float64; differentiable."""
    p = logits.double().softmax(-1)
    values, kept, total = p.tolist(), [], 0.0
    for v in sorted(range(len(p)), key=lambda v: -values[v]):
        if total < top_p:
            kept.append(v)
        total += values[v]
    q = p[kept] / p[kept].sum()
    return -(q * q.log()).sum()


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("top_p", [0.1, 0.8, 1.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_entropies_of_nuclei_and_their_gradient(dtype, tolerance, top_p, softcap, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((7, 5), (23, 5)))
    slopes = torch.randn(7, generator=generator, dtype=torch.float64)
    exact = [x.clone().requires_grad_() for x in (hidden, weight)]
    logits = exact[0] @ exact[1].T
    logits = (softcap * (logits / softcap).tanh() if softcap else logits) / 0.7
    expected = torch.stack([nucleus_entropy(row, top_p) for row in logits])
    wanted = torch.autograd.grad((slopes * expected).sum(), exact)
    monkeypatch.setattr("maxrl_fast.ops.nucleus_entropy._chunk_tokens", lambda *_: 3)
    given = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
    actual = linear_nucleus_entropy(*given, top_p=top_p, temperature=0.7, softcap=softcap)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected.detach(), rtol=tolerance, atol=tolerance)
    for gradient, exact_gradient in zip(torch.autograd.grad((slopes.to(dtype) * actual).sum(), given), wanted, strict=True):
        torch.testing.assert_close(gradient.double(), exact_gradient, rtol=0, atol=tolerance * 10)
        assert top_p == 0.1 or exact_gradient.abs().max() > 0.1
    frozen = [given[0], given[1].detach()]
    (alone,) = torch.autograd.grad((slopes.to(dtype) * linear_nucleus_entropy(*frozen, top_p=top_p)).sum(), frozen[:1])
    assert alone.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_chunk_with_its_copies_takes_the_memory_of_a_chunk_of_the_losses(dtype):
    hidden, weight = torch.zeros(5000, 4, dtype=dtype), torch.zeros(4096, 4, dtype=dtype)
    of_copies = 8 * max(dtype.itemsize, 4)
    assert _chunk_tokens(hidden, weight) * 4096 * of_copies == 1 << 25


def test_a_nucleus_of_one_token_has_entropy_0_and_no_gradient():
    hidden = torch.tensor([[3.0], [0.0], [-200.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [0.0]])
    entropy = linear_nucleus_entropy(hidden, weight, top_p=0.8)
    torch.testing.assert_close(entropy, torch.tensor([0.0, math.log(3), math.log(2)]))
    (gradient,) = torch.autograd.grad(entropy.sum(), hidden)
    assert not gradient.any()  # of equal probabilities the entropy is greatest
    assert linear_nucleus_entropy(hidden[:0], weight, top_p=0.8).shape == (0,)
    with pytest.raises(RuntimeError, match="linear_nucleus_entropy can be differentiated once only"):
        torch.autograd.grad(linear_nucleus_entropy(hidden, weight, top_p=0.8).sum(), hidden, create_graph=True)


def by_hand(entropies, lengths):
    """Return H and dH/dh_t, response by response, with numpy's quantile."""
    total, shares, start = 0.0, [], 0
    for length in lengths:
        h = entropies[start : start + length].double().numpy()
        peaks = h > np.quantile(h, QUANTILE) if length else np.zeros(0, dtype=bool)
        count = max(int(peaks.sum()), 1)
        total += h[peaks].sum() / count / len(lengths)
        shares += [float(peak) / count / len(lengths) for peak in peaks]
        start += length
    return total, torch.tensor(shares, dtype=torch.float64)


def test_the_peaks_of_each_response_count():
    lengths = [5, 0, 1, 12, 2, 31, 0]
    entropies = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    entropies[6:10] = 0.25  # equal ones
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    mean, expected = by_hand(entropies, lengths)
    shares = peak_shares(entropies, cu_seqlens)
    torch.testing.assert_close(shares, expected, rtol=1e-12, atol=1e-15)
    assert float(shares @ entropies) == pytest.approx(mean)
    assert (shares > 0).sum() >= 1 + 2 + 1 + 6
    assert not peak_shares(torch.full((9,), 0.5), torch.tensor([0, 9])).any()
    assert peak_shares(torch.zeros(0), torch.tensor([0])).shape == (0,)


def exact_siren(model, rollouts, coef, anchor):
    """Return SIREN's term and its gradient by autograd, with the tokens of the peaks taken as constant."""
    logits = response_logits(model, one_batch(PROMPTS, rollouts), torch.float32)
    entropies = torch.stack([nucleus_entropy(row, SIREN_NUCLEUS) for row in logits])
    mean, shares = by_hand(entropies.detach(), rollouts.lengths.tolist())
    term = coef * ((shares * entropies).sum() - anchor) ** 2
    parameters = dict(model.named_parameters())
    return mean, dict(zip(parameters, torch.autograd.grad(term, [*parameters.values()]), strict=True))


@pytest.mark.parametrize("budget", [1, 25, 10_000])
def test_an_update_adds_the_gradient_of_the_squared_distance_to_the_anchor(budget):
    model = tiny_decoder()
    samples = off_policy(model)
    mean, of_siren = exact_siren(model, samples.rollouts, 0.7, 0.1)
    trained = learner(model, PPO, budget=budget)
    siren = Siren(trained, 0.7, torch.full((1,), 0.1, dtype=torch.float64))
    metrics, actual = gradients(trained, siren.apply(samples, samples.sequences, 0))
    plain = expected_gradients(model, samples.rollouts)
    assert_close(actual, {name: plain[name] + of_siren[name] for name in plain})
    assert max(float(gradient.abs().max()) for gradient in of_siren.values()) > 1e-2
    assert metrics.num_sequences == 12  # groups of equal rewards too
    assert siren.end() == {"siren_entropy": pytest.approx(mean, rel=1e-5), "siren_anchor": 0.1}


def test_an_update_without_samples_sets_no_anchor():
    samples = off_policy(model := tiny_decoder())
    siren = Siren(learner(model, PPO), 0.7)
    assert siren.apply(samples, samples.sequences[:0], 0) is samples
    assert siren.anchor.isnan().all()
    siren.apply(samples, samples.sequences, 1)
    assert siren.end()["siren_entropy"] == pytest.approx(float(siren.anchor))
    assert float(siren.anchor) > 0.1


def test_the_first_update_sets_the_anchor_and_has_no_term():
    model = tiny_decoder()
    samples = off_policy(model)
    trained = learner(model, PPO)
    siren = Siren(trained, 0.7)
    parts = samples.minibatches(3)
    first = siren.apply(samples, parts[0], 0)
    assert not first.rollouts.entropy_slopes.any()
    anchor = float(siren.anchor)
    second = siren.apply(samples, parts[1], 1)
    assert float(siren.anchor) == anchor
    of_update = torch.arange(12).repeat_interleave(samples.rollouts.lengths) // 4 == 1
    assert second.rollouts.entropy_slopes[of_update].any()
    assert not second.rollouts.entropy_slopes[~of_update].any()
    assert siren.end()["siren_entropy"] != pytest.approx(anchor, abs=1e-4)


@pytest.mark.slow
def test_a_stopped_run_resumes_bitwise(tmp_path, monkeypatch):
    job = [*base()[2:], *CHAIN, "--objective", "grpo", "--steps", "4", "--save-every", "2", "--updates-per-step", "2"]
    job += ["--siren", "0.5"]
    assert train.main([*job, "--diagnose-every", "1", "--out", str(tmp_path / "whole")]) == 0
    with monkeypatch.context() as patch:
        stop_at(patch, "step 3")
        assert train.main([*job, "--out", str(tmp_path / "stopped")]) == 143
    assert train.main(["--resume", str(tmp_path / "stopped")]) == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")
    steps = read(tmp_path / "whole" / "metrics.jsonl")
    assert len({step["siren_anchor"] for step in steps}) == 1
    assert steps[-1]["siren_entropy"] > 0


def test_a_wrong_coefficient_is_refused():
    with pytest.raises(InputError, match="siren must be finite and at least 0, got -1"):
        check(parse(["--siren", "-1"]))
