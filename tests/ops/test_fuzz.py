"""Fuzz tests of every op: valid arguments in any layout give the right value, invalid ones an error that explains itself.

The right values come from tests/ops/definitions.py, tests/brute_force.py and maxrl_fast/ops/token_loss_reference.py for the
same numbers. tests/fuzzing.py says how to draw more examples.
"""

import math
from fractions import Fraction
from itertools import pairwise

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.ops.token_batch import AGGREGATIONS, KL_ESTIMATORS, LossTerms, TokenBatch, loss_terms
from maxrl_fast.ops.token_loss_kernel import LossSums
from maxrl_fast.ops.token_loss_reference import token_logprobs_reference, token_loss_reference
from tests import brute_force
from tests.fuzzing import DTYPES, FLOATS, SCALARS, assert_explains, attempt, call_with_strangers, exact, settings, whole
from tests.ops.definitions import DEFINITIONS, mean
from tests.ops.test_pacs import slow_loss

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


# --- token losses


def as_float(x):
    """Return a float; numbers that are too large become infinite."""
    return math.inf if isinstance(x, int) and x > 10**308 else float(x)


def is_positive(x):
    return 0 < x < math.inf


def reference_rows(logits, targets, temperature, counts):
    """Return targets and temperatures, [T] each; masked ones may be anything."""
    numbers = whole(targets)
    tau = flat(temperature) if isinstance(temperature, torch.Tensor) else [float(temperature)] * len(logits)
    assert len(numbers) == len(tau) == len(counts) == len(logits)
    assert all(0 <= y < logits.shape[1] and is_positive(t) for y, t, c in zip(numbers, tau, counts, strict=True) if c)
    targets = torch.tensor([y if c else 0 for y, c in zip(numbers, counts, strict=True)], dtype=torch.int64)
    return targets, torch.tensor([t if c else 1.0 for t, c in zip(tau, counts, strict=True)], dtype=torch.float64)


def bounds_of(cu_seqlens, total):
    bounds = whole(cu_seqlens)
    assert (bounds[0], bounds[-1], bounds) == (0, total, sorted(bounds))
    return bounds


def is_extreme(temperatures):
    """Return whether logits divided by these would leave the range of float32."""
    return bool(((temperatures < 1e-3) | (temperatures > 1e6)).any())


def logits_of(draw, shape, dtypes=FLOATS):
    return draw_tensor(draw, shape, [0.0, 1.5, -3.0, 4.0, -0.25], draw(st.sampled_from(dtypes)))


def check_logprobs(actual, logits, targets, temperature=1.0, tolerance=None, chunk_tokens=None):
    real = torch.promote_types(logits.dtype, torch.float32)
    z = exact(logits).requires_grad_()
    targets, tau = reference_rows(z, targets, temperature, [True] * len(z))
    for x in actual:
        assert (x.dtype, x.shape) == (real, (len(z),))
    if is_extreme(tau):
        return
    expected = token_logprobs_reference(z, targets, tau)
    tolerance = tolerance or TOLERANCE[real]
    for x, y in zip(actual, expected, strict=True):
        assert_close(x, y.to(real), tolerance)
    if logits.requires_grad and len(z) and all(y.isfinite().all() for y in expected):
        (wanted,) = torch.autograd.grad(expected[0].sum() + 0.5 * expected[1].sum(), z)
        (gradient,) = torch.autograd.grad(actual[0].sum() + 0.5 * actual[1].sum(), logits)
        assert_close(gradient, wanted, max(tolerance, TOLERANCE[logits.dtype]))


@st.composite
def rows(draw):
    tokens, vocab = draw(st.integers(0, 6)), draw(st.sampled_from([1, 2, 5, 16, 33]))
    arguments = {"targets": draw_tensor(draw, (tokens,), range(min(vocab, 7)), draw(st.sampled_from(INTEGERS)))}
    one = draw(st.sampled_from([0.7, 1, 2.0]))
    several = draw_tensor(draw, (tokens,), [0.7, 1.0, 2.0], draw(st.sampled_from([torch.float32, torch.float64])))
    return tokens, vocab, arguments | {"temperature": draw(st.sampled_from([one, several]))}


