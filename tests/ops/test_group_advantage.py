import itertools
import subprocess
import sys
from fractions import Fraction
from math import comb

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
    [5, 1, 4, 1, 3, 9, 2],
]
BINARY_GROUPS = [[1] * c + [0] * (n - c) for n in (1, 2, 5, 7) for c in range(n + 1)]
KERNELS = [name for name, row in ops.ESTIMATORS.items() if row.kernel]
CORE = {name: {"k": 2} if ops.ESTIMATORS[name].size and name != "maxrl" else {} for name in KERNELS}


def tensor(rewards, dtype=torch.float64):
    return torch.tensor([float(Fraction(r)) for r in rewards], dtype=dtype)


def inputs_of(name, shape):
    """Return what an estimator takes beside rewards of this shape. Equal rewards get equal inputs
    in every fourth place.
    """
    place = torch.arange(torch.Size(shape).numel()).view(shape) % 4
    known = {"lengths": 1 + place, "logprobs": -1.0 - place.double()}
    known |= {"log_ratios": (place - 1).double() / 8, "greedy_correct": place == 3}
    known |= {"greedy_rewards": place / 4, "reward_parts": torch.stack([place % 2, place])}
    return {key: known[key] for key in ops.ESTIMATORS[name].inputs}


def call(name, rewards, size=None, **keywords):
    row, given = ops.ESTIMATORS[name], OPTIONS.get(name, {}) | inputs_of(name, rewards.shape)
    if row.size is not None and (size or row.size.required):
        given[row.size.name] = size or row.size.smallest
    return ops.group_advantage(rewards, name, **given | keywords)


def assert_matches(actual, expected, tolerance=1e-12):
    expected = tensor([*expected])
    assert actual.dtype == torch.float64
    limit = tolerance * (1 + expected.abs().max())
    assert (actual - expected).abs().max() <= limit, (actual, expected)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_size_equals_the_definition(name):
    row, some_are_not_zero = ops.ESTIMATORS[name], False
    only_binary = row.binary or name == "noisy_verifier_forward"
    for rewards in BINARY_GROUPS if only_binary else [*GROUPS, *BINARY_GROUPS]:
        n, exact = len(rewards), [Fraction(r) for r in rewards]
        inputs = inputs_of(name, (1, n))
        lists = {key: value.squeeze(-2).tolist() for key, value in inputs.items()}
        for k in range(row.size.smallest, n - row.size.below_n + 1) if row.size else [0]:
            size = {row.size.name: k} if row.size else {}
            expected = DEFINITIONS[name](exact, k, **OPTIONS.get(name, {}), **lists)
            for estimator in (name, row):
                actual = ops.group_advantage(
                    tensor(rewards)[None], estimator, **size, **OPTIONS.get(name, {}), **inputs
                )
                assert_matches(actual[0], expected, 1e-11 if name == "passk_training" else 1e-12)
            some_are_not_zero |= bool(actual.abs().max() > 0.1)
    assert some_are_not_zero


def test_every_estimator_has_a_definition():
    own = {name for name, row in ops.ESTIMATORS.items() if not row.of_run}
    assert DEFINITIONS.keys() | OVER_THE_BATCH.keys() == own


def test_quantiles_at_steps_of_the_empirical_distribution():
    rewards = torch.arange(30, dtype=torch.float64)[None]
    # in floating point, .1 * 30 > 3
    for quantile, baseline in ((0.1, 2), (0.4, 11), (1.0, 29), (0.01, 0), (0.101, 3)):
        actual = ops.group_advantage(rewards, "qae", quantile=quantile, eps=0.0)
        torch.testing.assert_close(actual, (rewards - baseline) / rewards.std())


@pytest.mark.parametrize("seed", range(4))
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


