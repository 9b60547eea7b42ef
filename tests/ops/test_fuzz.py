"""Fuzz tests of advantages: valid arguments in any layout give the right value, invalid ones an error that explains itself.

The right values come from tests/ops/definitions.py and tests/brute_force.py for the same numbers. tests/fuzzing.py says how to
draw more examples. Losses are in test_fuzz_losses.py.
"""

import math
from fractions import Fraction
from itertools import pairwise

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from maxrl_fast import ops
from tests import brute_force
from tests.fuzzing import DTYPES, FLOATS, SCALARS, assert_explains, attempt, call_with_strangers, exact, settings, whole
from tests.ops.definitions import DEFINITIONS, mean

# The relative tolerance of a result in each dtype. The mantissa of float8 has 2 or 3 bits.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
TOLERANCE |= {torch.float8_e4m3fn: 0.07, torch.float8_e5m2: 0.13}
REAL = [dtype for dtype in DTYPES if not dtype.is_complex]


def assert_close(actual, expected, tolerance, scale=None):
    """Check that numbers agree within `tolerance` times the largest one, and are finite in the same places."""
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape
    assert torch.equal(actual.isfinite(), expected.isfinite()), (actual, expected)
    finite = expected.isfinite()
    if finite.any():
        scale = expected[finite].abs().max() if scale is None else scale
        assert (actual - expected)[finite].abs().max() <= tolerance * (1e-3 + scale), (actual, expected)


# --- group advantages

CHOICES = {"eps": [1e-6, 0.25, 0.0], "ddof": [0, 1], "quantile": [0.4, 1.0, 0.05], "correct_weight": [0.1, 2], "tau": [0.05, 0]}
CHOICES |= {"clamp_delta": [0.0, 0.25]}
CHOICES |= {"beta": [1.0, 0.5, -2], "penalty": [0.25, 1.0], "false_positive_rate": [0.1, 0], "false_negative_rate": [0.05, 0.5]}
PER_ROLLOUT = ("lengths", "logprobs", "log_ratios", "greedy_correct", "greedy_rewards")


def groups_of(shape, offsets, group_ids, valid):
    """Return the indices of each group's rollouts in the flattened rewards; fail if `offsets` are not valid."""
    if offsets is not None:
        bounds = whole(offsets)
        assert (bounds[0], bounds[-1], bounds) == (0, math.prod(shape), sorted(bounds))
        rows = [range(a, b) for a, b in pairwise(bounds)]
    elif group_ids is not None:
        ids = whole(group_ids)
        rows = [[i for i, x in enumerate(ids) if x == group] for group in sorted(set(ids))]
    else:
        rows = [range(g * shape[-1], (g + 1) * shape[-1]) for g in range(math.prod(shape[:-1]))]
    keep = [True] * math.prod(shape) if valid is None else valid.flatten().tolist()
    return [[i for i in row if keep[i]] for row in rows]


def flat(tensor):
    return None if tensor is None else exact(tensor).flatten().tolist()