INTEGERS = [torch.int64, torch.int32, torch.uint8, torch.int16]


@settings(200)
@hypothesis.given(st.data())
def test_token_logprobs(data):
    tokens, vocab, arguments = data.draw(rows())
    arguments["logits"] = logits_of(data.draw, (tokens, vocab))
    call_with_strangers(data.draw, ops.token_logprobs, arguments, check_logprobs)


def check_loss(result, logits, targets, advantages, cu_seqlens, *, old_logprobs=None, ref_logprobs=None, mask=None,
               importance_weights=None, loss="ppo", clip_low=0.2, clip_high=0.2, dual_clip=None, kl="k3", kl_coef=0.0,
               entropy_coef=0.0, loss_options=None, temperature=1.0, aggregation="token_mean", denominator=None,
               in_place=False, values=None, token_statistics=None, top_tokens=None,
               chunk_tokens=None, leaves=None, tolerance=None, advantages_per_token=None,
               importance_weights_per_token=None):  # fmt: skip
    """Compare with the reference on the same numbers in float64. `values`: the logits before they were overwritten."""
    real, total = torch.promote_types(logits.dtype, torch.float32), len(logits)
    z = exact(logits if values is None else values).requires_grad_() if leaves is None else leaves[0] @ leaves[1].T
    counts = [True] * total if mask is None else mask.tolist()
    bounds = bounds_of(cu_seqlens, total)
    lengths, sequences = [b - a for a, b in pairwise(bounds)], len(bounds) - 1
    counted = [sum(counts[a:b]) for a, b in pairwise(bounds)]

    def checked(x, per_token):
        """Return the numbers in float64, and whether they are [T]."""
        assert x.dim() == 1
        if per_token is None:
            assert len(x) in (sequences, total)
            assert sequences != total or set(lengths) <= {1}
            per_token = len(x) != sequences
        assert len(x) == (total if per_token else sequences)
        return exact(x.to(real) if x.dtype == torch.float64 else x), per_token

    weights, of_tokens = None, False
    if importance_weights is not None:
        weights, of_tokens = checked(importance_weights, importance_weights_per_token)
        assert not any(w < 0 and (not of_tokens or counts[t]) for t, w in enumerate(weights.tolist()))
    adv, per_token = checked(advantages, advantages_per_token)
    old, ref = (None if x is None else exact(x.to(real)) for x in (old_logprobs, ref_logprobs))

    def by_token(x, is_already):
        return x if is_already else torch.repeat_interleave(x, torch.tensor(lengths, dtype=torch.int64))

    matters = by_token(adv, per_token) != 0
    if weights is not None:
        matters = matters & (by_token(weights, of_tokens) != 0)
    clips = [as_float(x) for x in (clip_low, clip_high)]
    assert min(clips) >= 0
    options = loss_terms(
        loss, *clips, None if dual_clip is None else as_float(dual_clip), kl, kl_coef, entropy_coef, loss_options
    )
    assert ops.LOSSES[loss].aggregation in (None, aggregation)
    always = bool(kl_coef) or bool(entropy_coef) or (loss == "dppo" and options.options[2] != 0)
    read = [c and (t or always) for c, t in zip(counts, matters.tolist(), strict=True)]
    # The ratio of a sequence also needs the tokens that have no gradient.
    is_whole = ops.LOSSES[loss].sequence is not None and (per_token or of_tokens)
    needed = counts if leaves is None or is_whole else read
    targets, tau = reference_rows(z, targets, temperature, needed)
    means = {"token_mean": sum(counted), "seq_sum_constant": 0}.get(aggregation, sequences)
    divisor = max(means, 1) if denominator is None else float(denominator)
    assert is_positive(divisor)
    by_sequence = torch.tensor(counted) if aggregation == "seq_mean_token_mean" else None
    keep = torch.tensor(counts, dtype=torch.bool)
    bounds = torch.tensor(bounds)
    divisor = torch.tensor(divisor).double()
    batch = TokenBatch(targets, bounds, adv, per_token, weights, of_tokens, old, ref, tau, keep, by_sequence, divisor)
    assert (token_statistics is None) == (ops.LOSSES[loss].statistic is None)
    batch.token_statistics = None if token_statistics is None else exact(token_statistics.to(real))
    assert (top_tokens is None) == (not ops.LOSSES[loss].top_tokens)
    batch.top_tokens = None if top_tokens is None else top_tokens.long()
    if is_extreme(tau[torch.tensor(read, dtype=torch.bool)]):
        return
    actual, metrics = result
    sums = token_loss_reference(z, batch, options)
    tolerance = tolerance or max(TOLERANCE[real], 1e-7)
    assert actual.dtype == real
    assert_close(actual, sums[0].to(real), tolerance)
    assert metrics["tokens"] == sum(counts)
    assert metrics["dropped_tokens"] == sums[2]
    if not (sums.isfinite().all() and z.isfinite().all() and sums.abs().max() < 1e20):
        return
    for name, expected in zip(LossSums._fields[3:], sums[3:] / max(1, float((sums[1] - sums[2]).detach())), strict=True):
        assert_close(metrics[name], expected.detach(), tolerance, expected.abs().clamp_min(1))
    ours = [logits] if leaves is None else leaves[2]
    if actual.requires_grad and not in_place:
        for x, leaf in zip(ours, [z] if leaves is None else leaves, strict=False):
            if x.requires_grad:
                (wanted,) = torch.autograd.grad(sums[0], leaf, retain_graph=True)
                (gradient,) = torch.autograd.grad(actual, x, retain_graph=True)
                assert_close(gradient, wanted, max(tolerance, TOLERANCE[x.dtype]))
    elif actual.requires_grad:
        (wanted,) = torch.autograd.grad(sums[0], z)
        assert_close(logits, wanted, max(tolerance, TOLERANCE[logits.dtype]))


