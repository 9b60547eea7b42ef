"""Fuzz tests of the token losses, log-probs and PACS: valid arguments in any layout give the right value, invalid ones an error
that explains itself.

The right values come from the functions of the losses, in float64. tests/fuzzing.py says how to draw more examples.
"""

import inspect
import math
from itertools import pairwise

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.ops.function_loss import function_loss, rows_of_loss, tokens_of
from maxrl_fast.ops.token_batch import AGGREGATIONS, KL_ESTIMATORS, prepare
from maxrl_fast.ops.token_loss_kernel import LossSums
from maxrl_fast.ops.token_loss_reference import token_logprobs_reference
from tests.fuzzing import FLOATS, SCALARS, assert_explains, attempt, call_with_strangers, exact, settings, whole
from tests.ops.test_fuzz import REAL, TOLERANCE, assert_close, draw_tensor, flat
from tests.ops.test_pacs import slow_loss

# --- token losses


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


def check_loss(result, logits, targets, advantages, cu_seqlens, *, values=None, leaves=None, tolerance=None, in_place=False,
               chunk_tokens=None, **options):  # fmt: skip
    """Compare with the functions of the losses on the same numbers in float64. `values`: the logits before they were
    overwritten; `leaves`: hidden and weight of the logits."""
    real, total = torch.promote_types(logits.dtype, torch.float32), len(logits)
    z = exact(logits if values is None else values).requires_grad_() if leaves is None else leaves[0] @ leaves[1].T
    mask, given = options.get("mask"), {name: x for name, x in options.items() if name != "temperature"}
    counts = [True] * total if mask is None else mask.tolist()
    bounds = bounds_of(cu_seqlens, total)
    targets, tau = reference_rows(z, targets, options.get("temperature", 1.0), counts)
    if is_extreme(tau):
        return
    row = ops.LOSSES[options.get("loss", "ppo")]
    defaults = {x.name: x.default for x in inspect.signature(ops.policy_gradient_loss).parameters.values()}
    defaults = {name: x for name, x in defaults.items() if x is not inspect.Parameter.empty and name != "in_place"}
    for name in ("advantages", "old_logprobs", "ref_logprobs", "importance_weights"):
        x = advantages if name == "advantages" else given.get(name)
        if x is not None:  # as the kernels read it, in the dtype of their arithmetic
            given[name] = exact(x.to(real))
    rows = targets, given.pop("advantages"), torch.tensor(bounds)
    prepared = prepare(torch.float64, z.device, tuple(z.shape), *rows, **defaults | given | {"temperature": tau})
    batch, terms, row, numbers = prepared
    found = token_logprobs_reference(z, targets, tau)
    sums = function_loss(row, numbers, terms, batch, tokens_of(batch, *found, rows_of_loss(row, numbers, z, targets, tau)))
    actual, metrics = result
    tolerance = tolerance or max(TOLERANCE[real], 1e-7)
    assert actual.dtype == real
    assert metrics["tokens"] == sum(counts)
    if row.over_batch:  # of equal tokens, which these few values make, any may be chosen
        return
    assert_close(actual, sums[0].to(real), tolerance)
    assert metrics["dropped_tokens"] == sums[2]
    if not (sums.isfinite().all() and z.isfinite().all() and sums.abs().max() < 1e20):
        return
    for name, expected in zip(LossSums._fields[3:], sums[3:] / max(1, float((sums[1] - sums[2]).detach())), strict=True):
        assert_close(metrics[name], expected.detach(), tolerance, expected.abs().clamp_min(1))
    if not actual.requires_grad:
        return
    if in_place:
        assert_close(logits, torch.autograd.grad(sums[0], z)[0], max(tolerance, TOLERANCE[logits.dtype]))
        return
    ours = [logits] if leaves is None else leaves[2]
    for x, leaf in zip(ours, [z] if leaves is None else leaves, strict=False):
        if x.requires_grad:
            (wanted,) = torch.autograd.grad(sums[0], leaf, retain_graph=True)
            (gradient,) = torch.autograd.grad(actual, x, retain_graph=True)
            assert_close(gradient, wanted, max(tolerance, TOLERANCE[x.dtype]))


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
                    else bounds.get(name.partition("_")[0], [0.2, 0.9, 1] + [2.5] * ("1" not in option.limit.wanted))
                )
            )
            for name, option in row.options.items()
        }
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


_HIDDEN = {"hidden": torch.ones(3, 2), "weight": torch.ones(4, 2), "chunk_tokens": 2}
_ROWS = {"targets": torch.tensor([0, 1, 3]), "temperature": 1.0}
_LOSS = {
    **_ROWS,
    **{"advantages": torch.tensor([1.0, -1.0]), "cu_seqlens": torch.tensor([0, 1, 3]), "ref_logprobs": -torch.ones(3)},
    **{"old_logprobs": -torch.ones(3), "importance_weights": torch.ones(2), "mask": torch.tensor([True, True, False])},
    **{"loss": "gmpo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "kl": "k2", "kl_coef": 0.1, "entropy_coef": 0.1},
    **{"loss_options": {"low": 0.3}, "aggregation": "seq_mean_token_mean", "denominator": 2.0},
}
PLAIN = {
    "token_logprobs": {"logits": torch.ones(3, 4), **_ROWS},
    "policy_gradient_loss": {"logits": torch.ones(3, 4), **_LOSS, "in_place": False},
    "linear_token_logprobs": {**_HIDDEN, **_ROWS},
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


@pytest.mark.parametrize("name", PLAIN)
def test_every_argument_is_checked(name):
    """Replace each argument of a valid call by every wrong object."""
    function, arguments = getattr(ops, name), PLAIN[name]
    function(**arguments)
    for argument in arguments:
        for value in SCALARS:
            _, error = attempt(function, arguments | {argument: value})
            if error is not None:
                assert_explains(error)


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


def test_empty_logits_of_any_strides():
    logits = torch.zeros(0, 9)[:, 1::2]
    assert [len(x) for x in ops.token_logprobs(logits, torch.zeros(0, dtype=torch.int64))] == [0, 0]


@pytest.mark.parametrize("name", ["advantages", "old_logprobs", "targets", "mask", "temperature", "denominator"])
def test_tensors_on_another_device_are_refused(name):
    """An operator takes a tensor on "meta" for tracing, and would return uninitialised memory."""
    arguments = {"logits": torch.ones(3, 4), **_LOSS}
    other = torch.ones(3) if name == "temperature" else torch.as_tensor(arguments[name])
    with pytest.raises(ValueError, match=f"{name} must be"):
        ops.policy_gradient_loss(**arguments | {name: other.to("meta")})
