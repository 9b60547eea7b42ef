"""The effective weight W_N(p) of every binary estimator and the bias of estimators, both by enumeration of all groups."""

import itertools
from fractions import Fraction

import pytest
import torch

from maxrl_fast import ops
from tests import brute_force
from tests.ops.definitions import DEFINITIONS, OPTIONS

WEIGHTED = [name for name, row in ops.ESTIMATORS.items() if row.has_weight]


@pytest.mark.parametrize("name", WEIGHTED)
def test_weight_equals_the_enumeration_of_all_groups(name):
    n, size = 6, ops.ESTIMATORS[name].size
    for k in range(size.smallest, n - size.below_n + 1) if size else (0,):
        keywords = {size.name: k} if size else {}
        for p in (Fraction(1, 10), Fraction(1, 2), Fraction(9, 10)):
            expected = brute_force.effective_weight(
                lambda r, k=k: DEFINITIONS[name]([Fraction(x) for x in r], k, **OPTIONS.get(name, {})), n, p
            )
            actual = ops.effective_weight(
                name, n, torch.tensor([float(p)], dtype=torch.float64), **keywords, **OPTIONS.get(name, {})
            )
            assert actual.item() == pytest.approx(float(expected), rel=1e-9, abs=1e-9), (k, p)


@pytest.mark.parametrize("name", WEIGHTED)
def test_weight_formulas_of_the_registry_are_right(name):
    row, n, k = ops.ESTIMATORS[name], 9, 4
    if row.weight.startswith("no closed form"):
        return  # only the enumeration above can test it
    formula = row.weight.split(" at ")[0].replace("^", "**").replace(") (", ") * (").replace("N (", "N * (")
    keywords = {row.size.name: k} if row.size else {}
    rates = {"rho0": 0.1, "rho1": 0.05, "correct_weight": 0.1, "beta": 1.0}
    for p in (0.02, 0.3, 0.95):
        shown = eval(formula, {"p": p, "N": n, "k": k, "order": k, **rates})
        actual = ops.effective_weight(name, n, torch.tensor(p), **keywords, **OPTIONS.get(name, {}))
        assert actual.item() == pytest.approx(shown, rel=1e-6, abs=1e-9)


def test_known_weights():
    p = torch.tensor([0.01, 0.05, 0.2, 0.5, 0.8, 0.95])
    grpo = ops.effective_weight("grpo", 16, p)
    assert grpo.tolist() == pytest.approx([3.61, 3.16, 2.27, 1.87, 2.27, 3.16], abs=0.005)
    many = ops.effective_weight("maxrl", 4096, p.view(2, 3))  # nearly maximum likelihood
    torch.testing.assert_close(many, 1 / p.double().view(2, 3), rtol=1e-6, atol=0)
    ends = ops.effective_weight("maxrl", 8, torch.tensor([0.0, 1.0]))
    assert ends.tolist() == pytest.approx([7, 1])


def test_estimators_without_a_weight_are_refused():
    with pytest.raises(ValueError, match="the weight of unlikeliness depends on the log-probs"):
        ops.effective_weight("unlikeliness", 4, torch.tensor(0.5))
    with pytest.raises(ValueError, match="estimator must be one of"):
        ops.effective_weight("best", 4, torch.tensor(0.5))
    with pytest.raises(ValueError, match="maxpo needs 1 <= k <= N-1 = 3"):
        ops.effective_weight("maxpo", 4, torch.tensor(0.5), k=4)


# A bandit with three arms of different rewards, all 3^N groups of it.
REWARDS = torch.tensor([0.0, 0.7, 2.0], dtype=torch.float64)
LOGITS = torch.tensor([0.5, 0.1, -0.8], dtype=torch.float64)
N = 4


def mean_gradient(name, n=N, **options):
    """Return E[(1/N) sum_i A_i grad log pi(a_i)] exactly."""
    arms = torch.tensor(list(itertools.product(range(3), repeat=n)))
    policy = torch.softmax(LOGITS, 0)
    advantages = ops.group_advantage(REWARDS[arms], name, **options)  # [3^n, n]
    assert advantages.abs().max() > 0.1
    scores = torch.eye(3, dtype=torch.float64)[arms] - policy  # grad log pi of each arm: [3^n, n, 3]
    probability = policy[arms].prod(1)
    return (probability[:, None] * (advantages[..., None] * scores).mean(1)).sum(0)


def max_at_k_gradient(k):
    """Return the gradient of the expected maximum of k draws, by automatic differentiation."""
    logits = LOGITS.clone().requires_grad_()
    below = torch.softmax(logits, 0).cumsum(0)  # arms are in ascending order of reward: P(maximum <= arm) = below^k
    expected = (torch.cat([below[:1] ** k, (below**k).diff()]) * REWARDS).sum()
    return torch.autograd.grad(expected, logits)[0]


def assert_same(actual, expected):
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("k", range(1, N + 1))
def test_max_at_k_estimators_are_unbiased(k):
    if k < N:
        assert_same(mean_gradient("maxpo", k=k), max_at_k_gradient(k) / k)
        assert_same(mean_gradient("maxpo", k=k, scale_by_k=True), max_at_k_gradient(k))
        assert_same(mean_gradient("pkpo_sloo", k=k), max_at_k_gradient(k) / N)
        maxrl = sum(max_at_k_gradient(j) / j for j in range(1, k + 1))
        assert_same(mean_gradient("maxrl", order=k), maxrl)
    if k > 1:
        assert_same(mean_gradient("expected_improvement", k=k), max_at_k_gradient(k) / k)
        assert_same(mean_gradient("pkpo", k=k), max_at_k_gradient(k) / N)


def test_the_leave_one_out_baseline_of_ei_is_biased():
    biased, exact = mean_gradient("ei_l1o", k=3), max_at_k_gradient(3) / 3
    assert (biased - exact).abs().max() > 0.05 * exact.abs().max()
    baseline = ops.ESTIMATORS["leave_two_out"]
    assert baseline.weight == "0"
    assert mean_gradient("leave_two_out", k=3).abs().max() < 1e-12


def test_policy_gradient_estimators_are_unbiased():
    exact = max_at_k_gradient(1)
    assert_same(mean_gradient("rloo"), exact)
    assert_same(mean_gradient("reinforce_raw"), exact)
    assert_same(mean_gradient("reinforce"), exact * (N - 1) / N)
    assert_same(mean_gradient("noisy_verifier_backward", **OPTIONS["noisy_verifier_backward"]), exact * (N - 1) / N / 0.85)


def test_the_weight_compiles_as_one_graph():
    def weight(n, p):
        return ops.effective_weight("grpo", n, p, eps=1e-4)

    compiled = torch.compile(weight, fullgraph=True, backend="aot_eager", dynamic=True)
    for n, shape in ((4, (3,)), (5, (2, 4))):
        p = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).requires_grad_()
        actual, expected = compiled(n, p), weight(n, p)
        assert torch.equal(actual, expected)
        assert_same(*(torch.autograd.grad(x.sum(), p)[0] for x in (actual, expected)))
    outside = compiled(4, torch.tensor([-0.1, 0.5, 1.1, torch.nan], dtype=torch.float64))
    assert outside.isnan().tolist() == [True, False, True, True]


def test_the_weight_within_vmap():
    rates = torch.tensor([[0.1, 0.5], [0.9, 0.2]])
    within = torch.func.vmap(lambda p: ops.effective_weight("maxpo", 8, p, k=4))(rates)
    torch.testing.assert_close(within, ops.effective_weight("maxpo", 8, rates, k=4))