@st.composite
def loss_arguments(draw):
    """Draw T, V and valid arguments."""
    tokens, vocab, arguments = draw(rows())
    cuts = sorted(draw(st.lists(st.integers(0, tokens), max_size=4)))
    integers = draw(st.sampled_from(INTEGERS))
    arguments["cu_seqlens"] = torch.tensor([0, *cuts, tokens]).to(integers)
    sequences = len(cuts) + 1

    def some(values, dtypes, size=tokens):
        return draw_tensor(draw, (size,), values, draw(st.sampled_from(dtypes)))

    def either(name, values, dtypes):
        """Draw [T] or [S], with the keyword that says which: always if T = S, otherwise at random."""
        per_token = draw(st.booleans())
        if tokens == sequences or draw(st.booleans()):
            arguments[f"{name}_per_token"] = per_token
        return some(values, dtypes, tokens if per_token else sequences)

    arguments["advantages"] = either("advantages", [1.0, -2.0, 0.0], [*FLOATS, torch.int32])
    maybe = {
        "importance_weights": lambda: either("importance_weights", [0.0, 0.5, 1.0, 2.0], FLOATS),
        "old_logprobs": lambda: some([-0.5, -1.0, -2.5], FLOATS),
        "mask": lambda: some([False, True, True], [torch.bool]),
        "clip_low": lambda: draw(st.sampled_from([0.1, 0, math.inf])),
        "clip_high": lambda: draw(st.sampled_from([0.1, 0, math.inf])),
        "dual_clip": lambda: draw(st.sampled_from([None, 3, 1.5])),
        "entropy_coef": lambda: draw(st.sampled_from([0, 0.1, -0.1])),
        "denominator": lambda: draw(st.sampled_from([3, 7.5, torch.tensor(2.0), torch.tensor([4])])),
        "loss": lambda: draw(st.sampled_from(tuple(ops.LOSSES))),
        "aggregation": lambda: draw(st.sampled_from(AGGREGATIONS)),
    }
    arguments |= {name: make() for name, make in maybe.items() if draw(st.booleans())}
    row = ops.LOSSES[arguments.get("loss", "ppo")]
    if row.options and draw(st.booleans()):
        # Bounds such as dispo's low_positive and high_positive must be in order.
        bounds = {"low": [0.2, 0.9], "high": [1, 2.5]}
        arguments["loss_options"] = {
            name: draw(
                st.sampled_from(
                    [1, 2]
                    if name == "k"
                    else bounds.get(name.partition("_")[0], [0.2, 0.9, 1] + [2.5] * ("1" not in option.wanted))
                )
            )
            for name, option in row.options.items()
        }
    if row.statistic:
        arguments["token_statistics"] = some([0.0, 1.0], [*FLOATS, torch.bool])
    if row.top_tokens:
        k = arguments.get("loss_options", {}).get("k", 3)
        arguments["top_tokens"] = torch.arange(tokens * k).view(tokens, k) % max(vocab, 1)
    if row.aggregation:
        arguments["aggregation"] = row.aggregation
    if draw(st.booleans()):
        arguments |= {"ref_logprobs": some([-0.5, -1.0, -2.5], FLOATS), "kl": draw(st.sampled_from(KL_ESTIMATORS))}
        arguments["kl_coef"] = draw(st.sampled_from([0, 0.1]))
    if arguments.get("aggregation") == "seq_sum_constant":
        arguments.setdefault("denominator", 5.0)
    return tokens, vocab, arguments


