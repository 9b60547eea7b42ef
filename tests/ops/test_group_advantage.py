"""Group advantages against their definitions in exact rationals, and the rules for ties, scale,
layout and dtype.
"""

import itertools
import subprocess
import sys
import warnings
from fractions import Fraction
from math import comb

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from maxrl_fast import ops
from tests.ops.definitions import DEFINITIONS, OFF_POLICY, OPTIONS, OVER_THE_BATCH

GROUPS = [
    [0, 1],
    [3, 3],
    [1, 0, 0],
    [0, 3, 1, 3, "0.5", 2],
    [-2, -5, "-0.25", -5, 7],
    [5, 1, 4, 1, 3, 9, 2, 6],
]
BINARY_GROUPS = [[1] * c + [0] * (n - c) for n in (1, 2, 5, 8) for c in range(n + 1)]
KERNELS = [name for name, row in ops.ESTIMATORS.items() if row.kernel]
CORE = {name: {"k": 2} if ops.ESTIMATORS[name].size and name != "maxrl" else {} for name in KERNELS}


def tensor(rewards, dtype=torch.float64):
    return torch.tensor([float(Fraction(r)) for r in rewards], dtype=dtype)


def inputs_of(name, shape):
    """Return what an estimator takes beside rewards of this shape. Equal rewards get equal inputs
    in every fourth place.
    """
    place = torch.arange(torch.Size(shape).numel()).view(shape) % 4
    known = {
        "lengths": 1 + place,
        "logprobs": -1.0 - place.double(),
        "log_ratios": (place - 1).double() / 8,
    }
    known |= {
        "greedy_correct": place == 3,
        "greedy_rewards": place / 4,
        "reward_parts": torch.stack([place % 2, place]),
    }
    return {key: known[key] for key in ops.ESTIMATORS[name].inputs}


def call(name, rewards, size=None, **keywords):
    """Call group_advantage with all that the estimator needs."""
    row = ops.ESTIMATORS[name]
    sizes = (
        {row.size.name: size or row.size.smallest}
        if row.size is not None and (size or row.size.required)
        else {}
    )
    return ops.group_advantage(
        rewards, name, **sizes, **OPTIONS.get(name, {}), **inputs_of(name, rewards.shape) | keywords
    )


def assert_matches(actual, expected, tolerance=1e-12):
    expected = tensor([*expected])
    assert actual.dtype == torch.float64
    assert (actual - expected).abs().max() <= tolerance * (1 + expected.abs().max()), (
        actual,
        expected,
    )


@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_size_equals_the_definition(name):
    """The kernel where there is one, and the function."""
    row, some_are_not_zero = ops.ESTIMATORS[name], False
    only_binary = row.binary or name == "noisy_verifier_forward"
    for rewards in BINARY_GROUPS if only_binary else [*GROUPS, *BINARY_GROUPS]:
        n, exact = len(rewards), [Fraction(r) for r in rewards]
        inputs = inputs_of(name, (n,))
        lists = {key: value.tolist() for key, value in inputs.items()}
        for k in range(row.size.smallest, n - row.size.below_n + 1) if row.size else [0]:
            size = {row.size.name: k} if row.size else {}
            expected = DEFINITIONS[name](exact, k, **OPTIONS.get(name, {}), **lists)
            for estimator in (name, row):
                actual = ops.group_advantage(
                    tensor(rewards), estimator, **size, **OPTIONS.get(name, {}), **inputs
                )
                assert_matches(actual, expected, 1e-11 if name == "passk_training" else 1e-12)
            some_are_not_zero |= bool(actual.abs().max() > 0.1)
    assert some_are_not_zero


def test_every_estimator_has_a_definition():
    assert DEFINITIONS.keys() | OVER_THE_BATCH.keys() == ops.ESTIMATORS.keys()


def test_quantiles_at_steps_of_the_empirical_distribution():
    rewards = torch.arange(30, dtype=torch.float64)
    # in floating point, .1 * 30 > 3
    for quantile, baseline in ((0.1, 2), (0.4, 11), (1.0, 29), (0.01, 0), (0.101, 3)):
        actual = ops.group_advantage(rewards, "qae", quantile=quantile, eps=0.0)
        torch.testing.assert_close(actual, (rewards - baseline) / rewards.std())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", OVER_THE_BATCH)
