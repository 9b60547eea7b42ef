import math

import pytest
import torch
from torch.nn.functional import kl_div

from maxrl_fast.ops import linear_divergence
from maxrl_fast.ops.divergence import DIVERGENCES
from tests.ops.operators import Operators

H, K = 16, 11  # the hidden sizes of policy and teacher


def make(num_tokens, vocab, scale=0.3):
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_tokens, H), (vocab, H), (num_tokens, K), (vocab, K)]
    sides = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    sides[0] *= scale
    sides[2] *= scale
    return given(sides)


def given(sides, *, free=(0, 1)):
    return [x.detach().clone().requires_grad_(i in free) for i, x in enumerate(sides)]


def defined(sides, divergence, beta=0.5, temperature=1.0, softcap=0.0, teacher_softcap=0.0):
    """Return the divergence of each token [T], by the formulas in docs/token_loss.md."""
    tau = temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature

    def log_softmax(hidden, weight, cap):
        z = hidden @ weight.to(hidden.dtype).T
        z = cap * torch.tanh(z / cap) if cap else z
        return torch.log_softmax(z.to(torch.promote_types(z.dtype, torch.float32)) / tau, -1)

    def kl(log_a, log_b):
        return kl_div(log_b, log_a, reduction="none", log_target=True).sum(-1)

    log_p, log_q = log_softmax(*sides[:2], softcap), log_softmax(*sides[2:], teacher_softcap)
    if divergence != "jsd":
        return kl(log_p, log_q) if divergence == "reverse" else kl(log_q, log_p)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log(1 - beta))
    return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)


def error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def gradients(loss, sides):
    return torch.autograd.grad(loss, sides[:2])


@pytest.mark.parametrize(("num_tokens", "vocab"), [(23, 7), (13, 1031)])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_equals_kl_div_in_float64(divergence, num_tokens, vocab):
    """Tokens with coefficient 0 are not read: their states are NaN."""
    sides = make(num_tokens, vocab)
    tau, c = 0.5 + torch.rand(2, num_tokens, dtype=torch.float64)
    keep = torch.arange(num_tokens) % 3 != 1
    for options, factors, aggregation, chunk in (
        ({"temperature": 0.7}, torch.full_like(c, 1 / num_tokens), {}, None),
        (
            {"temperature": tau, "softcap": 3.0},
            keep.double() / keep.sum(),
            {"coefficients": keep},
            4,
        ),
        (
            {"temperature": tau, "teacher_softcap": 3.0},
            keep * c / 5,
            {"coefficients": keep * c, "denominator": torch.tensor(5)},
            1,
        ),
    ):
        options["beta"] = 0.3
        states = given(sides)
        for x in states[::2]:
            x.data[factors == 0] = torch.nan
        loss, metrics = linear_divergence(
            *states, divergence, **options, **aggregation, chunk_tokens=chunk
        )
        expected = defined(sides, divergence, **options).where(factors > 0, 0.0)
        total = (expected * factors).sum()
        assert expected.max() > 0.1
        assert loss.item() == pytest.approx(total.item(), rel=1e-12)
        assert error(metrics["divergence"], expected) <= 1e-12
        found, wanted = gradients(3 * loss, states), gradients(3 * total, sides)
        assert max(map(error, found, wanted)) <= 1e-12


@pytest.mark.parametrize(
    ("dtype", "of_weight"),
    [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_errors_are_at_most_twice_those_of_pytorch(divergence, dtype, of_weight):
    for vocab, scale in ((7, 0.3), (70, 20.0), (10_000, 0.3)):
        sides = given(x.to(of_weight if i else dtype) for i, x in enumerate(make(21, vocab, scale)))
        exact = given(x.double() for x in sides)
        of_torch, expected = (defined(x, divergence, temperature=0.7) for x in (sides, exact))
        loss, metrics = linear_divergence(*sides, divergence, temperature=0.7, chunk_tokens=8)
        ours = metrics["divergence"], *gradients(loss, sides)
        theirs = of_torch, *gradients(of_torch.mean(), sides)
        wanted = expected, *gradients(expected.mean(), exact)
        assert [loss.dtype, *(x.dtype for x in ours[1:])] == [torch.float32, dtype, of_weight]
        for a, b, c in zip(ours, theirs, wanted, strict=True):
            assert error(a, c) <= 2 * error(b, c) + torch.finfo(dtype).eps


def test_jsd_has_the_limits_forward_and_reverse():
    sides = make(9, 70)
    for beta, name in ((1e-7, "forward"), (1 - 1e-7, "reverse")):
        (jsd, _), (limit, _) = (linear_divergence(*sides, x, beta=beta) for x in ("jsd", name))
        assert 1e7 * jsd.item() == pytest.approx(limit.item(), rel=1e-5)


def test_memory_is_two_chunks_and_frozen_inputs_have_no_gradient_buffer(monkeypatch):
    monkeypatch.setattr("maxrl_fast.ops.divergence._BLOCK_BYTES", {"cpu": 1})  # one row
    sides = make(12, 1031)
    expected = gradients(defined(sides, "jsd").mean(), sides)
    for free in ((0,), (1,), ()):
        inputs = given(sides, free=free)
        with Operators() as operators:
            loss, _ = linear_divergence(*inputs, "jsd", chunk_tokens=4)
        made = [n for x in operators.calls if "empty" in x.function.name() for n in x.sizes]
        assert made.count(4 * 1031) == 2
        of_gradients = {12 * H, 1031 * H}
        assert operators.sizes() & of_gradients == {sides[i].numel() for i in free}
        assert max(operators.sizes() - of_gradients) == 4 * 1031
        for i in free:
            assert error(torch.autograd.grad(loss, inputs[i])[0], expected[i]) <= 1e-12