@settings(300)
@hypothesis.given(st.data())
def test_policy_gradient_loss(data):
    tokens, vocab, arguments = data.draw(loss_arguments())
    arguments["logits"] = logits_of(data.draw, (tokens, vocab))
    call_with_strangers(data.draw, ops.policy_gradient_loss, arguments, check_loss)


@settings(100)
@hypothesis.given(st.data())
def test_policy_gradient_loss_in_place(data):
    """With computed logits of any layout: the gradient is written, or nothing is."""
    tokens, vocab, arguments = data.draw(loss_arguments())
    values = logits_of(data.draw, (tokens, vocab))
    layout = data.draw(st.sampled_from(["dense", "far rows", "columns", "view of a leaf", "one row"]))
    leaf = values.clone().requires_grad_()
    if layout == "one row":
        logits = (leaf[:1] * 1).expand(tokens, vocab)
    elif layout == "columns":
        logits = (leaf * 1).T.contiguous().T
    else:
        logits = {"dense": leaf * 1, "far rows": torch.cat([leaf, leaf], 1)[:, :vocab], "view of a leaf": leaf[:]}[layout]
    values = logits.detach().clone()
    may_refuse = layout not in ("dense", "far rows")

    def in_place(**given):
        return ops.policy_gradient_loss(logits, in_place=True, **given)

    def check(result, **given):
        assert layout != "view of a leaf"
        check_loss(result, logits, values=values, in_place=True, **given)

    call_with_strangers(data.draw, in_place, arguments, check, may_refuse)
    if may_refuse and tokens > 1 and vocab > 1:
        assert torch.equal(logits, values)


# --- losses from hidden states


@st.composite
def hidden_and_weight(draw, tokens, vocab):
    size = draw(st.integers(1, 5))
    dtype = draw(st.sampled_from(FLOATS))
    hidden = draw_tensor(draw, (tokens, size), [0.0, 1.0, -0.5], dtype)
    weight = draw_tensor(draw, (vocab, size), [0.5, -1.0, 1.5], draw(st.sampled_from([dtype, torch.float32])))
    return {"hidden": hidden, "weight": weight, "chunk_tokens": draw(st.sampled_from([None, 1, 2, 10**6]))}


def linear_leaves(hidden, weight):
    """Return hidden and weight in float64, and the originals; the logits are rounded to the dtype of hidden."""
    assert exact(hidden).shape[1] == exact(weight.to(hidden.dtype)).shape[1]
    return [exact(hidden).requires_grad_(), exact(weight.to(hidden.dtype)).requires_grad_(), [hidden, weight]]


