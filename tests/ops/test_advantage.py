"""Group advantages against brute force in exact rationals, and the rules for ties, scale and shape."""

from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.ops.rank_transform import rank_transform, rank_transform_reference, rank_weights
from tests import brute_force

GROUPS = [
    [0, 1],
    [3, 3],
    [1, 0, 0],
    [0, 3, 1, 3, "0.5", 2],
    [-2, -5, "-0.25", -5, 7],
    [1, 0, 1, 1, 0, 0, 0],
    [2, 2, 2, 2],
    [5, 1, 4, 1, 3, 9, 2, 6],
]
CPU = torch.device("cpu")


def tensor(rewards, dtype=torch.float64):
    return torch.tensor([float(Fraction(r)) for r in rewards], dtype=dtype)


def assert_matches(actual, expected, tolerance=1e-12):
    expected = tensor(expected)
    assert actual.dtype == torch.float64
    assert (actual - expected).abs().max() <= tolerance * (1 + expected.abs().max()), (actual, expected)


@pytest.mark.parametrize("rewards", GROUPS)
def test_every_size_equals_the_definition(rewards):
    n = len(rewards)
    for k in range(1, n):
        assert_matches(ops.maxpo_advantage(tensor(rewards), k), brute_force.maxpo(rewards, k))
        assert_matches(ops.maxrl_advantage(tensor(rewards), k), brute_force.maxrl_order(rewards, k))
    for k in range(2, n + 1):
        ei = brute_force.expected_improvement(rewards, k)
        assert_matches(ops.expected_improvement(tensor(rewards), k), [ei[i] for i in range(n)])
        scaled = [Fraction(k, n) * ei[i] for i in range(n)]
        assert_matches(ops.group_advantage(tensor(rewards), "pkpo", k=k), scaled)
    for k in range(2, n):
        assert_matches(ops.leave_two_out_baseline(tensor(rewards), k), brute_force.leave_two_out(rewards, k))


@pytest.mark.parametrize("rewards", GROUPS)
def test_moment_estimators_equal_their_formulas(rewards):
    n, exact = len(rewards), [Fraction(r) for r in rewards]
    mean = sum(exact) / n
    assert_matches(ops.group_advantage(tensor(rewards), "reinforce"), [r - mean for r in exact])
    assert_matches(ops.group_advantage(tensor(rewards), "dr_grpo"), [r - mean for r in exact])
    assert_matches(ops.rloo_advantage(tensor(rewards)), [r - (sum(exact) - r) / (n - 1) for r in exact])
    for ddof in (0, 1):
        std = float(sum((r - mean) ** 2 for r in exact) / (n - ddof)) ** 0.5
        expected = [float(r - mean) / (std + 1e-3) for r in exact]
        assert_matches(ops.grpo_advantage(tensor(rewards), eps=1e-3, ddof=ddof), expected)


@pytest.mark.parametrize("correct", range(8))
def test_maxrl_of_binary_rewards_is_algorithm_1(correct):
    rewards = [1] * correct + [0] * (7 - correct)
    assert_matches(ops.maxrl_advantage(tensor(rewards)), brute_force.maxrl(rewards))
    # float32 and integers too, to rounding
    for dtype in (torch.float32, torch.int64):
        actual = ops.maxrl_advantage(torch.tensor(rewards, dtype=dtype))
        torch.testing.assert_close(actual, tensor(brute_force.maxrl(rewards), torch.float32), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("k", [2, 32, 512, 1000, 1023])
def test_float32_at_1024_rollouts(k):
    rewards = torch.randn(3, 1024, generator=torch.Generator().manual_seed(k))
    exact = ops.maxpo_advantage(rewards.double(), k)
    error = (ops.maxpo_advantage(rewards, k) - exact).abs().max() / exact.abs().max()
    assert exact.abs().max() > 1e-4
    assert error < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["mean", "rloo", "maxpo", "ei", "maxrl"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (0, 4), (5, 31), (2, 257), (1100, 16)])
def test_kernel_equals_the_reference(shape, kind, dtype):
    generator = torch.Generator().manual_seed(0)
    rewards = (torch.randn(shape, generator=generator, dtype=dtype) * 4).round() / 4 + 100  # ties and an offset
    weights = rank_weights(kind, shape[1], min(3, max(shape[1] - 1, 1)), CPU)
    for centred in (True, False):
        actual, expected = rank_transform(rewards, weights, centred), rank_transform_reference(rewards, weights, centred)
        tolerance = 1e-6 if dtype == torch.float32 else 1e-13
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
        assert shape in ((1, 1), (0, 4)) or actual.abs().max() > 0.1


def test_equal_rewards_get_exactly_zero():
    for name, size in (("grpo", {}), ("rloo", {}), ("maxpo", {"k": 3}), ("maxrl", {}), ("reinforce", {})):
        assert (ops.group_advantage(torch.full((7,), 0.1), name, **size) == 0).all(), name


def test_degenerate_shapes_and_eps():
    assert ops.rloo_advantage(torch.zeros(3, 0)).shape == (3, 0)
    assert (ops.grpo_advantage(torch.ones(4), eps=0.0) == 0).all()


