"""Fuzz tests of the token losses and log-probs: valid arguments in any layout give the right
value, invalid ones an error that explains itself.

The right values come from the references in PyTorch, of the same numbers in float64 and in plain
layouts; test_token_loss.py compares these with definitions.
"""

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from maxrl_fast import ops
from tests.fuzzing import (
    FLOATS,
    TOLERANCE,
    assert_close,
    call_with_strangers,
    drawn_tensor,
    exact,
    replace_every_argument,
    settings,
    whole,
)
from tests.ops.loss_definitions import (
    CU_SEQLENS,
    OF_RESPONSES,
    S,
    T,
    V,
    computed,
    drawn_options,
    example,
    in_float32,
)

INTEGERS = [torch.int64, torch.int32, torch.uint8, torch.int16]


def reference_rows(num_tokens, vocab, targets, temperature, counts):
    """Return targets and temperatures, [T] each; masked ones may be anything."""
    numbers, tau = whole(targets), [temperature] * num_tokens
    if isinstance(temperature, torch.Tensor):
        tau = exact(temperature).tolist()
    assert len(numbers) == len(tau) == len(counts) == num_tokens
    rows = [x if c else (0, 1.0) for *x, c in zip(numbers, map(float, tau), counts, strict=True)]
    read = [x for x, c in zip(rows, counts, strict=True) if c]
    assert all(0 <= y < vocab and 0 < t < math.inf for y, t in read)
    targets = torch.tensor([y for y, _ in rows], dtype=torch.int64)
    return targets, torch.tensor([t for _, t in rows], dtype=torch.float64)


def bounds_of(cu_seqlens, total):
    bounds = whole(cu_seqlens)
    assert (bounds[0], bounds[-1], bounds) == (0, total, sorted(bounds))
    return bounds


def is_extreme(temperatures):
    """Return whether logits divided by these would leave the range of float32."""
    return bool(((temperatures < 1e-3) | (temperatures > 1e6)).any())


