from fractions import Fraction

import pytest
import torch

from maxrl_fast import ops
from tests import brute_force
from tests.fuzzing import FLOATS
from tests.ops.bandit import ARMS, REWARDS, N, max_at_k_gradient, mean_gradient
from tests.ops.definitions import DEFINITIONS, OPTIONS

WEIGHTED = [name for name, row in ops.ESTIMATORS.items() if row.has_weight]


@pytest.mark.parametrize("name", WEIGHTED)
def test_weight_equals_the_enumeration_of_all_groups(name):
    n, size, options = 5, ops.ESTIMATORS[name].size, OPTIONS.get(name, {})
    for k in range(size.smallest, n - size.below_n + 1) if size else (0,):
        keywords = options | ({size.name: k} if size else {})

        def advantages(r, k=k):
            return DEFINITIONS[name]([Fraction(x) for x in r], k, **options)

        for p in (Fraction(1, 10), Fraction(1, 2), Fraction(9, 10)):
            expected = brute_force.effective_weight(advantages, n, p)
            rate = torch.tensor([float(p)], dtype=torch.float64)
            actual = ops.effective_weight(name, n, rate, **keywords)
            assert actual.item() == pytest.approx(float(expected), rel=1e-9, abs=1e-9), (k, p)


@pytest.mark.parametrize("name", WEIGHTED)
def test_weight_formulas_of_the_registry_are_right(name):
    row, n, k = ops.ESTIMATORS[name], 9, 4
    if row.weight.startswith("no closed form"):
        return  # only the enumeration above can test it
    formula = row.weight.split(" at ")[0].replace("^", "**")
    formula = formula.replace(") (", ") * (").replace("N (", "N * (")
    options = OPTIONS.get(name, {}) | ({row.size.name: k} if row.size else {})
    known = {"N": n, "k": k, "order": k, "rho0": 0.1, "rho1": 0.05, "correct_weight": 0.1}
    for p in (0.02, 0.3, 0.95):
        shown = eval(formula, known | {"p": p, "beta": 1.0})
        actual = ops.effective_weight(name, n, torch.tensor(p), **options)
        assert actual.item() == pytest.approx(shown, rel=1e-6, abs=1e-9)


def test_known_weights():
    p = torch.tensor([0.01, 0.05, 0.2, 0.5, 0.8, 0.95])
    grpo = ops.effective_weight("grpo", 16, p)
    assert grpo.tolist() == pytest.approx([3.61, 3.16, 2.27, 1.87, 2.27, 3.16], abs=0.005)
    many = ops.effective_weight("maxrl", 4096, p.view(2, 3))  # nearly maximum likelihood
    torch.testing.assert_close(many, 1 / p.double().view(2, 3), rtol=1e-6, atol=0)
    for dtype in FLOATS:
        ends = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).to(dtype).requires_grad_()
        weights = ops.effective_weight("maxrl", 8, ends.T)
        assert weights.flatten().tolist() == pytest.approx([7, 1, 1, 7])
    assert ops.effective_weight("maxrl", 8, p[:0]).shape == (0,)


def assert_same(actual, expected):
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def bandit_gradient(name, **options):
    return mean_gradient(ops.group_advantage(REWARDS[ARMS], name, **options))


@pytest.mark.parametrize("k", range(1, N + 1))
def test_max_at_k_estimators_are_unbiased(k):
    exact = max_at_k_gradient(k)
    if k < N:
        assert_same(bandit_gradient("maxpo", k=k), exact / k)
        assert_same(bandit_gradient("pkpo_sloo", k=k), exact / N)
        terms = [max_at_k_gradient(j) / j for j in range(1, k + 1)]
        assert_same(bandit_gradient("maxrl", order=k), sum(terms))
    if k > 1:
        assert_same(bandit_gradient("expected_improvement", k=k), exact / k)
        assert_same(bandit_gradient("pkpo", k=k), exact / N)


def test_the_leave_one_out_baseline_of_ei_is_biased():
    biased, exact = bandit_gradient("ei_l1o", k=3), max_at_k_gradient(3) / 3
    assert (biased - exact).abs().max() > 0.05 * exact.abs().max()
    assert ops.ESTIMATORS["leave_two_out"].weight == "0"
    assert bandit_gradient("leave_two_out", k=3).abs().max() < 1e-12