def test_a_group_of_one_has_no_advantage():
    for name in ("grpo", "rloo", "reinforce", "dr_grpo"):
        assert ops.group_advantage(torch.tensor([[3.5], [-1.0]]), name).tolist() == [[0.0], [0.0]]


def test_a_large_offset_keeps_full_precision():
    rewards = torch.tensor([1e4, 1e4, 1e4 + 1, 1e4])
    expected = torch.tensor([-0.25, -0.25, 0.75, -0.25])
    assert torch.equal(ops.group_advantage(rewards, "reinforce"), expected)
    torch.testing.assert_close(ops.grpo_advantage(rewards, eps=0.0), expected / 0.5)


@hypothesis.given(st.lists(st.integers(-3, 3), min_size=2, max_size=24), st.data())
@hypothesis.settings(deadline=None, max_examples=100)
def test_ties_permutation_shift_and_scale(rewards, data):
    n = len(rewards)
    k = data.draw(st.integers(1, n - 1))
    order = data.draw(st.permutations(range(n)))
    r = torch.tensor(rewards, dtype=torch.float32)
    for name, options in (("maxpo", {"k": k}), ("maxrl", {"order": k}), ("rloo", {}), ("grpo", {})):
        a = ops.group_advantage(r, name, **options)
        assert abs(float(a.double().sum())) <= 1e-5 * (1 + float(a.abs().max())) * n
        assert torch.equal(ops.group_advantage(r[order], name, **options), a[order])  # bitwise
        assert torch.equal(ops.group_advantage(r + 64, name, **options), a)  # exact in float32, so bitwise too
        for i in range(n):
            assert (a[r == r[i]] == a[i]).all()
        if name != "grpo":
            torch.testing.assert_close(ops.group_advantage(4 * r, name, **options), 4 * a)


def test_shapes_dtypes_and_batches():
    generator = torch.Generator().manual_seed(1)
    r = torch.rand(2, 3, 8, generator=generator)
    a = ops.maxpo_advantage(r, 3)
    assert a.shape == r.shape
    assert torch.equal(ops.maxpo_advantage(r[1, 2], 3), a[1, 2])  # a group's result does not depend on its batch
    strided = torch.rand(8, 6, generator=generator).t()
    assert torch.equal(ops.maxpo_advantage(strided, 3), ops.maxpo_advantage(strided.contiguous(), 3))
    solved = r > 0.6
    assert torch.equal(ops.rloo_advantage(solved), ops.rloo_advantage(solved.float()))
    assert ops.rloo_advantage(solved).dtype == torch.float32
    half = ops.rloo_advantage(r.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, ops.rloo_advantage(r.bfloat16().float()).bfloat16())
    assert ops.maxpo_advantage(torch.zeros(0, 8), 3).shape == (0, 8)
    wide = torch.rand(1200, 16, generator=generator)  # above the threshold for threads
    assert torch.equal(ops.maxpo_advantage(wide, 4)[700], ops.maxpo_advantage(wide[700], 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: ops.maxpo_advantage(r, 4), r"maxpo needs 1 <= k <= N-1 = 3 for N = 4 rollouts, got 4"),
        (lambda r: ops.maxpo_advantage(r, 2.0), r"maxpo needs a whole number as k, got 2.0"),
        (lambda r: ops.maxpo_advantage(r, 0), r"maxpo needs 1 <= k <= N-1 = 3 for N = 4 rollouts, got 0"),
        (lambda r: ops.expected_improvement(r, 5), r"needs 2 <= k <= N = 4 for N = 4 rollouts, got 5"),
        (lambda r: ops.leave_two_out_baseline(r, 4), r"needs 2 <= k <= N-1 = 3"),
        (lambda r: ops.group_advantage(r, "maxpo"), r"maxpo needs k"),
        (lambda r: ops.group_advantage(r, "grpo", k=2), r"grpo takes no k, got k=2"),
        (lambda r: ops.group_advantage(r, "rloo", eps=0.1), r"rloo takes no eps"),
        (lambda r: ops.group_advantage(r, "maxpoo", k=2), r"estimator must be one of maxpo, .*got 'maxpoo'"),
        (lambda r: ops.rloo_advantage(r * float("nan")), r"finite, got nan in group 0, rollout 0"),
        (lambda r: ops.rloo_advantage(torch.stack([r, r / torch.tensor([1, 1, 0, 1])])), r"inf in group 1, rollout 2"),
        (lambda r: rank_transform(r[None], torch.ones(3), True), r"weights must be a contiguous torch.float64"),
        (
            lambda r: rank_transform(r[None].half(), torch.ones(3).double(), True),
            r"float32 or torch.float64, got torch.float16",
        ),
    ],
)
def test_bad_input_says_what_was_wanted(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.tensor([1.0, 2.0, 3.0, 4.0]))


def test_the_op_is_registered_soundly():
    rewards = torch.rand(3, 5, dtype=torch.float64)
    torch.library.opcheck(rank_transform, (rewards, rank_weights("maxpo", 5, 2, CPU), True))
