"""Fuzz tests of advantages: valid arguments in any layout give the right value, invalid ones an
error that explains itself.

The right values come from tests/ops/definitions.py for the same numbers.
"""

import math
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.algorithms.options import REQUIRED
from tests.fuzzing import (
    FLOATS,
    REAL,
    TOLERANCE,
    assert_close,
    call_with_strangers,
    drawn_tensor,
    exact,
    replace_every_argument,
    settings,
    whole,
)
from tests.ops.definitions import DEFINITIONS, mean

CHOICES = {
    "eps": [1e-6, 0.25, 0.0],
    "ddof": [0, 1],
    "quantile": [0.4, 1.0, 0.05],
    "correct_weight": [0.1, 2],
    "tau": [0.05, 0],
}
CHOICES |= {"clamp_delta": [0.0, 0.25]}
CHOICES |= {
    "beta": [1.0, 0.5, -2],
    "penalty": [0.25, 1.0],
    "false_positive_rate": [0.1, 0],
    "false_negative_rate": [0.05, 0.5],
}
INTEGERS = [torch.int64, torch.int32, torch.uint8, torch.uint64]
PER_ROLLOUT = {  # values and dtypes
    "lengths": ([0, 1, 2, 9], INTEGERS),
    "logprobs": ([-0.5, -1.0, -2.0], FLOATS),
    "log_ratios": ([-0.5, 0.0, 0.25], FLOATS),
    "greedy_correct": ([0, 1], [torch.bool]),
    "greedy_rewards": ([0.0, 1.0, 0.5, -2.0], FLOATS),
}
THIN = {
    "maxpo": ops.maxpo_advantage,
    "expected_improvement": ops.expected_improvement,
    "leave_two_out": ops.leave_two_out_baseline,
    "maxrl": ops.maxrl_advantage,
    "grpo": ops.grpo_advantage,
    "rloo": ops.rloo_advantage,
}


def groups_of(shape, group_ids, valid):
    if group_ids is not None:
        ids = whole(group_ids)
        rows = [[i for i, x in enumerate(ids) if x == group] for group in sorted(set(ids))]
    else:
        assert len(shape) > 1
        rows = [range(g * shape[-1], (g + 1) * shape[-1]) for g in range(math.prod(shape[:-1]))]
    keep = [True] * math.prod(shape) if valid is None else valid.flatten().tolist()
    return [[i for i in row if keep[i]] for row in rows]


def flat(tensor):
    return exact(tensor).flatten().tolist()


def check_advantages(actual, rewards, estimator, *, k=None, order=None, group_ids=None,
                     valid=None, **given):  # fmt: skip
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    assert (actual.shape, actual.dtype, actual.requires_grad) == (rewards.shape, dtype, False)
    if not rewards.numel():
        return
    r, row = flat(rewards), ops.ESTIMATORS[estimator]
    inputs = {name: flat(given.pop(name)) for name in PER_ROLLOUT if given.get(name) is not None}
    options = {name: float(x) for name, x in given.items() if name not in PER_ROLLOUT}
    groups = groups_of(rewards.shape, group_ids, valid)
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
                name: [x[g]] * n
                if name.startswith("greedy") and group_ids is None and len(x) == len(groups) else
                [x[i] for i in group] for name, x in inputs.items()
            }  # fmt: skip
            if "lengths" in own:
                assert min(own["lengths"]) >= 0
                own["lengths"] = [int(x) for x in own["lengths"]]
            expected = DEFINITIONS[estimator](exactly, size, **own, **options)
        expected = torch.tensor([float(x) for x in expected], dtype=torch.float64)
        assert_close(actual[list(group)], expected.to(dtype), TOLERANCE[dtype])


def is_cancelled(estimator, r, options):
    """Return whether the divisor consists only of rounding error because its terms cancel."""
    divisor = abs(mean(r) + Fraction(float(options.get("eps", 0))))
    return estimator.startswith("maxrl_") and 0 < divisor < max(map(abs, r)) / 10**4