LINEAR_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


@settings(150)
@hypothesis.given(st.data())
def test_linear_policy_gradient_loss(data):
    tokens, vocab, arguments = data.draw(loss_arguments())
    arguments |= data.draw(hidden_and_weight(tokens, vocab))

    def check(result, hidden, weight, chunk_tokens=None, **given):
        assert chunk_tokens is None or chunk_tokens >= 1
        check_loss(result, hidden, leaves=linear_leaves(hidden, weight), tolerance=LINEAR_TOLERANCE[hidden.dtype], **given)

    call_with_strangers(data.draw, ops.linear_policy_gradient_loss, arguments, check)


@settings(100)
@hypothesis.given(st.data())
def test_linear_token_logprobs(data):
    tokens, vocab, arguments = data.draw(rows())
    arguments |= data.draw(hidden_and_weight(tokens, vocab))

    def check(actual, hidden, weight, chunk_tokens=None, **given):
        assert chunk_tokens is None or chunk_tokens >= 1
        h, w, _ = linear_leaves(hidden, weight)
        logits = (h @ w.T).detach().to(hidden.dtype)
        check_logprobs([x.detach() for x in actual], logits, tolerance=LINEAR_TOLERANCE[hidden.dtype], **given)

    call_with_strangers(data.draw, ops.linear_token_logprobs, arguments, check)


# --- PACS


def check_log_ratio(actual, logprobs, ref_logprobs, cu_seqlens, beta=1.0, mask=None):
    assert actual.dtype == logprobs.dtype
    assert ref_logprobs.shape == logprobs.shape
    bounds = bounds_of(cu_seqlens, len(logprobs))
    keep = torch.ones(len(logprobs), dtype=torch.bool) if mask is None else exact(mask, torch.bool)
    difference = torch.where(keep, exact(logprobs) - exact(ref_logprobs.to(logprobs.dtype)), 0.0)
    expected = torch.tensor([float(beta) * float(difference[a:b].sum()) for a, b in pairwise(bounds)], dtype=torch.float64)
    assert_close(actual, expected.to(actual.dtype), TOLERANCE[actual.dtype])
    if logprobs.requires_grad and actual.isfinite().all():
        (gradient,) = torch.autograd.grad(actual.sum(), logprobs)
        assert_close(gradient, torch.where(keep, float(beta), 0.0).to(actual.dtype), TOLERANCE[actual.dtype])


@settings(150)
@hypothesis.given(st.data())
def test_log_ratio_reward(data):
    tokens, _, arguments = data.draw(loss_arguments())
    chosen = {"cu_seqlens": arguments["cu_seqlens"], "beta": data.draw(st.sampled_from([1, 0.5, -2.0, 0]))}
    for name in ("logprobs", "ref_logprobs"):
        dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
        chosen[name] = draw_tensor(data.draw, (tokens,), [-0.5, -1.0, -2.5], dtype)
    if "mask" in arguments:
        chosen["mask"] = arguments["mask"]
    call_with_strangers(data.draw, ops.log_ratio_reward, chosen, check_log_ratio)


def check_pacs(result, reward_proxy, labels, groups, score="rloo", weight="balanced", denominator=None):
    loss, metrics = result
    size = len(reward_proxy)
    if isinstance(groups, torch.Tensor):
        bounds = bounds_of(groups, size)
    else:
        assert size % groups == 0
        assert groups >= 1
        bounds = list(range(0, size + 1, groups)) if size else [0]
    r, y = exact(reward_proxy).requires_grad_(), exact(labels)
    assert set(y.tolist()) <= {0.0, 1.0}
    divisor = max(size, 1) if denominator is None else float(denominator)
    assert is_positive(divisor)
    assert loss.dtype == reward_proxy.dtype
    assert metrics["cross_entropy"].shape == (size,)
    if not size:
        assert loss == 0
        return
    if r.abs().max() > 1e100 and score == "grpo":
        return
    expected = slow_loss(r, y, bounds, score, weight) * size / divisor
    assert_close(loss, expected.to(loss.dtype), 10 * TOLERANCE[loss.dtype])
    if reward_proxy.requires_grad and expected.isfinite():
        (wanted,) = torch.autograd.grad(expected, r)
        (gradient,) = torch.autograd.grad(loss, reward_proxy)
        if wanted.isfinite().all() and wanted.abs().max() < 1e3:  # under grpo, nearly equal proxies have a derivative of 1e6
            assert_close(gradient, wanted, 1e-3)