def check_logprobs(actual, logits, targets, temperature=1.0, tolerance=None):
    real = torch.promote_types(logits.dtype, torch.float32)
    z = exact(logits).requires_grad_()
    targets, tau = reference_rows(*z.shape, targets, temperature, [True] * len(z))
    for x in actual:
        assert (x.dtype, x.shape) == (real, (len(z),))
    if is_extreme(tau):
        return
    log_p = torch.log_softmax(z / tau[:, None], -1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
    expected = log_p.gather(1, targets[:, None])[:, 0], entropy
    tolerance = tolerance or TOLERANCE[real]
    for x, y in zip(actual, expected, strict=True):
        assert_close(x, y.to(real), tolerance)
    if logits.requires_grad and len(z) and all(y.isfinite().all() for y in expected):
        (wanted,) = torch.autograd.grad(expected[0].sum() + 0.5 * expected[1].sum(), z)
        (gradient,) = torch.autograd.grad(actual[0].sum() + 0.5 * actual[1].sum(), logits)
        assert_close(gradient, wanted, max(tolerance, TOLERANCE[logits.dtype]))


@st.composite
def batches(draw):
    """Draw arguments of policy_gradient_loss: the first tokens of an example, in any dtypes, and
    options; some are left out.
    """

    def choice(values):
        return draw(st.sampled_from(values))

    loss, tokens, seed = choice(list(ops.LOSSES)), choice([0, 1, 2, S, 9, T]), choice(range(9))
    per_token, weights_per_token = (
        loss not in OF_RESPONSES and choice([True, False]) for _ in range(2)
    )
    e = example(
        choice([0.02, 0.3]), seed, per_token, vocab=choice([1, 2, 5, 16, 33])
    ) | drawn_options(choice, loss)
    e |= {"loss": loss, "temperature": choice([0.7, 1, torch.linspace(0.5, 2, T)])}
    if weights_per_token:
        e["importance_weights"] = e["importance_weights"].repeat_interleave(CU_SEQLENS.diff()) * (
            torch.arange(T) % 5 > 0
        )
    if e["denominator"]:
        e["denominator"] = choice([e["denominator"], torch.tensor(4.0), torch.tensor([4])])
    for name, x in e.items():
        if torch.is_tensor(x) and x.dtype != torch.bool and name != "denominator":
            e[name] = (
                x[:tokens] if len(x) == T else x.clamp_max(tokens) if name == "cu_seqlens" else x
            )
            e[name] = e[name].to(choice(FLOATS if x.is_floating_point() else INTEGERS))
    e["mask"] = e["mask"][:tokens]
    if not e["kl_coef"]:
        e.pop("ref_logprobs")
    for name in ("old_logprobs", "mask", "temperature", "importance_weights"):
        if choice([True, False]):
            e.pop(name)
    for name, given in (("advantages", per_token), ("importance_weights", weights_per_token)):
        if name in e and (tokens == S or choice([True, False])):
            e[f"{name}_per_token"] = given
    return e


def rows(e):
    return {name: e[name] for name in ("logits", "targets", "temperature") if name in e}


@settings(100)
@hypothesis.given(st.data())
def test_token_logprobs(data):
    call_with_strangers(data.draw, ops.token_logprobs, rows(data.draw(batches())), check_logprobs)


def check_loss(
    result,
    values,
    gradients_of,
    *,
    targets,
    cu_seqlens,
    mask=None,
    temperature=1.0,
    tolerance=None,
    **given,
):
    """Compare with the reference of the logits `values`. `gradients_of` takes the gradient that the
    logits should have, and returns pairs of the gradient that a leaf has and the one that it should
    have."""
    real, z = torch.promote_types(values.dtype, torch.float32), exact(values)
    counts = [True] * len(z) if mask is None else mask.tolist()
    bounds = torch.tensor(bounds_of(cu_seqlens, len(z)))
    targets, tau = reference_rows(*z.shape, targets, temperature, counts)
    if is_extreme(tau):
        return
    for name in ("advantages", "old_logprobs", "ref_logprobs", "importance_weights"):
        if given.get(name) is not None:  # as the kernels read it, in the dtype of their arithmetic
            given[name] = exact(given[name].to(real))
    plain = {
        "targets": targets,
        "cu_seqlens": bounds,
        "mask": None if mask is None else torch.tensor(counts, dtype=torch.bool),
    }
    expected, wanted, metrics = computed("reference", z, **plain, temperature=tau, **given)
    actual, found = result
    tolerance = tolerance or max(TOLERANCE[real], 1e-7)
    assert actual.dtype == real
    assert found["tokens"] == sum(counts)
    # of equal tokens, which these few values make, any may be chosen
    if ops.LOSSES[given.get("loss", "ppo")].over_batch:
        return
    assert_close(actual, expected.to(real), tolerance)
    assert found["dropped_tokens"] == metrics["dropped_tokens"]
    numbers = torch.stack([expected, *metrics.values()])
    if not (numbers.isfinite().all() and z.isfinite().all() and numbers.abs().max() < 1e20):
        return
    for name, x in metrics.items():
        assert_close(found[name], x, tolerance, x.abs().clamp_min(1))
    if actual.requires_grad:
        for x, of_leaf in gradients_of(actual, wanted):
            assert_close(x, of_leaf, max(tolerance, TOLERANCE[x.dtype]))


@settings(200)
@hypothesis.given(st.data())
def test_policy_gradient_loss(data):
    def check(result, logits, **given):
        def gradients(loss, wanted):
            return [(torch.autograd.grad(loss, logits)[0], wanted)]

        check_loss(result, logits, gradients, **given)

    call_with_strangers(data.draw, ops.policy_gradient_loss, data.draw(batches()), check)


# --- from hidden states; logits are rounded to their dtype

LINEAR_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
LINEAR_TOLERANCE |= {torch.bfloat16: 0.1, torch.float16: 0.02}


def of_hidden(draw, arguments):
    tokens, vocab = arguments.pop("logits").shape
    size, dtype = draw(st.integers(1, 5)), draw(st.sampled_from(FLOATS))
    of_weight = draw(st.sampled_from([dtype, torch.float32]))
    return arguments | {
        "hidden": drawn_tensor(draw, (tokens, size), [0.0, 1.0, -0.5], dtype),
        "weight": drawn_tensor(draw, (vocab, size), [0.5, -1.0, 1.5], of_weight),
        "chunk_tokens": draw(st.sampled_from([None, 1, 2, 10**6])),
    }


def exact_logits(hidden, weight, chunk_tokens):
    """Return hidden and weight in float64, and their logits in the dtype of hidden."""
    assert chunk_tokens is None or chunk_tokens >= 1
    h, w = exact(hidden), exact(weight.to(hidden.dtype))
    return h, w, (h @ w.T).to(hidden.dtype)


@settings(90)
@hypothesis.given(st.data())
def test_linear_policy_gradient_loss(data):
    def check(result, hidden, weight, chunk_tokens=None, **given):
        h, w, logits = exact_logits(hidden, weight, chunk_tokens)

        def gradients(loss, wanted):
            for x, of_leaf in ((hidden, wanted @ w), (weight, wanted.T @ h)):
                if x.requires_grad:
                    yield torch.autograd.grad(loss, x, retain_graph=True)[0], of_leaf

        check_loss(result, logits, gradients, tolerance=LINEAR_TOLERANCE[hidden.dtype], **given)

    call_with_strangers(
        data.draw,
        ops.linear_policy_gradient_loss,
        of_hidden(data.draw, data.draw(batches())),
        check,
    )


@settings(60)
@hypothesis.given(st.data())
def test_linear_token_logprobs(data):
    def check(actual, hidden, weight, chunk_tokens=None, **given):
        logits = exact_logits(hidden, weight, chunk_tokens)[2]
        check_logprobs(
            [x.detach() for x in actual], logits, tolerance=LINEAR_TOLERANCE[hidden.dtype], **given
        )

    call_with_strangers(
        data.draw,
        ops.linear_token_logprobs,
        of_hidden(data.draw, rows(data.draw(batches()))),
        check,
    )


def last(values):
    return values[-1]


_LOSS = in_float32(example()) | drawn_options(last, "gmpo") | {"loss": "gmpo"}
_LOGITS = {"logits": _LOSS.pop("logits")}
_ROWS = {name: _LOSS[name] for name in ("targets", "temperature")}
_HIDDEN = {"hidden": torch.ones(T, 2), "weight": torch.ones(V, 2), "chunk_tokens": 2}
_SEQUENCES = {name: _LOSS[name] for name in ("ref_logprobs", "cu_seqlens", "mask")}
_PACS = {"reward_proxy": torch.ones(4), "labels": torch.tensor([0.0, 1, 1, 0]), "groups": 2}
PLAIN = {
    "token_logprobs": {**_LOGITS, **_ROWS},
    "policy_gradient_loss": {**_LOGITS, **_LOSS},
    "linear_token_logprobs": {**_HIDDEN, **_ROWS},
    "linear_policy_gradient_loss": {**_HIDDEN, **_LOSS},
    "linear_divergence": {
        **_HIDDEN,
        "teacher_hidden": torch.ones(T, 3),
        "teacher_weight": torch.ones(V, 3),
        "divergence": "jsd",
        "beta": 0.5,
        "temperature": _LOSS["temperature"],
        "softcap": 2.0,
        "teacher_softcap": 3.0,
        "coefficients": _LOSS["mask"],
        "denominator": 4.0,
    },
    "log_ratio_reward": {**_SEQUENCES, "logprobs": _LOSS["old_logprobs"], "beta": 1.0},
    "pacs_loss": {**_PACS, "score": "rloo", "weight": "none", "denominator": 4.0},
}


@pytest.mark.parametrize("name", PLAIN)
def test_every_argument_is_checked(name):
    replace_every_argument(getattr(ops, name), PLAIN[name])