def check_advantages(actual, rewards, estimator, *, k=None, order=None, offsets=None, group_ids=None, valid=None,
                     scale_by_k=False, max_group_size=None, **given):  # fmt: skip
    """Compare with the definition, group by group, in exact rationals."""
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    assert (actual.shape, actual.dtype, actual.requires_grad) == (rewards.shape, dtype, False)
    if not rewards.numel():
        return
    r, row = flat(rewards), ops.ESTIMATORS[estimator]
    inputs = {name: flat(given.pop(name)) for name in PER_ROLLOUT if given.get(name) is not None}
    options = {name: float(x) for name, x in given.items() if name not in PER_ROLLOUT}
    groups = groups_of(rewards.shape, offsets, group_ids, valid)
    largest, size = max(map(len, groups)), k or order or 0
    actual = actual.flatten()
    assert all(math.isfinite(r[i]) for group in groups for i in group)
    assert not (row.binary and any(r[i] not in (0, 1) for group in groups for i in group))
    for i in set(range(len(r))) - {i for group in groups for i in group}:
        assert actual[i] == 0
    for g, group in enumerate(groups):
        n, exactly = len(group), [Fraction(r[i]) for i in group]
        fits = not (row.size and size) or row.size.smallest <= size <= n - row.size.below_n
        assert fits or n < largest or n <= 1
        if not n:
            continue
        expected = [0.0] * n
        if fits and not (n == 1 and row.centred):
            if max(map(abs, exactly)) > 1e100 or is_cancelled(estimator, exactly, options):
                assert len(set(exactly)) == 1 or (actual[list(group)] != 0).any() or not row.centred
                continue
            own = {
                name: [x[g]] * n if name.startswith("greedy") and group_ids is None and len(x) == len(groups) else
                [x[i] for i in group] for name, x in inputs.items()
            }  # fmt: skip
            if "lengths" in own:
                assert min(own["lengths"]) >= 0
                own["lengths"] = [int(x) for x in own["lengths"]]
            expected = DEFINITIONS[estimator](exactly, size, **own, **options)
        expected = torch.tensor([float(x) * (size if scale_by_k else 1) for x in expected], dtype=torch.float64)
        assert_close(actual[list(group)], expected.to(dtype), TOLERANCE[dtype])


def is_cancelled(estimator, r, options):
    """Return whether the divisor consists only of rounding error because its terms cancel."""
    divisor = abs(mean(r) + Fraction(float(options.get("eps", 0))))
    return estimator.startswith("maxrl_") and 0 < divisor < max(map(abs, r)) / 10**4


def draw_tensor(draw, shape, values, dtype):
    size = math.prod(shape)
    drawn = draw(st.lists(st.sampled_from(values), min_size=size, max_size=size))
    return torch.tensor(drawn, dtype=torch.float64).to(dtype).view(shape)


@st.composite
def layouts(draw, smallest):
    """Draw offsets or group_ids, the shape, and the sizes of the groups, one of them at least `smallest`."""
    if draw(st.booleans()):
        n = draw(st.integers(smallest, smallest + 2))
        shape = draw(st.sampled_from([(n,), (2, n), (3, n), (2, 2, n), (0, n)]))
        return {}, shape, [n] * math.prod(shape[:-1])
    sizes = draw(st.lists(st.integers(0, 5), max_size=4))
    sizes.insert(draw(st.integers(0, len(sizes))), smallest)
    if draw(st.booleans()):
        bounds = torch.tensor([0, *sizes]).cumsum(0)
        return {"offsets": bounds.to(draw(st.sampled_from([torch.int64, torch.int32])))}, (sum(sizes),), sizes
    ids = [3 * g - 2 for g, n in enumerate(sizes) for _ in range(n)]
    return {"group_ids": torch.tensor(draw(st.permutations(ids)))}, (sum(sizes),), sizes