def test_estimators_over_the_batch_equal_the_definition(name, seed):
    """Some rollouts are left out; a group has one rollout, one equal rewards, and one none."""
    generator, row = torch.Generator().manual_seed(seed), ops.ESTIMATORS[name]
    r = torch.randint(0, 4, (5, 5), generator=generator).double()
    r[0] = 2
    valid = (
        torch.rand(5, 5, generator=generator) < 0.7 if seed else torch.ones(5, 5, dtype=torch.bool)
    )
    if seed:
        valid[1:3] = False
        valid[2, 3] = True
    parts = torch.randint(-3, 4, (3, 5, 5), generator=generator).double()
    parts[0] %= 2
    parts[1:][torch.rand(2, 5, 5, generator=generator) < 0.2] = torch.nan
    known = {"lengths": torch.randint(0, 9, (5, 5), generator=generator), "reward_parts": parts}
    inputs = {key: known[key] for key in row.inputs}
    options = {"eps": 0.25, "ddof": 0} if seed % 2 else {}
    options |= {"score_range": 0.25} if name == "hero" and seed % 2 else {}
    options |= {"reward_weights": [1.0, 0.5, -2.0]} if "reward_parts" in inputs else {}
    actual = ops.group_advantage(r, name, valid=valid, **inputs, **options)
    assert (actual[~valid] == 0).all()
    order = torch.randperm(25, generator=generator)
    shuffled = {key: value.flatten(-2)[..., order] for key, value in inputs.items()}
    layout = {
        "group_ids": torch.arange(25).div(5, rounding_mode="floor")[order],
        "valid": valid.flatten()[order],
    }
    by_ids = ops.group_advantage(r.flatten()[order], name, **layout, **shuffled, **options)
    torch.testing.assert_close(by_ids, actual.flatten()[order], rtol=1e-12, atol=1e-12)
    kept = [g for g in range(5) if valid[g].any()]

    def lists(x):
        exact = [[None if v != v else Fraction(v) for v in x[g][valid[g]].tolist()] for g in kept]
        return [[int(v) for v in group] for group in exact] if x.dtype == torch.int64 else exact

    given = {
        key: [lists(part) for part in x] if x.dim() == 3 else lists(x) for key, x in inputs.items()
    }
    expected = OVER_THE_BATCH[name](lists(r), **given, **options)
    assert_matches(actual[kept][valid[kept]], itertools.chain(*expected), 1e-9)
    assert actual.abs().max() > 0.1