@settings(200)
@hypothesis.given(st.data())
def test_pacs_loss(data):
    n, prompts = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
    size, dtype = n * prompts, data.draw(st.sampled_from([torch.float32, torch.float64]))
    offsets = torch.tensor([0, *sorted(data.draw(st.lists(st.integers(0, size), max_size=3))), size])
    arguments = {
        "reward_proxy": draw_tensor(data.draw, (size,), [0.5, -1.0, 2.0, 0.25], dtype),
        "labels": draw_tensor(data.draw, (size,), [0, 1], data.draw(st.sampled_from(REAL))),
        "groups": data.draw(st.sampled_from([n, offsets, offsets.to(torch.uint8)])),
        "score": data.draw(st.sampled_from(["rloo", "grpo", "dr_grpo", "naive"])),
        "weight": data.draw(st.sampled_from(["balanced", "none"])),
    }
    if data.draw(st.booleans()):
        arguments["denominator"] = data.draw(st.sampled_from([2, 7.5, torch.tensor(3.0)]))
    call_with_strangers(data.draw, ops.pacs_loss, arguments, check_pacs)


@pytest.mark.parametrize("name", [name for name in ops.__all__ if callable(getattr(ops, name))])
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


_HIDDEN = {"hidden": torch.ones(3, 2), "weight": torch.ones(4, 2), "chunk_tokens": 2}
_ROWS = {"targets": torch.tensor([0, 1, 3]), "temperature": 1.0}
_TOKENS = {"advantages": torch.tensor([1.0, -1.0, -1.0]), "mask": torch.tensor([True, True, False])}
_LOSS = {
    **_ROWS,
    **{"advantages": torch.tensor([1.0, -1.0]), "cu_seqlens": torch.tensor([0, 1, 3]), "ref_logprobs": -torch.ones(3)},
    **{"old_logprobs": -torch.ones(3), "importance_weights": torch.ones(2), "mask": torch.tensor([True, True, False])},
    **{"loss": "gmpo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "kl": "k2", "kl_coef": 0.1, "entropy_coef": 0.1},
    **{"loss_options": {"low": 0.3}, "aggregation": "seq_mean_token_mean", "denominator": 2.0},
}
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
    "token_logprobs": {"logits": torch.ones(3, 4), **_ROWS},
    "policy_gradient_loss": {"logits": torch.ones(3, 4), **_LOSS, "in_place": False},
    "linear_token_logprobs": {**_HIDDEN, **_ROWS},
    "kl_cov_tokens": {**_TOKENS, "logprobs": -torch.ones(3), "share": 0.5},
    "clip_cov_tokens": {**_TOKENS, "logprobs": -torch.ones(3), "share": 0.5, "low": 0.1, "high": 2.0},
    "lp_reg_proxies": {**_TOKENS, "log_proxy": -torch.ones(3), "logprobs": -torch.ones(3), "share": 0.5},
    "simko_tokens": {
        **{**_TOKENS, "entropy": torch.ones(3), "is_top": torch.tensor([True, False, True]), "tau": 0.5},
        "cu_seqlens": torch.tensor([0, 1, 3]),
    },
    "row_statistics": {"logits": torch.ones(3, 4), **_ROWS, "top_k": 2, "min_p": 0.1},
    "linear_row_statistics": {**_HIDDEN, **_ROWS, "top_k": 2, "min_p": 0.1, "softcap": 3.0},
    "linear_policy_gradient_loss": {**_HIDDEN, **_LOSS},
    "log_ratio_reward": {
        **{"logprobs": -torch.ones(3), "ref_logprobs": torch.zeros(3), "cu_seqlens": torch.tensor([0, 1, 3])},
        **{"beta": 1.0, "mask": torch.tensor([True, True, False])},
    },
    "pacs_loss": {
        **{"reward_proxy": torch.ones(4), "labels": torch.tensor([0.0, 1, 1, 0]), "groups": 2, "score": "rloo"},
        **{"weight": "none", "denominator": 4.0},
    },
}


