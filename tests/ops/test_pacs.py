"""PACS: reward proxies, loss and gradients (also through the baseline) against the formulas in plain PyTorch and by hand."""

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from maxrl_fast.ops import group_advantage, log_ratio_reward, pacs_loss, rloo_advantage

SCORES = ["rloo", "grpo", "dr_grpo", "naive"]
OFFSETS = torch.tensor([0, 1, 1, 5, 12, 24])


def example(size=24, dtype=torch.float64):
    generator = torch.Generator().manual_seed(4)
    proxies = torch.randn(size, generator=generator, dtype=dtype)
    labels = (torch.rand(size, generator=generator) < 0.4).to(dtype)
    return proxies, labels


def slow_loss(proxies, labels, bounds, score, weight):
    """Return the loss, computed group by group and rollout by rollout; autograd differentiates it."""
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
    (by_hand,) = torch.autograd.grad(expected, r)
    loss, _ = pacs_loss(r, labels, groups, score=score, weight=weight)
    (gradient,) = torch.autograd.grad(loss, r)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert by_hand.abs().max() > 1e-3
    torch.testing.assert_close(gradient, by_hand, rtol=1e-10, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x: pacs_loss(x, labels, groups, score=score, weight=weight)[0], (r,))
    single = r.detach().float().requires_grad_()
    (rounded,) = torch.autograd.grad(pacs_loss(single, labels, groups, score=score, weight=weight)[0], single)
    torch.testing.assert_close(rounded.double(), by_hand, rtol=1e-4, atol=1e-6)


def test_the_first_on_policy_step_is_rloo():
    """With psi = 0 and no weights, -dL/dr is the RLOO advantage over 2B...: sigmoid(0) = 1/2 cancels in the group."""
    labels = torch.tensor([1.0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0])
    r = torch.zeros(12, requires_grad=True)
    loss, _ = pacs_loss(r, labels, 6, weight="none")
    (gradient,) = torch.autograd.grad(loss, r)
    torch.testing.assert_close(-12 * gradient, rloo_advantage(labels.view(2, 6)).flatten())
    loss, _ = pacs_loss(r, labels, 6, weight="balanced")
    (gradient,) = torch.autograd.grad(loss, r)
    n = 6
    for begin, correct in ((0, 1), (6, 2)):
        group = slice(begin, begin + n)
        expected = torch.where(labels[group] > 0, n * n / (4 * (n - 1) * correct), -n * n / (4 * (n - 1) * (n - correct)))
        torch.testing.assert_close(-12 * gradient[group], expected)


@pytest.mark.parametrize("score", SCORES)
def test_equal_proxies_and_equal_labels_have_exactly_zero_gradient(score):
    """Only naive has a gradient, since it has no group. The derivative of the standard deviation at 0 is not NaN."""
    for value in (0.0, 0.1, -7.3):
        for n in (2, 3, 7):
            r = torch.full((n,), value, requires_grad=True)
            for labels in (torch.zeros(n), torch.ones(n)):
                (gradient,) = torch.autograd.grad(pacs_loss(r, labels, n, score=score)[0], r)
                assert gradient.isfinite().all()
                assert (gradient == 0).all() == (score != "naive")
    r = torch.zeros(4, requires_grad=True)
    (gradient,) = torch.autograd.grad(pacs_loss(r, torch.tensor([1.0, 0, 0, 0]), 4, score=score)[0], r)
    assert gradient.isfinite().all()
    assert gradient[0] < 0 < gradient[1]


def test_large_proxies_do_not_overflow():
    r = torch.tensor([500.0, -500.0, 500.0, -500.0], requires_grad=True)
    labels = torch.tensor([1.0, 0.0, 0.0, 1.0])
    loss, metrics = pacs_loss(r, labels, 4, score="naive", weight="none")
    (gradient,) = torch.autograd.grad(loss, r)
    assert loss.item() == pytest.approx(250.0)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, 0.25, -0.25]))
    torch.testing.assert_close(metrics["cross_entropy"], torch.tensor([0.0, 0.0, 500.0, 500.0]))


def test_metrics_and_parts():
    proxies, labels = example()
    whole, metrics = pacs_loss(proxies, labels, 6)
    psi = proxies.view(4, 6) - (proxies.view(4, 6).sum(1, keepdim=True) - proxies.view(4, 6)) / 5
    psi = psi.flatten()
    assert metrics["accuracy"].item() == pytest.approx(float(((psi > 0) == (labels > 0)).double().mean()))
    assert metrics["reward_proxy"].item() == pytest.approx(float(proxies.mean()))
    assert metrics["score_correct"].item() == pytest.approx(float(psi[labels > 0].mean()))
    assert metrics["score_wrong"].item() == pytest.approx(float(psi[labels == 0].mean()))
    plain, same = pacs_loss(proxies, labels, 6, weight="none")
    assert metrics["cross_entropy"].mean().item() == pytest.approx(plain.item())
    assert torch.equal(same["cross_entropy"], metrics["cross_entropy"])
    parts = [pacs_loss(proxies[a : a + 12], labels[a : a + 12], 6, denominator=24.0)[0].item() for a in (0, 12)]
    assert sum(parts) == pytest.approx(whole.item(), rel=1e-12)
    none = torch.zeros(0, requires_grad=True)
    loss, _ = pacs_loss(none, torch.zeros(0), 4)
    loss.backward()
    assert loss.item() == 0
    assert pacs_loss(proxies, labels.bool(), 6)[0].item() == whole.item()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": "best"}, "score must be one of rloo, grpo, dr_grpo, naive, got 'best'"),
        ({"weight": "half"}, "weight must be one of balanced, none, got 'half'"),
        ({"groups": 5}, "groups must be a number of rollouts that divides S = 24, or offsets, got 5"),
        ({"groups": torch.tensor([0, 9])}, "cu_seqlens must rise from 0 to T = 24"),
        ({"labels": torch.zeros(23)}, r"labels must be \[S\] = \[24\]"),
        ({"labels": torch.full((24,), 0.5)}, "labels must be 0 or 1, got 0.5 for rollout 0"),
        ({"labels": torch.full((24,), torch.inf)}, "labels must be 0 or 1, got inf for rollout 0"),
        ({"reward_proxy": torch.zeros(24).half()}, r"reward_proxy must be float32 or float64 \[S\]"),
    ],
)
def test_bad_input(change, message):
    proxies, labels = example()
    with pytest.raises(ValueError, match=message):
        pacs_loss(**({"reward_proxy": proxies, "labels": labels, "groups": 6} | change))