def test_the_greedy_response_is_given_for_each_prompt_or_rollout():
    rewards = torch.tensor([[1.0, 0, 0.5], [1, 1, 1], [0, 0, 0]], dtype=torch.float64)
    greedy, valid = (
        torch.tensor([0.5, torch.nan, -1]),
        torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]]).bool(),
    )
    expected = torch.tensor([[0.5, 0, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.float64)
    # NaN as where the greedy response has no reward
    for given in (greedy, greedy[:, None].expand(3, 3)):
        assert torch.equal(
            ops.group_advantage(rewards, "remax", greedy_rewards=given, valid=valid), expected
        )
    uneven = {"offsets": torch.tensor([0, 3, 6, 9]), "valid": valid.flatten()}
    assert torch.equal(
        ops.group_advantage(rewards.flatten(), "remax", greedy_rewards=greedy, **uneven),
        expected.flatten(),
    )


@pytest.mark.parametrize(
    ("n", "k", "correct"), [(64, 8, 3), (64, 40, 30), (4096, 2048, 2), (4096, 1, 9), (9, 3, 7)]
)
def test_large_groups_in_closed_form(n, k, correct):
    wrong = n - correct
    expected = float(Fraction(comb(wrong, k), comb(n - 1, k)))  # 0 where fewer than k are wrong
    rewards = torch.tensor([1.0] * correct + [0.0] * wrong, dtype=torch.float64)
    advantages = ops.maxpo_advantage(rewards, k)
    assert advantages[0].item() == pytest.approx(expected, rel=1e-10, abs=1e-300)
    assert advantages[-1].item() == pytest.approx(
        -expected * correct / wrong, rel=1e-10, abs=1e-300
    )
    assert (advantages[0] == 0) == (wrong < k)
    mean = correct / n
    torch.testing.assert_close(
        ops.maxrl_advantage(rewards), (rewards - mean) / mean, rtol=1e-10, atol=1e-10
    )
    # k = N-1: the best rollout gets its lead, the others share its cost.
    rewards = torch.randn(n, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    (best, second), (first, _) = rewards.topk(2)
    expected = torch.full_like(rewards, (second - best) / (n - 1)).index_fill(
        0, first, best - second
    )
    torch.testing.assert_close(
        ops.maxpo_advantage(rewards, n - 1), expected, rtol=1e-11, atol=1e-12
    )


def test_equal_rewards_get_exactly_zero():
    names = """
        grpo rloo maxpo maxrl reinforce ei_l1o maxrl_ratio qae bon_mean opo lite_ppo
        reinforce_pp expected_improvement leave_two_out bon_max_second grpo_nemo
        maxpo_off_policy maxrl_off_policy
    """
    for name in names.split():
        for dtype, n in itertools.product((torch.float32, torch.float64), (7, 61)):
            value = 1.0 if ops.ESTIMATORS[name].binary else 0.1
            assert (call(name, torch.full((n,), value, dtype=dtype)) == 0).all(), name


def test_groups_of_one_and_groups_too_small_for_k():
    rewards = torch.tensor([[3.5], [-1.0]])
    for name, row in ops.ESTIMATORS.items():
        if row.centred and not row.binary:
            assert call(name, rewards, None if name == "maxrl" else row.size and 4).tolist() == [
                [0.0],
                [0.0],
            ], name
    assert call("opo", rewards).tolist() == [[0.0], [0.0]]
    # it has no baseline
    assert call("bon_off_policy", rewards[:1], log_ratios=torch.zeros(1, 1)).tolist() == [[3.5]]
    # with a kernel and without
    for name in ("expected_improvement", "bon_mean", "pkpo_sloo", *OFF_POLICY):
        together = call(name, torch.arange(8.0), 4, offsets=torch.tensor([0, 3, 8]))
        assert together[:3].tolist() == [0, 0, 0]
        alone = {key: value[3:] for key, value in inputs_of(name, (8,)).items()}
        assert torch.equal(together[3:], call(name, torch.arange(3.0, 8), 4, **alone))


def test_degenerate_shapes():
    assert ops.rloo_advantage(torch.zeros(3, 0)).shape == (3, 0)
    assert ops.rloo_advantage(torch.zeros(0, 3, dtype=torch.int64)).dtype == torch.float32
    assert ops.rloo_advantage(torch.zeros(0), offsets=torch.tensor([0, 0])).shape == (0,)
    assert not ops.rloo_advantage(torch.tensor([0.0, 1.0], requires_grad=True)).requires_grad


def test_a_large_offset_keeps_full_precision():
    rewards = torch.tensor([1e4, 1e4, 1e4 + 1, 1e4])
    expected = torch.tensor([-0.25, -0.25, 0.75, -0.25])
    assert torch.equal(ops.group_advantage(rewards, "reinforce"), expected)
    torch.testing.assert_close(ops.grpo_advantage(rewards, eps=0.0), expected / 0.5)
    huge = 2.0**40 + torch.tensor([0, 2.0**17, 0], dtype=torch.float64)
    for name, given in (("reinforce", {}), ("opo", {"lengths": torch.ones(3, dtype=torch.int64)})):
        assert_matches(
            ops.group_advantage(huge, name, **given), [-(2**17) / 3, 2**18 / 3, -(2**17) / 3], 1e-15
        )
    integers = torch.tensor([[2**24, 2**24 + 1]], dtype=torch.uint32)  # float32 has no 2^24 + 1
    assert ops.rloo_advantage(integers).tolist() == [[-1.0, 1.0]]


@hypothesis.given(
    st.lists(st.integers(-3, 3) | st.floats(-1e6, 1e6, width=32), min_size=3, max_size=70),
    st.randoms(use_true_random=False),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_ties_order_shift_and_scale_of_the_core(rewards, random):
    order = random.sample(range(len(rewards)), len(rewards))
    for name, size in CORE.items():
        r = torch.tensor(rewards).float()
        a, kernel = ops.group_advantage(r, name, **size), ops.ESTIMATORS[name].kernel
        permuted = ops.group_advantage(r[order], name, **size)
        if kernel.table is not None:  # it sums over sorted rewards
            assert torch.equal(permuted, a[order]), name
        torch.testing.assert_close(permuted, a[order], rtol=1e-6, atol=1e-6 * float(a.abs().max()))
        assert all((a[r == x] == a[i]).all() for i, x in enumerate(r)), name
        are_small = all(isinstance(x, int) for x in rewards)  # then sums are exact in float32
        if are_small and name in (
            "maxpo",
            "maxrl",
            "rloo",
            "grpo",
            "reinforce",
            "ei_l1o",
            "bon_max_second",
            "leave_two_out",
        ):
            assert torch.equal(ops.group_advantage(r + 64, name, **size), a), name
        if kernel.scale in ("one", "leave_one_out"):
            torch.testing.assert_close(ops.group_advantage(4 * r, name, **size), 4 * a)


@pytest.mark.parametrize("name", KERNELS)
def test_results_do_not_depend_on_threads(name):
    """Of so many groups that several threads take them."""
    r = (torch.rand(40, 30, 8, generator=torch.Generator().manual_seed(1)) < 0.4).float()
    a, threads = call(name, r), torch.get_num_threads()
    try:
        torch.set_num_threads(3 if threads == 1 else 1)
        assert torch.equal(call(name, r), a)
    finally:
        torch.set_num_threads(threads)


R, RR, NAN = (
    torch.tensor([0.0, 1, 0, 1]),
    torch.tensor([[0.0, 1, 0, 1], [0, 1, 0, 1]]),
    torch.tensor([0, 0, torch.nan, 0]),
)
PAIRS, ALL = {"offsets": torch.tensor([0, 2, 4])}, {"offsets": torch.tensor([0, 4])}


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("maxpo", {"k": 4}, r"maxpo needs 1 <= k <= N-1 = 3 for N = 4 rollouts, got 4"),
        ("maxpo", {"k": 2.0}, r"maxpo needs an integer as k, got 2.0"),
        (
            "expected_improvement",
            {"k": 2, "rewards": R[:1]},
            r"needs 2 <= k <= N = 1 for N = 1 rollouts, got 2",
        ),
        ("maxrl", {"order": 4}, r"maxrl needs 1 <= order <= N-1 = 3"),
        ("maxpo", {}, r"maxpo needs k, 1 <= k <= N-1"),
        ("grpo", {"k": 2}, r"grpo does not use k, got k=2"),
        ("rloo", {"eps": 1.0}, r"rloo takes no options, got .eps."),
        ("grpo", {"epsilon": 1.0}, r"takes the options eps, ddof, .* did you mean .eps."),
        ("grpo", {"eps": 10**400}, r"eps of grpo must be a finite number of at least 0"),
        ("grpo", {"eps": None}, r"grpo needs eps, a finite number"),
        ("hero", {"reward_parts": RR, "score_range": 0.5}, r"above 0 and below .5, got 0.5"),
        (
            "noisy_verifier_backward",
            {"false_positive_rate": 0.5, "false_negative_rate": 0.5},
            r"add up to less than 1",
        ),
        ("opo", {}, r"opo needs lengths"),
        ("rloo", {"lengths": R.long()}, r"rloo does not use lengths"),
        ("opo", {"lengths": R}, r"lengths must be integers, got torch.float32"),
        ("opo", {"lengths": R[:2].long()}, r"lengths must have the shape of rewards, \(4,\)"),
        ("opo", {"lengths": torch.tensor([1, 2, -4, 3])}, r"lengths must be at least 0, got -4"),
        ("best", {}, r"estimator must be one of maxpo, .*, got 'best'"),
        ("rloo", {"rewards": torch.tensor(1.0)}, r"rewards must be \[..., N\], got the shape \(\)"),
        ("rloo", {"rewards": R[None], **ALL}, r"rewards must be flat \[S\]"),
        ("rloo", {"rewards": R.cfloat()}, r"of real numbers, got torch.complex64"),
        ("rloo", {"valid": R}, r"valid must be bool, got torch.float32"),
        ("rloo", {"valid": torch.ones(4, device="meta") > 0}, r"valid must be on cpu as"),
        ("rloo", {"offsets": torch.tensor([0, 3])}, r"must rise from 0 to 4, got from 0 to 3"),
        ("qae", {"offsets": torch.tensor([0, 3, 2, 4])}, r"got 3 followed by 2 at group 1"),
        ("rloo", {"offsets": torch.tensor([1, 4])}, r"must rise from 0 to 4, got from 1 to 4"),
        ("rloo", {"offsets": torch.tensor([0.0, 4.0])}, r"offsets must be int64 \[G\+1\]"),
        ("rloo", {"group_ids": R}, r"group_ids must be integers, got torch.float32"),
        ("rloo", {"group_ids": torch.zeros(3).long()}, r"group_ids must have the shape of rewards"),
        ("rloo", {"group_ids": R.long(), **ALL}, r"give offsets or group_ids, not both"),
        ("maxpo", {"k": 2, **PAIRS}, r"maxpo needs 1 <= k <= N-1 = 1 for N = 2 rollouts, got 2"),
        ("bon_mean", {"k": 3, **PAIRS}, r"bon_mean needs 1 <= k <= N = 2 for N = 2 rollouts"),
        ("passk_training", {"k": 2, "rewards": R / 2}, r"must be 0 or 1 .*, got 0.5 in group 0"),
        ("self", {"greedy_correct": R[:3] > 0}, r"must have one value per group, .* shape \(3,\)"),
        ("self", {"greedy_correct": R[None, :3].T > 0}, r"must have one value per group"),
        ("remax", {"greedy_rewards": NAN[2:3]}, r"must be finite, got nan in group 0"),
        ("gdpo", {"reward_parts": R}, r"reward_parts must have the shape \(R, 4\), got \(4,\)"),
        ("gdpo", {"reward_parts": RR, "reward_weights": [1]}, r"each of the 2 rewards, got 1"),
        (
            "gdpo",
            {"reward_parts": RR, "reward_weights": [1, torch.nan]},
            r"must be a finite number",
        ),
        ("gdpo", {"reward_parts": RR - torch.inf}, r"got -inf in group 0, rollout 0"),
        ("hero", {"reward_parts": RR[:1]}, r"takes a verifier of weight 1 and one or more scores"),
        ("hero", {"reward_parts": RR, "reward_weights": [2, 1]}, r"takes a verifier of weight 1"),
        ("hero", {"reward_parts": RR + 0.5}, r"the verifier of hero must give 0 or 1, got 0.5"),
        ("unlikeliness", {"logprobs": R - torch.inf}, r"must be finite, got -inf in group 0"),
        ("maxpo_off_policy", {"k": 2, "log_ratios": NAN}, "got nan in group 0, rollout 2"),
        ("qae", {"rewards": R.double() * 1e160}, r"at most 1e\+150 in magnitude .*, got 1e\+160"),
        ("grpo", {"rewards": R.double() * 1e160}, r"at most 1e\+150 in magnitude .*, got 1e\+160"),
        ("maxpo", {"rewards": R.double() * -1e160, "k": 2}, r"for maxpo, got -1e\+160 in group 0"),
        (
            "w_reinforce",
            {"correct_weight": 1e300},
            r"advantages .* must be finite in torch.float32",
        ),
        ("unlikeliness", {"logprobs": R, "penalty": 1e300}, r"the advantages .* must be finite"),
        ("rloo", {"rewards": (2 * R - 1).half() * 65504}, r"finite in torch.float16, got -inf at "),
    ],
)
def test_bad_input_is_refused_by_name(name, given, message):
    with pytest.raises(ValueError, match=message):
        ops.group_advantage(estimator=name, **{"rewards": R} | given)


def test_nonfinite_rewards_are_refused_by_name():
    for value, name in itertools.product(
        (torch.nan, torch.inf, -torch.inf), ("rloo", "maxpo", "passk_training", "qae")
    ):
        rewards = torch.zeros(5, 7, 40)
        rewards[3, 2, 5], rewards[4, 0, 1] = value, torch.nan
        with pytest.raises(ValueError, match=rf"finite, got {value} in group 23, rollout 5"):
            call(name, rewards)
    rewards = torch.zeros(10)
    rewards[7] = torch.nan
    offsets, ids = torch.tensor([0, 3, 3, 6, 10]), torch.tensor([2, 1, 1, 1, 2, 1, 2, 1, 2, 2])
    for name in ("rloo", "qae"):
        with pytest.raises(ValueError, match=r"got nan in group 3, rollout 1 \(index 7\)"):
            ops.group_advantage(rewards, name, offsets=offsets)
        with pytest.raises(ValueError, match=r"got nan in group 0, rollout 4 \(index 7\)"):
            ops.group_advantage(rewards, name, group_ids=ids)


@pytest.mark.parametrize("name", KERNELS)
def test_large_and_small_float64_rewards_have_the_advantages_of_ordinary_ones(name):
    """A power of two changes no bit of a result, so the results must be bitwise equal."""
    generator = torch.Generator().manual_seed(11)
    is_free = ops.ESTIMATORS[name].kernel.scale in ("std", "mean")
    eps = {"eps": 0.0} if ops.ESTIMATORS[name].options else {}
    for shape, exponent in itertools.product(((7, 5), (2, 70)), (480, -404)):
        rewards = (
            torch.randn(shape, generator=generator).mul(4).round().div(4).double()
            + torch.arange(shape[1]) / 64
        )
        expected = ops.group_advantage(rewards, name, **eps, **CORE[name])
        scaled = ops.group_advantage(rewards * 2.0**exponent, name, **eps, **CORE[name])
        assert expected.abs().max() > 1e-3
        assert torch.equal(scaled, expected if is_free else expected * 2.0**exponent)


def test_the_operator_refuses_what_its_callers_convert():
    op, rewards = torch.ops.maxrl_fast.group_advantage.default, torch.rand(3, 5)
    for given, message in (
        ((rewards.T, None), r"rewards must be a contiguous torch.float32 tensor"),
        ((rewards.half(), None), r"rewards must be float32 or float64 \[G, N\], got torch.float16"),
        ((rewards, torch.ones(3).bool()), r"valid must be a contiguous torch.bool tensor of shape"),
    ):
        with pytest.raises(ValueError, match=message):
            op(*given, "rloo", 0, [])


def test_compiled_as_one_graph():
    generator = torch.Generator().manual_seed(2)
    rewards = torch.rand(6, 8, generator=generator)
    flat, ids = rewards.flatten(), torch.arange(48) % 6
    lengths = torch.randint(1, 9, (6, 8), generator=generator)

    def step(r, f, valid):
        return (
            2 * ops.maxpo_advantage(r, 3),
            ops.grpo_advantage(r, eps=1e-4, valid=valid) + 1,
            ops.maxrl_advantage(f, group_ids=ids),
            ops.group_advantage(f, "qae", group_ids=ids),
            ops.group_advantage(f, "bon_mean", k=2, offsets=torch.tensor([0, 20, 48])),
            ops.group_advantage(r, "opo", lengths=lengths),
            ops.group_advantage(r, "unlikeliness", logprobs=-r),
            ops.group_advantage(r, "reinforce_pp"),
            ops.group_advantage(r, "maxrl_off_policy", log_ratios=r - 0.5, valid=valid),
        )

    valid = rewards > 0.3
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        results = compiled(rewards, flat, valid)
    for actual, expected in zip(results, step(rewards, flat, valid), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


def test_where_a_check_would_wait_bad_numbers_become_nan():
    rewards = torch.tensor([0.0, 1, torch.nan, 3, 1, 2, 0, 1, 4, 2])
    compiled = torch.compile(
        lambda r, name: ops.group_advantage(r, name, offsets=torch.tensor([0, 3, 6, 10])),
        fullgraph=True,
        backend="aot_eager",
    )
    for name in ("qae", "maxrl", "grpo"):
        actual = compiled(rewards, name)
        assert actual[:3].isnan().all()
        torch.testing.assert_close(actual[3:6], ops.group_advantage(rewards[3:6], name))
        assert actual[6:].isfinite().all()
    assert compiled(rewards.nan_to_num(), "reinforce_pp").isfinite().all()
    assert compiled(rewards, "reinforce_pp").isnan().all()  # it scales by the whole batch


def test_ranks_are_not_rounded_to_the_dtype_of_the_logprobs():
    for dtype, other in ((torch.float32, torch.bfloat16), (torch.float64, torch.float32)):
        rewards, logprobs = (
            torch.tensor([0, 0, 0, 1, 1]).to(dtype),
            torch.tensor([-0.5, -0.5, -0.5, -0.5, -1.0]),
        )
        expected, actual = (
            ops.group_advantage(rewards, "unlikeliness", logprobs=logprobs.to(x))
            for x in (dtype, other)
        )
        assert torch.equal(actual, expected)


def test_importing_the_operators_imports_no_trainer_and_nothing_else_than_torch():
    code = (
        "import sys, torch; before = set(sys.modules); from maxrl_fast import ops; "
        "print(*(set(sys.modules) - before))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = {name for name in run.stdout.split() if name.startswith("maxrl_fast.")}
    assert "maxrl_fast.ops.group_advantage" in modules
    modules -= {f"maxrl_fast.runtime{x}" for x in ("", ".loading", ".tuning")}
    assert {name.split(".")[1] for name in modules} == {"ops", "algorithms", "errors", "_C"}
    known = {"maxrl_fast", *sys.stdlib_module_names}
    assert {name.partition(".")[0] for name in run.stdout.split()} <= known
