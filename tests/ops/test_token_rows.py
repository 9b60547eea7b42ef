"""The token kernels against float64, row by row: vocabulary sizes, dtypes, strides, extreme values,
splits.
"""

from itertools import pairwise

import pytest
import torch

from maxrl_fast.ops import LOSSES, policy_gradient_loss, token_logprobs
from maxrl_fast.ops.loss_terms import AGGREGATIONS
from maxrl_fast.ops.token_loss_kernel import write_logprobs_gradient
from tests.ops.loss_definitions import S, T, computed, example

VOCABULARIES = [1, 2, 127, 50257, 151936]
# The relative error of a row in the Euclidean norm, from rounding of the result and of float32
# arithmetic.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 2e-3, torch.float64: 1e-12}


def exact(logits, targets, weights, entropy_coef=0.0, temperature=1.0):
    """Return the loss sum_t -w_t logp_t - c H_t and its gradient, in float64, by autograd."""
    z = logits.detach().double().requires_grad_()
    log_p = torch.log_softmax(z / temperature, -1)
    entropy = -(log_p.exp() * log_p.clamp_min(-1e300)).sum(-1)
    loss = (
        -weights.double() * log_p.gather(1, targets[:, None])[:, 0] - entropy_coef * entropy
    ).sum()
    return loss.detach(), torch.autograd.grad(loss, z)[0]


def ours(logits, targets, weights, **options):
    """Return the same from the kernel, with one response per token."""
    z = logits.detach().requires_grad_()
    cu_seqlens = torch.arange(len(targets) + 1)
    options = {"loss": "reinforce", "aggregation": "seq_sum_constant", "denominator": 1.0} | options
    loss, _ = policy_gradient_loss(z, targets, weights, cu_seqlens, **options)
    return loss.detach(), torch.autograd.grad(loss, z)[0]


def assert_rows_close(actual, expected, targets, tolerance):
    """Check, for every row, the target's column and the other columns, each within its own relative
    error.
    """
    at_target = torch.zeros_like(expected, dtype=torch.bool).scatter(1, targets[:, None], True)
    for part in (at_target, ~at_target):
        error = torch.where(part, actual.double() - expected, 0.0).norm(dim=1)
        size = torch.where(part, expected, 0.0).norm(dim=1)
        assert (error <= tolerance * size).all(), float((error / size.clamp_min(1e-300)).max())


def make_rows(vocab, dtype, rows=5, scale=3.0):
    generator = torch.Generator().manual_seed(vocab)
    logits = (scale * torch.randn(rows, vocab, generator=generator)).to(dtype)
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[0], targets[1] = 0, vocab - 1
    return logits, targets, torch.tensor([1.5, -2.0, 0.7, -1.0, 3.0])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.usefixtures("instructions")
