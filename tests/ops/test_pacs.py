from itertools import pairwise

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from maxrl_fast.ops import log_ratio_reward, pacs_loss

SCORES = ["rloo", "grpo", "dr_grpo", "naive"]
OFFSETS = torch.tensor([0, 1, 1, 5, 12, 24])


def example():
    generator = torch.Generator().manual_seed(4)
    proxies = torch.randn(24, generator=generator, dtype=torch.float64)
    return proxies, (torch.rand(24, generator=generator) < 0.4).double()


def slow_loss(proxies, labels, bounds, score, weight):
    """Return the loss, computed group by group and rollout by rollout; autograd differentiates
    it.
    """
    total = 0.0
    for begin, end in pairwise(bounds):
        r, y = proxies[begin:end], labels[begin:end]
        n, correct = end - begin, float(y.sum())
        for i in range(n):
            others = torch.cat([r[:i], r[i + 1 :]])
            if score == "naive":
                psi = r[i]
            elif n == 1:
                psi = 0 * r[i]
            elif score == "rloo":
                psi = r[i] - others.mean()
            else:
                psi = (r[i] - r.mean()) / (r.std() + 1e-6 if score == "grpo" else 1)
            w = 1.0
            if weight == "balanced" and 0 < correct < n:
                w = n / (2 * (correct if y[i] else n - correct))
            total = total + w * binary_cross_entropy_with_logits(psi, y[i])
    return total / len(proxies)


@pytest.mark.parametrize("groups", [6, OFFSETS])
@pytest.mark.parametrize("weight", ["balanced", "none"])
@pytest.mark.parametrize("score", SCORES)
def test_loss_and_gradient(score, weight, groups):
    proxies, labels = example()
    bounds = list(range(0, 25, 6)) if isinstance(groups, int) else groups.tolist()
    r = proxies.requires_grad_()
    expected = slow_loss(r, labels, bounds, score, weight)
    (by_hand,) = torch.autograd.grad(expected, r, create_graph=True)
    assert by_hand.abs().max() > 1e-3
    for x, tolerance in ((r, 1e-10), (r.detach().float().requires_grad_(), 1e-4)):
        loss, _ = pacs_loss(x, labels, groups, score=score, weight=weight)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
        torch.testing.assert_close(gradient.double(), by_hand, rtol=tolerance, atol=tolerance / 100)
    loss, _ = pacs_loss(r, labels, groups, score=score, weight=weight)
    squares = [
        x.square().sum() for x in (*torch.autograd.grad(loss, r, create_graph=True), by_hand)
    ]
    second, wanted = (torch.autograd.grad(x, r)[0] for x in squares)
    torch.testing.assert_close(second, wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("score", SCORES)
def test_equal_proxies_and_equal_labels_have_exactly_zero_gradient(score):
    """Only naive has a gradient, since it has no group. The derivative of the standard deviation at
    0 is not NaN.
    """
    for value, n in ((0.0, 2), (0.1, 3), (-7.3, 7)):
        r = torch.full((n,), value, requires_grad=True)
        for labels in (torch.zeros(n), torch.ones(n), torch.arange(n) == 0):
            (gradient,) = torch.autograd.grad(pacs_loss(r, labels, n, score=score)[0], r)
            assert gradient.isfinite().all()
            is_mixed = labels.sum() == 1
            assert bool((gradient == 0).all()) == (score != "naive" and not is_mixed)
            assert not is_mixed or gradient[0] < 0 < gradient[1]


def test_large_proxies_do_not_overflow_or_are_refused():
    r = torch.tensor([500.0, -500.0, 500.0, -500.0], requires_grad=True)
    loss, metrics = pacs_loss(r, torch.tensor([1.0, 0, 0, 1]), 4, score="naive", weight="none")
    assert loss.item() == pytest.approx(250.0)
    assert torch.autograd.grad(loss, r)[0].tolist() == [0.0, 0.0, 0.25, -0.25]
    torch.testing.assert_close(metrics["cross_entropy"], torch.tensor([0.0, 0.0, 500.0, 500.0]))
    labels = torch.tensor([0, 1, 1])
    squares = torch.tensor([0.0, 1e200, 2e200], dtype=torch.float64)
    message = r"must be finite in torch.float64, got nan from reward proxies of up to 2e\+200"
    with pytest.raises(ValueError, match=message):
        pacs_loss(squares, labels, 3, score="grpo")
    assert pacs_loss(squares, labels, 3, score="rloo")[0].isfinite()
    # from a policy that has become NaN, which the trainer reports itself
    broken = torch.tensor([0.0, torch.nan, 1.0])
    assert pacs_loss(broken, labels, 3)[0].isnan()


def test_metrics_and_parts():
    proxies, labels = example()
    of_all, metrics = pacs_loss(proxies, labels, 6)
    r = proxies.view(4, 6)
    psi = (r - (r.sum(1, keepdim=True) - r) / 5).flatten()
    for name, expected in (
        ("accuracy", ((psi > 0) == (labels > 0)).double().mean()),
        ("reward_proxy", proxies.mean()),
        ("score_correct", psi[labels > 0].mean()),
        ("score_wrong", psi[labels == 0].mean()),
        ("cross_entropy", binary_cross_entropy_with_logits(psi, labels, reduction="none")),
    ):
        torch.testing.assert_close(metrics[name], expected)
    parts = [slice(0, 12), slice(12, 24)]
    parts = [pacs_loss(proxies[x], labels[x], 6, denominator=24.0)[0].item() for x in parts]
    assert sum(parts) == pytest.approx(of_all.item(), rel=1e-12)
    assert pacs_loss(torch.zeros(0), torch.zeros(0), 4)[0].item() == 0
    strided = torch.stack([proxies, proxies], 1)[:, 1]
    for given in (labels.bool(), labels.to(torch.uint8), labels.bfloat16()):
        assert pacs_loss(strided, given, 6)[0].item() == of_all.item()


@pytest.mark.parametrize("has_kernels", [True, False])
def test_log_ratio_reward(monkeypatch, has_kernels):
    monkeypatch.setattr("maxrl_fast.ops.pacs.has_kernels", lambda _: has_kernels)
    generator = torch.Generator().manual_seed(0)
    logp, ref = torch.randn(10, 2, generator=generator, dtype=torch.float64).T
    bounds, wanted = torch.tensor([0, 3, 3, 4, 10]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    logp[8] = torch.nan  # masked tokens may be anything
    logp.requires_grad_()
    for mask in (torch.tensor([True] * 7 + [False] * 3), torch.arange(10) != 8):
        difference = (logp - ref).detach().where(mask, 0.0)
        actual = log_ratio_reward(logp, ref, bounds.int(), 2.5, mask=mask)
        sums = [2.5 * float(difference[a:b].sum()) for a, b in pairwise(bounds)]
        assert actual.tolist() == pytest.approx(sums, rel=1e-12)
        expected = 2.5 * wanted.repeat_interleave(bounds.diff()) * mask
        assert torch.autograd.grad(actual, logp, wanted.double())[0].tolist() == expected.tolist()
    assert log_ratio_reward(ref, logp.detach().nan_to_num(), bounds).isfinite().all()


def test_long_sequences_are_summed_in_float64():
    logp = torch.full((1_000_000,), -0.1)
    proxies = log_ratio_reward(logp, torch.zeros_like(logp), torch.tensor([0, 1_000_000]))
    assert proxies.item() == pytest.approx(1e6 * float(logp[0]), rel=1e-7)