# --- one test for each bug that the fuzz tests found


@pytest.mark.parametrize(
    "bounds",
    [
        torch.tensor([0, 200, 3, 8], dtype=torch.uint8),  # differences of unsigned integers are never negative
        torch.tensor([0, 2**63 - 1, -2, 8]),  # these differences overflow to positive numbers
        torch.tensor([False, True, False, True]),
        torch.tensor([0, 5, 3, 8], dtype=torch.uint64),
    ],
)
def test_decreasing_cu_seqlens_are_refused(bounds):
    size = int(bounds[-1])
    x = torch.zeros(size)
    for call in (
        lambda: ops.log_ratio_reward(x, x, bounds),
        lambda: ops.pacs_loss(x, x, bounds),
        lambda: ops.policy_gradient_loss(torch.zeros(size, 4), x.long(), torch.ones(3), bounds),
    ):
        with pytest.raises(ValueError, match="cu_seqlens must"):
            call()


def test_chunks_with_as_many_tokens_as_sequences_keep_per_token_advantages():
    """There are two sequences, of 0 and 5 tokens, and chunks of 2 tokens, whose two advantages are not per sequence."""
    hidden, weight = torch.eye(5, 3), torch.arange(12.0).view(4, 3)
    arguments = {"targets": torch.tensor([0, 1, 2, 3, 0]), "cu_seqlens": torch.tensor([0, 0, 5])}
    arguments |= {"advantages": torch.tensor([1.0, 2, 3, 4, 5]), "importance_weights": torch.tensor([1.0, 0.5, 2, 1, 3])}
    expected, _ = ops.policy_gradient_loss(hidden @ weight.T, **arguments, loss="reinforce")
    for chunk in (1, 2, 3, 5):
        actual, _ = ops.linear_policy_gradient_loss(hidden, weight, **arguments, loss="reinforce", chunk_tokens=chunk)
        assert actual.item() == pytest.approx(expected.item(), rel=1e-5)
    # Two of the five tokens have a gradient. `take` selects them by position.
    arguments["importance_weights"] = torch.tensor([0.0, 0.5, 0, 0, 3])
    expected, _ = ops.policy_gradient_loss(hidden @ weight.T, **arguments, loss="reinforce")
    actual, _ = ops.linear_policy_gradient_loss(hidden, weight, **arguments, loss="reinforce")
    assert actual.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["advantages", "old_logprobs", "targets", "mask", "temperature", "denominator"])
def test_tensors_on_another_device_are_refused(name):
    """An operator takes a tensor on "meta" for tracing, and would return uninitialised memory."""
    arguments = {"logits": torch.ones(3, 4), **_LOSS}
    other = torch.ones(3) if name == "temperature" else torch.as_tensor(arguments[name])
    with pytest.raises(ValueError, match=f"{name} must be"):
        ops.policy_gradient_loss(**arguments | {name: other.to("meta")})
    with pytest.raises(ValueError, match="valid must be on cpu as the rewards are, got meta"):
        ops.rloo_advantage(torch.zeros(2, 3), valid=torch.ones(2, 3, dtype=torch.bool, device="meta"))