def test_every_row_is_close_to_float64(vocab, dtype):
    logits, targets, weights = make_rows(vocab, dtype)
    for entropy_coef, temperature in ((0.0, 1.0), (0.5, 0.7)):
        options = {"entropy_coef": entropy_coef, "temperature": temperature}
        loss, gradient = ours(logits, targets, weights, **options)
        expected_loss, expected = exact(logits, targets, weights, **options)
        assert gradient.dtype == dtype
        assert loss.item() == pytest.approx(expected_loss.item(), rel=2e-6)
        # At the target, the terms of loss and entropy can nearly cancel.
        tolerance = TOLERANCE[dtype] * (4 if entropy_coef else 1)
        assert_rows_close(gradient, expected, targets, tolerance)
        assert (
            gradient.double().sum(1).abs().max()
            <= 4 * TOLERANCE[dtype] * expected.abs().sum(1).max()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_at_any_address(dtype):
    logits, targets, weights = make_rows(1000, dtype)
    _, expected = ours(logits, targets, weights)
    for offset in (1, 3):
        wide = torch.full((5, 1000 + 7), float("nan"), dtype=dtype)
        wide[:, offset : offset + 1000] = logits
        _, actual = ours(wide[:, offset : offset + 1000], targets, weights)
        assert torch.equal(actual, expected)
    _, transposed = ours(logits.T.contiguous().T, targets, weights)
    assert torch.equal(transposed, expected)


ONE, WIDE = torch.tensor([7]), torch.zeros(5, 40)
EXTREMES = {
    "all -100": WIDE - 100,
    "all 1e4": WIDE + 1e4,
    "one-hot 1e4": WIDE.index_fill(1, ONE, 1e4),
    "some -inf": make_rows(40, torch.float32, scale=1)[0].index_fill(
        1, torch.arange(4, 40, 5), -torch.inf
    ),
    "nearly certain": WIDE.index_fill(1, ONE, 25.0),
    "rising": torch.linspace(-80, 80, 40).expand(5, 40),
}
# Blocks of a row that are all -inf, where the greatest logit is so low that exp(-top) overflows.
EXTREMES |= {
    f"{top} after {vocab - 2} of -inf": torch.tensor(
        [-torch.inf] * (vocab - 2) + [top - 1, top]
    ).expand(5, vocab)
    for vocab, top in ((2, -100.0), (2, -3000.0), (3000, -200.0), (5000, -3000.0))
}
EXTREMES["one possible token"] = torch.tensor([-torch.inf, -3000]).expand(5, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.usefixtures("instructions")
def test_extreme_logits(name, dtype):
    logits = EXTREMES[name].to(dtype)
    possible = (logits[0] > -torch.inf).nonzero()[:, 0]
    targets = possible[torch.tensor([7, 7, 0, 8, 2]) % len(possible)]
    # far from the limits of half precision
    weights = torch.tensor([1.5, -2.0, 0.7, -1.0, 3.0]) * 64
    for options in ({}, {"entropy_coef": 0.5}):
        loss, gradient = ours(logits, targets, weights, **options)
        expected_loss, expected = exact(logits, targets, weights, **options)
        assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
        assert gradient.isfinite().all()
        if not options:
            # The smallest positive number is 6e-8 in half precision, and 1e-38 for a float32
            # exponential. An error in the seventh digit of an exponent near -100 is an error in the
            # fifth digit of the exponential.
            smallest = 6e-8 if dtype == torch.float16 else 1e-35
            error = (gradient.double() - expected).abs()
            assert (error <= max(TOLERANCE[dtype], 2e-5) * expected.abs() + smallest).all()
        impossible = logits == -torch.inf
        assert (gradient[impossible] == 0).all()


def test_a_nearly_certain_target_keeps_its_gradient():
    """1 - p is 1e-9, so p rounds to 1 in float32, and in bfloat16 it does from .998 on."""
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.tensor([[0.0, -21.0, -23.0]], dtype=dtype)
        _, expected = exact(logits, torch.tensor([0]), torch.ones(1))
        _, actual = ours(logits, torch.tensor([0]), torch.ones(1))
        assert expected[0, 0] < -1e-10
        torch.testing.assert_close(
            actual.double(), expected, rtol=4e-3 if dtype == torch.bfloat16 else 1e-5, atol=0
        )
        logp, entropy = token_logprobs(logits, torch.tensor([0]))
        exact_logp = torch.log_softmax(logits.double(), -1)
        assert logp.item() == pytest.approx(exact_logp[0, 0].item(), rel=1e-5)
        assert entropy.item() == pytest.approx(
            -(exact_logp.exp() * exact_logp).sum().item(), rel=1e-4
        )


def test_a_nan_reaches_the_loss_but_no_other_row():
    logits, targets, weights = make_rows(1000, torch.float32)
    for value in (torch.nan, torch.inf):
        poisoned = logits.clone()
        poisoned[2, 345] = value
        loss, gradient = ours(poisoned, targets, weights)
        assert loss.isnan()
        assert gradient[2].isnan().any()
        assert gradient[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.usefixtures("instructions")
def test_logprobs_and_entropy_and_their_gradients():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        logits, targets, weights = make_rows(3001, dtype)
        z = logits.detach().requires_grad_()
        logp, entropy = token_logprobs(z, targets, temperature=0.7)
        assert logp.dtype == entropy.dtype == torch.promote_types(dtype, torch.float32)
        wide = logits.double().requires_grad_()
        log_p = torch.log_softmax(wide / 0.7, -1)
        expected_logp = log_p.gather(1, targets[:, None])[:, 0]
        expected_entropy = -(log_p.exp() * log_p).sum(-1)
        torch.testing.assert_close(logp.double(), expected_logp, rtol=1e-6, atol=0)
        torch.testing.assert_close(entropy.double(), expected_entropy, rtol=2e-6, atol=0)
        by = weights.to(logp.dtype)
        by_entropy = torch.tensor([0.0, 1.0, -2.0, 0.5, 0.0], dtype=logp.dtype)
        (gradient,) = torch.autograd.grad((logp, entropy), z, (by, by_entropy))
        (expected,) = torch.autograd.grad(
            (expected_logp, expected_entropy), wide, (by.double(), by_entropy.double())
        )
        assert_rows_close(gradient, expected, targets, 4 * TOLERANCE[dtype])
    z = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([4, 0, 2])
    assert torch.autograd.gradcheck(
        lambda x: token_logprobs(x, y, temperature=torch.tensor([0.5, 1.0, 2.0])), (z,)
    )
    with torch.no_grad():
        assert not token_logprobs(z, y)[0].requires_grad
    logp, entropy = token_logprobs(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([1]))
    torch.testing.assert_close(torch.cat([-logp, entropy]), torch.tensor([2.0, 2.0]).log())
    # of any strides
    assert [len(x) for x in token_logprobs(torch.zeros(0, 9)[:, 1::2], y[:0])] == [0, 0]


@pytest.mark.parametrize(
    ("loss", "aggregation"),
    [
        (loss, row.aggregation or AGGREGATIONS[i % len(AGGREGATIONS)])
        for i, (loss, row) in enumerate(LOSSES.items())
        if not row.over_batch
    ],
)
def test_losses_of_any_split_add_up(loss, aggregation):
    e = example() | {"kl_coef": 0.1, "entropy_coef": 0.05}
    denominator = {"token_mean": float(e["mask"].sum()), "seq_sum_constant": 50.0}.get(
        aggregation, 7.0
    )
    e |= {"loss": loss, "aggregation": aggregation, "denominator": denominator}
    whole, gradient, metrics = computed("kernel", **e)
    cu_seqlens = e["cu_seqlens"].tolist()
    for cuts in ([0, 1, 2, S], [0, 4, 5, S], list(range(S + 1))):
        losses, gradients, tokens = [], [], 0
        for first, last in pairwise(cuts):
            start, stop = cu_seqlens[first], cu_seqlens[last]
            part = {
                name: x[start:stop] if torch.is_tensor(x) and len(x) == T else x
                for name, x in e.items()
            }
            part |= {name: e[name][first:last] for name in ("advantages", "importance_weights")}
            part["cu_seqlens"] = e["cu_seqlens"][first : last + 1] - start
            loss_of_part, gradient_of_part, metrics_of_part = computed("kernel", **part)
            losses.append(loss_of_part.double())
            gradients.append(gradient_of_part)
            tokens += int(metrics_of_part["tokens"])
        exact = {"rtol": 0, "atol": 0} if LOSSES[loss].fused else {"rtol": 1e-9, "atol": 1e-12}
        torch.testing.assert_close(torch.cat(gradients), gradient, **exact)
        assert float(sum(losses)) == pytest.approx(whole.item(), rel=1e-6)
        assert tokens == int(metrics["tokens"]) == int(e["mask"].sum())


def check_rows_far_apart():
    """Compare results on rows that are more than 2^32 elements apart with results on the same rows
    side by side.

    The memory between the rows is never touched, so that the system need not have it.
    """
    generator = torch.Generator().manual_seed(0)
    stride, targets = 2**32 + 72, torch.tensor([1, 2, 70])
    near = torch.randn(3, 71, generator=generator).bfloat16()
    far = (
        torch.empty(2 * stride + 71, dtype=torch.bfloat16)
        .as_strided((3, 71), (stride, 1))
        .copy_(near)
    )
    for ours, expected in zip(
        token_logprobs(far, targets), token_logprobs(near, targets), strict=True
    ):
        assert torch.equal(ours, expected)
    for logits in (far, near):
        rows = targets, torch.ones(3).double(), torch.ones(3), torch.full((3,), 0.5)
        write_logprobs_gradient(logits, rows, logits)
    assert torch.equal(far, near)


def test_rows_may_be_more_than_32_bits_apart():
    check_rows_far_apart()


def test_results_are_bitwise_repeatable_on_any_number_of_threads():
    e = example(vocab=40_000) | {"kl_coef": 0.1, "entropy_coef": 0.05, "loss": "gspo"}
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 3):
            torch.set_num_threads(count)
            results.append(computed("kernel", **e))
    finally:
        torch.set_num_threads(threads)
    for loss, gradient, metrics in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert torch.equal(gradient, results[0][1])
        assert all(torch.equal(metrics[name], results[0][2][name]) for name in metrics)


def test_gradients_round_to_every_float16_number():
    """The gradient rounds to every finite float16 number: reinforce at V = 2 with p = 1/2 gives
    A/2.
    """
    halves = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    halves = halves[halves.isfinite() & (halves.float().abs() < 30000)]
    logits = torch.zeros(len(halves), 2, dtype=torch.float16)
    _, gradient = ours(logits, torch.zeros(len(halves), dtype=torch.int64), 2 * halves.float())
    torch.testing.assert_close(gradient[:, 1], halves, rtol=0, atol=0)
    torch.testing.assert_close(gradient[:, 0], -halves, rtol=0, atol=0)