def test_log_ratio_reward():
    generator = torch.Generator().manual_seed(0)
    logp = torch.randn(10, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(10, generator=generator, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 3, 3, 4, 10])
    mask = torch.tensor([True] * 7 + [False] * 3)
    for given in (None, mask):
        difference = (logp - ref).detach() * (1 if given is None else given)
        expected = [2.5 * float(difference[a:b].sum()) for a, b in ((0, 3), (3, 3), (3, 4), (4, 10))]
        actual = log_ratio_reward(logp, ref, cu_seqlens, 2.5, mask=given)
        assert actual.tolist() == pytest.approx(expected, rel=1e-12)
        assert torch.autograd.gradcheck(lambda x, m=given: log_ratio_reward(x, ref, cu_seqlens, 2.5, mask=m), (logp,))
    # Masked tokens may be anything.
    poisoned = logp.detach().clone()
    poisoned[8] = torch.nan
    assert log_ratio_reward(poisoned, ref, cu_seqlens, mask=mask).isfinite().all()
    with pytest.raises(ValueError, match=r"ref_logprobs must be float32 or float64 \[T\] = \[10\]"):
        log_ratio_reward(logp, ref[:9], cu_seqlens)


def test_long_sequences_are_summed_in_float64():
    logp = torch.full((1_000_000,), -0.1)
    proxies = log_ratio_reward(logp, torch.zeros_like(logp), torch.tensor([0, 1_000_000]))
    assert proxies.item() == pytest.approx(-1e6 * float(logp[0]) * -1, rel=1e-7)


def test_operators_pass_opcheck():
    proxies, labels = example(dtype=torch.float32)
    ops = torch.ops.maxrl_fast
    for offsets, denominator in ((None, torch.tensor(24.0, dtype=torch.float64)), (OFFSETS, None)):
        arguments = (proxies.clone().requires_grad_(), labels, offsets, 6, "grpo", True, denominator, 24.0)
        torch.library.opcheck(ops.pacs_loss.default, arguments)
    logp, cu_seqlens = torch.randn(10, requires_grad=True), torch.tensor([0, 3, 10])
    torch.library.opcheck(ops.log_ratio_reward.default, (logp, torch.randn(10), cu_seqlens, torch.rand(10) < 0.5, 0.5))
    torch.library.opcheck(ops.log_ratio_reward_backward.default, (torch.randn(2), cu_seqlens, None, 0.5, 10))


def test_the_reference_in_pytorch_equals_the_kernel(monkeypatch):
    """The reference runs on devices without a kernel."""
    proxies, labels = example()
    cu_seqlens = torch.tensor([0, 3, 10, 24])
    results = []
    for has_kernels in (True, False):
        monkeypatch.setattr("maxrl_fast.ops.pacs.has_kernels", lambda _, has=has_kernels: has)
        result = []
        for score in SCORES:
            for groups in (6, OFFSETS):
                r = proxies.clone().requires_grad_()
                loss, metrics = pacs_loss(r, labels, groups, score=score)
                result += [loss.detach(), torch.autograd.grad(loss, r)[0], *metrics.values()]
        r = proxies.clone().requires_grad_()
        reward = log_ratio_reward(r, labels, cu_seqlens, 0.5, mask=labels > 0)
        result += [reward.detach(), torch.autograd.grad(reward.square().sum(), r)[0]]
        results.append(result)
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def test_pacs_first_update_is_the_slope_of_the_loss_where_all_log_ratios_are_0():
    for beta, correct in ((1.0, [1, 0, 0, 1, 0]), (0.3, [0, 1, 0]), (2.0, [1, 1]), (1.0, [0, 0, 0])):
        labels = torch.tensor(correct, dtype=torch.float64)
        log_ratios = torch.zeros(len(labels), dtype=torch.float64, requires_grad=True)
        loss, _ = pacs_loss(beta * log_ratios, labels, len(labels))
        (slope,) = torch.autograd.grad(loss, log_ratios)
        actual = group_advantage(labels, "pacs_first_update", beta=beta)
        torch.testing.assert_close(actual, -len(labels) * slope, rtol=1e-12, atol=1e-12)
        assert bool(actual.any()) == (0 < sum(correct) < len(correct))