def test_per_token_temperatures_must_be_positive():
    logits, targets = torch.tensor([[1.0, 3.0], [2.0, 0.0]]), torch.tensor([0, 1])
    for value in (0.0, -1.0, math.nan, math.inf):
        tau = torch.tensor([1.0, value])
        with pytest.raises(ValueError, match=r"temperature must be a finite number above 0, got .* at 1"):
            ops.token_logprobs(logits, targets, temperature=tau)
        keep = {"mask": torch.tensor([True, False]), "advantages": torch.ones(1), "cu_seqlens": torch.tensor([0, 2])}
        loss, _ = ops.policy_gradient_loss(logits, targets, **keep, temperature=tau, loss="reinforce")
        assert loss.item() == pytest.approx(math.log(1 + math.exp(2)), rel=1e-6)
        # Call the operator without the checks of values, as on a GPU.
        logprobs, entropy = torch.ops.maxrl_fast.token_logprobs(logits, targets, tau, 1.0)
        assert logprobs[0].isfinite()
        assert entropy[1].isnan()
        assert logprobs[1].isnan()


def test_in_place_refuses_parameters_and_shared_rows():
    rows = {"targets": torch.tensor([0, 1]), "advantages": torch.ones(1), "cu_seqlens": torch.tensor([0, 2])}
    leaf = torch.randn(2, 3, requires_grad=True)
    for logits in (leaf[:], leaf.view(2, 3), (leaf * 1)[:1].expand(2, 3), (leaf * 1).flatten().as_strided((2, 3), (1, 1))):
        before = logits.detach().clone()
        with pytest.raises(ValueError, match="in_place needs logits"):
            ops.policy_gradient_loss(logits, **rows, in_place=True)
        assert torch.equal(logits, before)


def test_a_pacs_loss_that_overflows_is_refused():
    labels = torch.tensor([0, 1, 1])
    proxies = torch.tensor([0.0, 1e200, 2e200], dtype=torch.float64)
    message = r"the loss must be finite in torch.float64, got nan from reward proxies of up to 2e\+200"
    with pytest.raises(ValueError, match=message):
        ops.pacs_loss(proxies, labels, 3, score="grpo")
    assert ops.pacs_loss(proxies, labels, 3, score="rloo")[0].isfinite()
    with pytest.raises(ValueError, match=r"the loss must be finite in torch.float32, got inf"):
        ops.pacs_loss(torch.tensor([3e38, 3e38, -3e38]), torch.tensor([0, 0, 1]), 3, score="naive", denominator=1.0)
    broken = torch.tensor([0.0, torch.nan, 1.0])  # from a policy that has become NaN, which the trainer reports itself
    assert ops.pacs_loss(broken, labels, 3)[0].isnan()


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


def test_the_gspo_reference_reads_all_unmasked_tokens():
    """The ratio of gspo is a mean over all unmasked tokens, including tokens with advantage 0."""
    logits = torch.tensor([[0.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    options = LossTerms("gspo", math.inf, math.inf, math.inf, "k3", 0.0, 0.0)
    adv, old = torch.tensor([1.0, 0.0]).double(), torch.tensor([-0.5, -0.5]).double()
    batch = TokenBatch(
        torch.zeros(2).long(), torch.tensor([0, 2]), adv, True, None, False, old, None, 1.0, None, None, torch.ones(()).double()
    )
    ratio = math.exp((-math.log(2) - math.log(1 + math.exp(3)) + 1.0) / 2)
    assert token_loss_reference(logits, batch, options)[0].item() == pytest.approx(-ratio)
    arguments = {"targets": batch.targets, "advantages": adv, "cu_seqlens": batch.cu_seqlens, "old_logprobs": old}
    loss, _ = ops.policy_gradient_loss(logits, **arguments, loss="gspo", clip_low=math.inf, clip_high=math.inf, denominator=1)
    assert loss.item() == pytest.approx(-ratio)


def test_empty_logits_of_any_strides():
    logits = torch.zeros(0, 9)[:, 1::2]
    assert [len(x) for x in ops.token_logprobs(logits, torch.zeros(0, dtype=torch.int64))] == [0, 0]