@st.composite
def advantage_arguments(draw, names=tuple(DEFINITIONS)):
    """Draw valid arguments, except that `valid` may leave too few rollouts for the size."""
    name = draw(st.sampled_from(names))
    row = ops.ESTIMATORS[name]
    arguments, shape, sizes = draw(layouts(max(1, row.size.smallest + row.size.below_n if row.size else 1)))
    dtype = draw(st.sampled_from(REAL))
    values = [0, 1, 2, 5] if not dtype.is_signed else [0, 1, 3, -2]
    if row.binary or dtype == torch.bool or name == "noisy_verifier_forward":
        values = [0, 1]
    arguments |= {"rewards": draw_tensor(draw, shape, values, dtype), "estimator": name}
    for name, option in row.options.items():
        if option.default is None or draw(st.booleans()):
            arguments[name] = draw(st.sampled_from(CHOICES[name]))
    if row.size and (row.size.required or draw(st.booleans())):
        most = max([*sizes, row.size.smallest + row.size.below_n]) - row.size.below_n
        arguments[row.size.name] = draw(st.integers(row.size.smallest, most))
    if row.scales_by_k:
        arguments["scale_by_k"] = draw(st.booleans())
    alike = math.prod(shape) == 0 or "group_ids" in arguments
    integers = st.sampled_from([torch.int64, torch.int32, torch.uint8, torch.uint64])
    for key, of, values, dtypes in (
        ("lengths", shape, [0, 1, 2, 9], integers),
        ("logprobs", shape, [-0.5, -1.0, -2.0], st.sampled_from(FLOATS)),
        ("log_ratios", shape, [-0.5, 0.0, 0.25], st.sampled_from(FLOATS)),
        ("greedy_correct", shape if alike else (len(sizes),), [0, 1], st.just(torch.bool)),
        ("greedy_rewards", shape if alike else (len(sizes),), [0.0, 1.0, 0.5, -2.0], st.sampled_from(FLOATS)),
    ):
        if key in row.inputs:
            arguments[key] = draw_tensor(draw, of, values, draw(dtypes))
    if draw(st.integers(0, 2)) == 0:
        arguments["valid"] = draw_tensor(draw, shape, [True, True, False], torch.bool)
    if draw(st.integers(0, 3)) == 0:
        arguments["max_group_size"] = draw(st.sampled_from([None, 9]))
    return arguments


@settings(400)
@hypothesis.given(st.data())
def test_group_advantage(data):
    arguments = data.draw(advantage_arguments())
    call_with_strangers(data.draw, ops.group_advantage, arguments, check_advantages, may_refuse="valid" in arguments)


THIN = {
    "maxpo": ops.maxpo_advantage,
    "expected_improvement": ops.expected_improvement,
    "leave_two_out": ops.leave_two_out_baseline,
    "maxrl": ops.maxrl_advantage,
    "grpo": ops.grpo_advantage,
    "rloo": ops.rloo_advantage,
}


@settings(100)
@hypothesis.given(st.data())
def test_thin_names(data):
    arguments = data.draw(advantage_arguments(list(THIN)))
    name = arguments.pop("estimator")

    def check(actual, **given):
        check_advantages(actual, estimator=name, **given)

    call_with_strangers(data.draw, THIN[name], arguments, check, may_refuse="valid" in arguments)


WEIGHED = [name for name, row in ops.ESTIMATORS.items() if row.has_weight]


def check_weight(actual, estimator, n, pass_rate, k=None, order=None, **options):
    assert (actual.shape, actual.dtype) == (pass_rate.shape, torch.float64)
    assert 1 <= n <= 10_000
    size = k or order or 0

    def advantages(rewards):
        return [Fraction(float(x)) for x in DEFINITIONS[estimator]([Fraction(x) for x in rewards], size, **options)]

    for p, weight in zip(flat(pass_rate), actual.flatten().tolist(), strict=True):
        assert 0 <= p <= 1
        assert math.isfinite(weight)
        if 0 < p < 1 and 1 < n < 6:
            expected = float(brute_force.effective_weight(advantages, n, Fraction(p)))
            assert weight == pytest.approx(expected, rel=1e-6, abs=1e-6), p


@settings(60)
@hypothesis.given(st.data())
def test_effective_weight(data):
    arguments = {"estimator": data.draw(st.sampled_from(WEIGHED)), "n": data.draw(st.integers(3, 4))}
    row = ops.ESTIMATORS[arguments["estimator"]]
    dtype = data.draw(st.sampled_from(FLOATS))
    shape = data.draw(st.sampled_from([(), (0,), (1,), (1, 2)]))
    arguments["pass_rate"] = draw_tensor(data.draw, shape, [0.0, 0.25, 0.8, 1.0], dtype)
    arguments |= {key: CHOICES[key][0] for key, option in row.options.items() if option.default is None}
    if row.size:
        arguments[row.size.name] = data.draw(st.integers(row.size.smallest, arguments["n"] - row.size.below_n))
    call_with_strangers(data.draw, ops.effective_weight, arguments, check_weight)