@pytest.mark.parametrize(
    ("n", "k", "correct"), [(64, 8, 3), (64, 40, 30), (4096, 2048, 2), (4096, 1, 9), (9, 3, 7)]
)
def test_large_groups_in_closed_form(n, k, correct):
    wrong = n - correct
    expected = float(Fraction(comb(wrong, k), comb(n - 1, k)))  # 0 where fewer than k are wrong
    rewards = torch.tensor([[1.0] * correct + [0.0] * wrong], dtype=torch.float64)
    close = {"rel": 1e-10, "abs": 1e-300}
    ((first, *_, last),) = ops.maxpo_advantage(rewards, k).tolist()
    assert first == pytest.approx(expected, **close)
    assert last == pytest.approx(-expected * correct / wrong, **close)
    assert (first == 0) == (wrong < k)
    centred = (rewards - correct / n) * n / correct
    torch.testing.assert_close(ops.maxrl_advantage(rewards), centred, rtol=1e-10, atol=1e-10)
    # k = N-1: the best rollout gets its lead, the others share its cost
    rewards = torch.randn(n, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    (best, second), (at, _) = rewards.topk(2)
    expected = torch.full_like(rewards, (second - best) / (n - 1)).index_fill(0, at, best - second)
    actual = ops.maxpo_advantage(rewards[None], n - 1)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


def test_equal_rewards_get_exactly_zero():
    names = """
        grpo rloo maxpo maxrl reinforce ei_l1o maxrl_ratio qae bon_mean opo lite_ppo
        reinforce_pp expected_improvement leave_two_out bon_max_second grpo_nemo
        maxpo_off_policy maxrl_off_policy
    """
    for name in names.split():
        for dtype, n in itertools.product((torch.float32, torch.float64), (7, 61)):
            value = 1.0 if ops.ESTIMATORS[name].binary else 0.1
            assert (call(name, torch.full((1, n), value, dtype=dtype)) == 0).all(), name


def test_groups_of_one_and_groups_too_small_for_k():
    rewards = torch.tensor([[3.5], [-1.0]])
    for name, row in ops.ESTIMATORS.items():
        if (row.centred and not row.binary) or name == "opo":
            size = None if name == "maxrl" else row.size and 4
            assert call(name, rewards, size).tolist() == [[0.0], [0.0]], name
    # it has no baseline
    assert call("bon_off_policy", rewards[:1], log_ratios=torch.zeros(1, 1)).tolist() == [[3.5]]
    # with a kernel and without
    for name in ("expected_improvement", "bon_mean", "pkpo_sloo", *OFF_POLICY):
        together = call(name, torch.arange(8.0), 4, group_ids=(torch.arange(8) > 2).long())
        assert together[:3].tolist() == [0, 0, 0]
        alone = {key: value[3:] for key, value in inputs_of(name, (8,)).items()}
        alone["group_ids"] = torch.zeros(5).long()
        assert torch.equal(together[3:], call(name, torch.arange(3.0, 8), 4, **alone))


def test_a_large_offset_keeps_full_precision():
    rewards = torch.tensor([[1e4, 1e4, 1e4 + 1, 1e4]])
    expected = torch.tensor([[-0.25, -0.25, 0.75, -0.25]])
    assert torch.equal(ops.group_advantage(rewards, "reinforce"), expected)
    torch.testing.assert_close(ops.grpo_advantage(rewards, eps=0.0), expected / 0.5)
    huge = 2.0**40 + torch.tensor([[0, 2.0**17, 0]], dtype=torch.float64)
    for name, given in (("reinforce", {}), ("opo", {"lengths": torch.ones(1, 3).long()})):
        (actual,) = ops.group_advantage(huge, name, **given)
        assert_matches(actual, [-(2**17) / 3, 2**18 / 3, -(2**17) / 3], 1e-15)
    integers = torch.tensor([[2**24, 2**24 + 1]], dtype=torch.uint32)  # float32 has no 2^24 + 1
    assert ops.rloo_advantage(integers).tolist() == [[-1.0, 1.0]]


@pytest.mark.parametrize("name", KERNELS)
def test_large_and_small_float64_rewards_have_the_advantages_of_ordinary_ones(name):
    """A power of two changes no bit of a result, so the results must be bitwise equal."""
    generator = torch.Generator().manual_seed(11)
    is_free = ops.ESTIMATORS[name].kernel.scale in ("std", "mean")
    options = CORE[name] | ({"eps": 0.0} if ops.ESTIMATORS[name].options else {})
    for shape, exponent in itertools.product(((7, 5), (2, 70)), (480, -404)):
        quarters = torch.randn(shape, generator=generator).mul(4).round().div(4).double()
        rewards, factor = quarters + torch.arange(shape[1]) / 64, 2.0**exponent
        expected = ops.group_advantage(rewards, name, **options)
        scaled = ops.group_advantage(rewards * factor, name, **options)
        assert expected.abs().max() > 1e-3
        assert torch.equal(scaled, expected if is_free else expected * factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", KERNELS)
def test_full_groups_of_a_cpu_take_the_short_path(monkeypatch, name, dtype):
    r = torch.randn(9, 5, generator=torch.Generator().manual_seed(6), dtype=dtype)
    size = CORE[name]
    for rewards in (r, r.T, torch._neg_view(r)):
        valid = torch.ones_like(rewards, dtype=torch.bool)
        expected = ops.group_advantage(rewards, name, valid=valid, **size)
        assert torch.equal(ops.group_advantage(rewards, name, **size), expected)
    monkeypatch.setattr(sys.modules["maxrl_fast.ops.group_advantage"], "_of_groups", None)
    ops.group_advantage(r, name, **size)


def test_where_a_check_would_wait_bad_numbers_become_nan(monkeypatch):
    module = sys.modules["maxrl_fast.ops.group_advantage"]
    monkeypatch.setattr(module, "is_host_readable", lambda x: False)  # as of a GPU's tensors
    rewards = torch.tensor([0.0, 1, torch.nan, 3, 1, 2, 0, 1, 4, 2])
    ids = {"group_ids": torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 2])}
    for name in ("qae", "maxrl"):
        actual = ops.group_advantage(rewards, name, **ids)
        assert actual[:3].isnan().all()
        torch.testing.assert_close(actual[3:6], ops.group_advantage(rewards[None, 3:6], name)[0])
        assert actual[6:].isfinite().all()
    assert ops.group_advantage(rewards.nan_to_num(), "reinforce_pp", **ids).isfinite().all()
    # it scales by the whole batch
    assert ops.group_advantage(rewards, "reinforce_pp", **ids).isnan().all()


def test_ranks_are_not_rounded_to_the_dtype_of_the_logprobs():
    logprobs = torch.tensor([[-0.5, -0.5, -0.5, -0.5, -1.0]])
    for dtype, other in ((torch.float32, torch.bfloat16), (torch.float64, torch.float32)):
        rewards = torch.tensor([[0, 0, 0, 1, 1]]).to(dtype)
        given = [{"logprobs": logprobs.to(x)} for x in (dtype, other)]
        assert torch.equal(*(ops.group_advantage(rewards, "unlikeliness", **x) for x in given))


def test_importing_the_operators_imports_no_trainer_and_nothing_else_than_torch():
    code = (
        "import sys, torch; before = set(sys.modules); from maxrl_fast import ops; "
        "print(*(set(sys.modules) - before))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = {*run.stdout.split()}
    assert "maxrl_fast.ops.group_advantage" in modules
    known = {"maxrl_fast", *sys.stdlib_module_names}
    assert {name.partition(".")[0] for name in modules} <= known
    modules -= {f"maxrl_fast.runtime{x}" for x in ("", ".loading", ".tuning")}
    own = {name.split(".")[1] for name in modules if name.startswith("maxrl_fast.")}
    assert own == {"ops", "algorithms", "errors", "_C"}