@st.composite
def layouts(draw, smallest):
    """Draw group_ids or none, the shape, and the sizes of the groups, one of them at least
    `smallest`.
    """
    if draw(st.booleans()):
        n = draw(st.integers(smallest, smallest + 2))
        shape = draw(st.sampled_from([(1, n), (2, n), (3, n), (2, 2, n), (0, n)]))
        return {}, shape, [n] * math.prod(shape[:-1])
    sizes = draw(st.lists(st.integers(0, 5), max_size=4))
    sizes.insert(draw(st.integers(0, len(sizes))), smallest)
    ids = [3 * g - 2 for g, n in enumerate(sizes) for _ in range(n)]
    return {"group_ids": torch.tensor(draw(st.permutations(ids)))}, (sum(sizes),), sizes


@st.composite
def advantage_arguments(draw):
    """Draw valid arguments, except that `valid` may leave too few rollouts for the size."""
    name = draw(st.sampled_from(tuple(DEFINITIONS)))
    row = ops.ESTIMATORS[name]
    arguments, shape, sizes = draw(
        layouts(max(1, row.size.smallest + row.size.below_n if row.size else 1))
    )
    dtype = draw(st.sampled_from(REAL))
    values = [0, 1, 2, 5] if not dtype.is_signed else [0, 1, 3, -2]
    if row.binary or dtype == torch.bool or name == "noisy_verifier_forward":
        values = [0, 1]
    arguments |= {"rewards": drawn_tensor(draw, shape, values, dtype), "estimator": name}
    for key, option in row.options.items():
        if option.default in (None, REQUIRED) or draw(st.booleans()):
            arguments[key] = draw(st.sampled_from(CHOICES[key]))
    if row.size and (row.size.required or draw(st.booleans())):
        most = max([*sizes, row.size.smallest + row.size.below_n]) - row.size.below_n
        arguments[row.size.name] = draw(st.integers(row.size.smallest, most))
    for key in row.inputs:
        of_groups = key.startswith("greedy") and math.prod(shape) and "group_ids" not in arguments
        values, dtypes = PER_ROLLOUT[key]
        arguments[key] = drawn_tensor(
            draw, (len(sizes),) if of_groups else shape, values, draw(st.sampled_from(dtypes))
        )
    if draw(st.integers(0, 2)) == 0:
        arguments["valid"] = drawn_tensor(draw, shape, [True, True, False], torch.bool)
    return arguments


@settings(300)
@hypothesis.given(st.data())
def test_group_advantage(data):
    arguments, function, check = (
        data.draw(advantage_arguments()),
        ops.group_advantage,
        check_advantages,
    )
    if arguments["estimator"] in THIN and data.draw(st.booleans()):
        name = arguments.pop("estimator")
        function = THIN[name]

        def check(actual, **given):
            check_advantages(actual, estimator=name, **given)

    call_with_strangers(data.draw, function, arguments, check, may_refuse="valid" in arguments)


_REWARDS = {"rewards": torch.tensor([[0.0, 1.0, 1.0]]), "valid": torch.tensor([[True, True, True]])}
PLAIN = {
    "group_advantage": {**_REWARDS, "estimator": "maxpo", "k": 2, "order": None},
    "maxpo_advantage": {**_REWARDS, "k": 2},
    "expected_improvement": {**_REWARDS, "k": 2},
    "leave_two_out_baseline": {**_REWARDS, "k": 2},
    "maxrl_advantage": {**_REWARDS, "order": 2},
    "grpo_advantage": {**_REWARDS, "eps": 1e-6, "ddof": 1},
    "rloo_advantage": _REWARDS,
    "effective_weight": {"estimator": "maxpo", "n": 4, "pass_rate": torch.tensor([0.5]), "k": 2},
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.usefixtures("estimators_as_before")
def test_every_argument_is_checked(name):
    replace_every_argument(getattr(ops, name), PLAIN[name])