NAMES = [
    "group_advantage", "maxpo_advantage", "expected_improvement", "leave_two_out_baseline", "maxrl_advantage", "grpo_advantage",
    "rloo_advantage", "register_estimator", "effective_weight",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("estimators_as_before")
def test_every_argument_is_checked(name):
    """Replace each argument of a valid call by every wrong object."""
    function, arguments = getattr(ops, name), PLAIN[name]
    function(**arguments)
    for argument in arguments:
        for value in SCALARS:
            _, error = attempt(function, arguments | {argument: value})
            if error is not None:
                assert_explains(error)


_REWARDS = {"rewards": torch.tensor([[0.0, 1.0, 1.0]]), "valid": torch.tensor([[True, True, True]]), "max_group_size": 3}
PLAIN = {
    "group_advantage": {**_REWARDS, "estimator": "maxpo", "k": 2, "order": None, "scale_by_k": True},
    "maxpo_advantage": {**_REWARDS, "k": 2},
    "expected_improvement": {**_REWARDS, "k": 2},
    "leave_two_out_baseline": {**_REWARDS, "k": 2},
    "maxrl_advantage": {**_REWARDS, "order": 2},
    "grpo_advantage": {**_REWARDS, "eps": 1e-6, "ddof": 1},
    "rloo_advantage": _REWARDS,
    "register_estimator": {"name": "mine", "estimator": lambda rewards: rewards, "replace": True},
    "effective_weight": {"estimator": "maxpo", "n": 4, "pass_rate": torch.tensor([0.5]), "k": 2},
}


# --- one test for each bug that the fuzz tests found


def test_tensors_on_another_device_are_refused():
    """An operator takes a tensor on "meta" for tracing, and would return uninitialised memory."""
    with pytest.raises(ValueError, match="valid must be on cpu as the rewards are, got meta"):
        ops.rloo_advantage(torch.zeros(2, 3), valid=torch.ones(2, 3, dtype=torch.bool, device="meta"))


def test_large_integers_are_exact_and_complex_numbers_are_refused():
    rewards = torch.tensor([[2**24, 2**24 + 1]], dtype=torch.uint32)
    assert ops.rloo_advantage(rewards).tolist() == [[-1.0, 1.0]]
    for call in (ops.rloo_advantage, lambda x: ops.token_logprobs(x, torch.tensor([0]))):
        with pytest.raises(ValueError, match=r"must be a dense tensor of real numbers, got torch\.complex64"):
            call(torch.tensor([[1 + 2j, 3 - 1j]]))


def test_ranks_are_not_rounded_to_the_dtype_of_the_logprobs():
    rewards, logprobs = torch.tensor([0.0, 0, 0, 1, 1]), torch.tensor([-0.5, -0.5, -0.5, -0.5, -1.0])
    expected = ops.group_advantage(rewards, "unlikeliness", logprobs=logprobs)
    actual = ops.group_advantage(rewards, "unlikeliness", logprobs=logprobs.bfloat16())
    assert torch.equal(actual, expected)
    expected = ops.group_advantage(rewards.double(), "unlikeliness", logprobs=logprobs.double())
    assert torch.equal(ops.group_advantage(rewards.double(), "unlikeliness", logprobs=logprobs), expected)


def test_options_that_are_not_numbers_are_refused():
    for eps in (math.nan, math.inf, "0.1", None, 10**400, torch.tensor(0.1)):
        with pytest.raises(ValueError, match="eps"):
            ops.grpo_advantage(torch.tensor([[0.0, 1.0, 2.0]]), eps=eps)
    with pytest.raises(ValueError, match="greedy_correct must have one value per group, or the shape of rewards"):
        ops.group_advantage(torch.zeros(1, 3), "self", greedy_correct=torch.zeros(3, 1, dtype=torch.bool))
