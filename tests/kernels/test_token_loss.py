"""The token kernels, row by row: vocabulary sizes, dtypes, strides, extreme values. The CPU's are
compared with PyTorch in float64, a GPU's with the CPU's.

tests/ops/test_token_loss.py compares every loss with its definition.
"""

from contextlib import nullcontext
from functools import cache

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.ops import linear_divergence
from maxrl_fast.ops.divergence import DIVERGENCES
from maxrl_fast.ops.loss import write_logprobs_gradient
from maxrl_fast.ops.loss_kernel import TokenRows
from tests.kernels.devices import CLUSTERS, NO_CLUSTERS, PIPELINE, emulated_gpu
from tests.models import on_threads
from tests.ops.loss_definitions import computed, in_float32
from tests.ops.loss_definitions import example as small_example
from tests.ops.test_divergence import defined, error, given, gradients, make

GPU = torch.device("cuda")
LENGTHS = torch.tensor([3, 0, 1, 9, 4, 0, 6])
T = int(LENGTHS.sum())
# The relative error of a row in the Euclidean norm, from rounding of the result and of float32
# arithmetic.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 2e-3, torch.float64: 1e-12}
# Between a GPU and a CPU. In float32 a log-prob of -12 is known to 1e-6, which functions of it
# multiply.
OF_GPU = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float64: 1e-11}
HALVES = [torch.float32, torch.bfloat16, torch.float16]


def example(vocab, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(T, vocab, generator=generator)).to(dtype)
    targets = torch.randint(vocab, (T,), generator=generator)
    targets[0], targets[1] = 0, vocab - 1
    logp, _ = ops.token_logprobs(logits, targets)
    return logits, {
        "targets": targets,
        "advantages": torch.tensor([1.5, 1.0, -2.0, 0.7, 0.0, 1.0, -0.4]),
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)]),
        "old_logprobs": logp + 0.3 * torch.randn(T, generator=generator),
        "ref_logprobs": logp + 0.3 * torch.randn(T, generator=generator),
        "mask": torch.rand(T, generator=generator) < 0.8,
        "temperature": 0.5 + torch.rand(T, generator=generator),
    }


def results(logits, batch, **options):
    z = logits.detach().requires_grad_()
    loss, metrics = ops.policy_gradient_loss(z, **batch, **options)
    return loss.detach(), torch.autograd.grad(loss, z)[0], metrics


def on(device, logits, batch, capability=CLUSTERS, **options):
    with device.running(capability):
        return results(device.put(logits), device.put(batch), **options)


def assert_rows_close(actual, expected, tolerance):
    error = (actual.cpu().double() - expected.double()).norm(dim=1)
    assert (error <= tolerance * expected.double().norm(dim=1)).all(), float(error.max())


def assert_same(actual, expected, tolerance, rel=1e-5, abs=5e-7):
    assert actual[0].item() == pytest.approx(expected[0].item(), rel=rel, abs=abs)
    assert_rows_close(actual[1], expected[1], tolerance)
    for name, value in expected[2].items():
        assert actual[2][name].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-7), name


# --- the loss sum_t -w_t logp_t - c H_t, whose every row has a gradient of its own, in float64


def exact(logits, targets, weights, entropy_coef=0.0, temperature=1.0):
    z = logits.detach().double().requires_grad_()
    log_p = torch.log_softmax(z / temperature, -1)
    entropy = -(log_p.exp() * log_p.clamp_min(-1e300)).sum(-1)
    logp = log_p.gather(1, targets[:, None])[:, 0]
    loss = (-weights.double() * logp - entropy_coef * entropy).sum()
    return loss.detach(), torch.autograd.grad(loss, z)[0]


def ours(logits, targets, weights, **options):
    options |= {"loss": "reinforce", "aggregation": "seq_sum_constant", "denominator": 1.0}
    cu_seqlens = torch.arange(len(targets) + 1)
    batch = {"targets": targets, "advantages": weights, "cu_seqlens": cu_seqlens}
    return results(logits, batch, **options)[:2]


def make_rows(vocab, dtype, rows=5, scale=3.0):
    generator = torch.Generator().manual_seed(vocab)
    logits = (scale * torch.randn(rows, vocab, generator=generator)).to(dtype)
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[0], targets[1] = 0, vocab - 1
    return logits, targets, torch.tensor([1.5, -2.0, 0.7, -1.0, 3.0])


@cache
def exact_rows(vocab, dtype, entropy_coef, temperature):
    return exact(*make_rows(vocab, dtype), entropy_coef, temperature)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("vocab", [1, 2, 127, 50257])
def test_every_row_is_close_to_float64(vocab, dtype):
    logits, targets, weights = make_rows(vocab, dtype)
    at_target = torch.zeros_like(logits, dtype=torch.bool).scatter(1, targets[:, None], True)
    for entropy_coef, temperature in ((0.0, 1.0), (0.5, 0.7)):
        options = {"entropy_coef": entropy_coef, "temperature": temperature}
        loss, gradient = ours(logits, targets, weights, **options)
        expected_loss, expected = exact_rows(vocab, dtype, entropy_coef, temperature)
        assert gradient.dtype == dtype
        assert loss.item() == pytest.approx(expected_loss.item(), rel=2e-6)
        # At the target, the terms of loss and entropy can nearly cancel.
        tolerance = TOLERANCE[dtype] * (4 if entropy_coef else 1)
        for part in (at_target, ~at_target):
            assert_rows_close(gradient.where(part, 0), expected.where(part, 0.0), tolerance)
        sums = gradient.double().sum(1).abs().max()
        assert sums <= 4 * TOLERANCE[dtype] * expected.abs().sum(1).max()


# The loss on rows of 40 numbers, on blocks of a row that are all -inf, and where the greatest logit
# is so low that exp(-top) overflows.
ONE, WIDE = torch.tensor([7]), torch.zeros(5, 40)
SOME = make_rows(40, torch.float32, scale=1)[0].index_fill(1, torch.arange(4, 40, 5), -torch.inf)
EXTREMES = {
    "all -100": WIDE - 100,
    "all 1e4": WIDE + 1e4,
    "one-hot 1e4": WIDE.index_fill(1, ONE, 1e4),
    "some -inf": SOME,
    "nearly certain": WIDE.index_fill(1, ONE, 25.0),
    "rising": torch.linspace(-80, 80, 40).expand(5, 40),
    "one possible token": torch.tensor([-torch.inf, -3000]).expand(5, 2),
}
for size, top in ((2, -100.0), (2, -3000.0), (3000, -200.0), (5000, -3000.0)):
    row = torch.tensor([-torch.inf] * (size - 2) + [top - 1, top])
    EXTREMES[f"{top} after {size - 2} of -inf"] = row.expand(5, size)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_logits(name):
    for dtype in HALVES:
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
            assert (gradient[logits == -torch.inf] == 0).all()
            if not options:
                # The smallest positive number is 6e-8 in half precision, and 1e-38 for a float32
                # exponential. An error in the seventh digit of an exponent near -100 is an error
                # in the fifth digit of the exponential.
                smallest = 6e-8 if dtype == torch.float16 else 1e-35
                error = (gradient.double() - expected).abs()
                assert (error <= max(TOLERANCE[dtype], 2e-5) * expected.abs() + smallest).all()


def test_a_nearly_certain_target_keeps_its_log_prob_and_entropy():
    """1 - p is 1e-9, so p rounds to 1 in float32, and in bfloat16 it does from .998 on."""
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.tensor([[0.0, -21.0, -23.0]], dtype=dtype)
        logp, entropy = ops.token_logprobs(logits, torch.tensor([0]))
        log_p = torch.log_softmax(logits.double(), -1)
        assert logp.item() == pytest.approx(log_p[0, 0].item(), rel=1e-5)
        assert entropy.item() == pytest.approx(-(log_p.exp() * log_p).sum().item(), rel=1e-4)


def test_a_nan_reaches_the_loss_but_no_other_row():
    logits, targets, weights = make_rows(1000, torch.float32)
    for value in (torch.nan, torch.inf):
        poisoned = logits.clone()
        poisoned[2, 345] = value
        loss, gradient = ours(poisoned, targets, weights)
        assert loss.isnan()
        assert gradient[2].isnan().any()
        assert gradient[[0, 1, 3, 4]].isfinite().all()


def test_gradients_round_to_every_float16_number():
    """reinforce at V = 2 with p = 1/2 gives A/2."""
    halves = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    halves = halves[halves.isfinite() & (halves.float().abs() < 30000)]
    logits = torch.zeros(len(halves), 2, dtype=torch.float16)
    _, gradient = ours(logits, torch.zeros(len(halves), dtype=torch.int64), 2 * halves.float())
    torch.testing.assert_close(gradient[:, 1], halves, rtol=0, atol=0)
    torch.testing.assert_close(gradient[:, 0], -halves, rtol=0, atol=0)


def test_results_are_bitwise_repeatable_on_any_number_of_threads():
    e = in_float32(small_example(vocab=20_000))
    e |= {"kl_coef": 0.1, "entropy_coef": 0.05, "loss": "ppo"}
    found = []
    for _ in on_threads(1, 2, 3, 3):
        loss, gradient, metrics = computed("kernel", **e)
        found.append(torch.cat([x.flatten() for x in (loss, gradient, *metrics.values())]))
    assert all(torch.equal(x, found[0]) for x in found[1:])


# --- all terms, on every device

OPTIONS = [
    {"loss": "reinforce"},
    {"loss": "ppo", "aggregation": "seq_mean_token_mean"},
    {"loss": "ppo", "kl_coef": 0.1, "entropy_coef": 0.05, "dual_clip": 3.0},
    {"loss": "cispo", "kl_coef": 0.1, "kl": "k2"},
    {"loss": "ppo", "aggregation": "seq_mean_token_sum", "denominator": 11.0},
]
# Functions on token_logprobs, whose values do not depend on the choice of one of several nearly
# equal tokens.
FUNCTIONS = [
    {"loss": loss, "aggregation": row.aggregation or "token_mean"}
    for loss, row in ops.LOSSES.items()
    if not row.fused and not row.over_batch
]


# A warp takes rows of up to 8 KiB, a cluster of 2 or 4 blocks takes those of 100 kB, and one of 8
# or 16 those of 304 kB, which a block must read twice, as a cluster must those of 4 MB.
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "size", [1, 2, 127, 100_000, 304_000, pytest.param(4_194_304, marks=pytest.mark.gpu)]
)
def test_loss_gradient_and_metrics_equal_the_cpus(gpu, size, dtype):
    """Sizes from 1000 on are bytes of a row."""
    vocab = size if size < 1000 else size // dtype.itemsize + 3
    logits, batch = example(vocab, dtype)
    for options in OPTIONS + FUNCTIONS * (vocab == 127) if size < 1000 else OPTIONS[2:4]:
        expected = results(logits, batch, **options)
        for capability in gpu.capabilities if size > 1000 else gpu.capabilities[:1]:
            actual = on(gpu, logits, batch, capability, **options)
            assert_same(actual, expected, OF_GPU[dtype])
        again = on(gpu, logits, batch, capability, **options)
        assert torch.equal(again[1], actual[1])  # deterministic


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [31, 1030, 24001])
def test_rows_at_any_address(device, vocab, dtype):
    logits, batch = example(vocab, dtype)
    tolerance, options = OF_GPU[dtype] if device.is_gpu else 0.0, OPTIONS[2]
    _, expected, _ = results(logits, batch, **options)
    for offset in (0, 1, 3, 8):
        padded = torch.full((T, vocab + 13), 7.0, dtype=dtype, device=device.place)
        columns = slice(offset, offset + vocab)
        padded[:, columns] = device.put(logits)
        for capability in device.capabilities if vocab > 10_000 else device.capabilities[:1]:
            _, gradient, _ = on(device, padded[:, columns], batch, capability, **options)
            assert_rows_close(gradient, expected, tolerance)
    _, transposed, _ = on(device, logits.T.contiguous().T, batch, **options)
    assert_rows_close(transposed, expected, tolerance)


@pytest.mark.parametrize("vocab", [1, 127, 5003, 12007])  # a block; in 4 and 8 bytes a cluster
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_logprobs_entropy_and_their_gradient(device, dtype, vocab):
    logits, batch = example(vocab, dtype)
    slopes = torch.randn(2, T, generator=torch.Generator().manual_seed(1))
    slopes[:, 3] = 0

    def of(z, function):
        z = z.detach().requires_grad_()
        values = function(z, batch["targets"].to(z.device))
        given = [x.to(values[0]) for x in slopes]
        return [x.detach().cpu() for x in (*values, *torch.autograd.grad(values, z, given))]

    def kernel(z, targets):
        return ops.token_logprobs(z, targets, temperature=0.7)

    def by_definition(z, targets):
        log_p = torch.log_softmax(z / 0.7, -1)
        return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    expected = of(logits, kernel) if device.is_gpu else of(logits.double(), by_definition)
    with device.running():
        actual = of(device.put(logits), kernel)
    for a, e in zip(actual[:2], expected[:2], strict=True):
        assert a.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(a.double(), e.double(), rtol=1e-5, atol=1e-5 * device.is_gpu)
    tolerance = 2 * OF_GPU[dtype] if device.is_gpu else 4 * TOLERANCE[dtype]
    assert_rows_close(actual[2], expected[2], tolerance)


# In the pipeline a warp runs only where no other one can: a reader, the resolver, or the planner.
@pytest.mark.parametrize(
    ("size", "vocab", "capability", "lag"),
    [
        *((300, 37, CLUSTERS, ""), (60, 5003, CLUSTERS, ""), (1, 9001, "9/1", "")),
        *((23, 9001, "9/1", lag) for lag in "089"),
        *((23, 30_011, "9/4", lag) for lag in "089"),
    ],
)
def test_more_rows_than_fit_at_once(gpu, size, vocab, capability, lag, monkeypatch):
    """Every warp, block, or cluster takes several rows, some of which it skips."""
    monkeypatch.setenv("MAXRL_EMULATED_LAG", lag or "99")
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(size, vocab, generator=generator)
    logits[::4, : vocab - 9] = -torch.inf
    kept = torch.rand(size, generator=generator) < 0.7
    batch = {
        "targets": torch.randint(vocab - 9, vocab, (size,), generator=generator),
        "advantages": torch.randn(size, generator=generator) * kept,
        "advantages_per_token": True,
        "cu_seqlens": torch.tensor([0, size // 3, size]),
        "mask": torch.rand(size, generator=generator) < 0.8,
        "temperature": torch.tensor([1.0, 1e-3, 1e3])[torch.arange(size) % 3],
    }
    actual = on(gpu, logits, batch, capability)
    assert_same(actual, results(logits, batch), OF_GPU[torch.float32])


CASES = [(40, CLUSTERS), (30011, CLUSTERS), (30011, NO_CLUSTERS), (40011, "10/2"), (70011, "10/1")]
CASES += [(150_011, CLUSTERS), (150_021, "10/8")]  # 16 blocks, and 8 where 16 do not fit
CASES += [(50011, PIPELINE), (40011, "9/2"), (20011, "9/1"), (70011, "9/8")]


@pytest.mark.parametrize(("vocab", "capability"), CASES)
def test_extreme_logits_on_a_gpu(gpu, vocab, capability):
    """Logits of -inf have probability 0, large differences do not overflow, and one NaN or +inf
    makes a row NaN. The largest clusters that fit may have 2 blocks, or 1.
    """
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(6))
    targets = torch.tensor([3, 3, vocab - 1, 0, 5, 5, 5, 5])
    logits[0, vocab // 2 :] = -torch.inf
    logits[1, :3] = logits[1, 4:] = -torch.inf  # all but the target
    logits[2] *= 1e6
    logits[3, 0] = 80  # a probability of 1
    logits[4, 6:] = 1e6
    logits[5, 9] = torch.nan
    logits[6, 9] = torch.inf
    logits[7, 5] = -torch.inf  # the target

    def of(z, targets):
        z = z.detach().requires_grad_()
        logprobs, entropy = ops.token_logprobs(z, targets)
        (gradient,) = torch.autograd.grad(logprobs[:5].sum() + 0.5 * entropy[:4].sum(), z)
        return [x.detach().cpu() for x in (logprobs, entropy, gradient)]

    expected = of(logits, targets)
    with gpu.running(capability):
        actual = of(gpu.put(logits), gpu.put(targets))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert actual[0].isfinite().tolist() == [True] * 5 + [False] * 3


def test_masked_values_may_be_anything_and_bad_targets_give_nan(gpu):
    logits, batch = example(500, torch.float32)
    _, clean, _ = results(logits, batch)
    masked = ~batch["mask"]
    logits[masked] = torch.nan
    batch["targets"][masked] = -100
    loss, gradient, _ = on(gpu, logits, batch)
    assert loss.isfinite()
    assert_rows_close(gradient, clean, OF_GPU[torch.float32])
    bad = batch["mask"].nonzero()[0]
    batch["targets"][bad] = 500
    loss, gradient, _ = on(gpu, logits, batch)
    assert loss.isnan()
    assert gradient[bad].isnan().all()
    batch["targets"][bad] = 0
    for temperature in (0.0, -1.0, torch.nan):
        batch["temperature"][bad] = temperature
        assert on(gpu, logits, batch)[1][bad].isnan().all()


# A warp, a cluster, the pipeline, and a block that reads rows twice write the gradient over float32
# logits.
@pytest.mark.parametrize(
    ("vocab", "capability", "dtype"),
    [
        (517, CLUSTERS, torch.float32),
        (517, CLUSTERS, torch.bfloat16),
        (12_007, CLUSTERS, torch.float16),
        (12_007, PIPELINE, torch.bfloat16),
        (60_001, NO_CLUSTERS, torch.bfloat16),
    ],
)
def test_linear_loss(gpu, vocab, capability, dtype):
    _, batch = example(vocab, torch.float32)
    generator = torch.Generator().manual_seed(2)
    # small logits, whose rounding on a GPU changes the loss little
    hidden, weight = (torch.randn(n, 24, generator=generator) for n in (T, vocab))
    inputs = [hidden.div(4).to(dtype), weight.to(dtype)]

    def of(inputs, batch):
        h, w = (x.detach().requires_grad_() for x in inputs)
        options = {"loss": "reinforce", "entropy_coef": 0.1, "chunk_tokens": 7}
        loss, _ = ops.linear_policy_gradient_loss(h, w, **batch, **options)
        logprobs, _ = ops.linear_token_logprobs(h, w, batch["targets"], chunk_tokens=7)
        total = 3 * loss + logprobs.mean()
        return [x.detach().cpu() for x in (loss, logprobs, *torch.autograd.grad(total, (h, w)))]

    expected = of([x.float() for x in inputs], batch)
    with gpu.running(capability):
        actual = of([gpu.put(x) for x in inputs], gpu.put(batch))
    limits = (3e-3, 1e-2) if gpu.name == "cuda" else (1e-5, 6e-3)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        error = limits[i > 1] if gpu.name == "cuda" or dtype != torch.float32 else 1e-5
        assert (a - e).double().norm() <= error * e.double().norm()


@pytest.mark.parametrize(
    "around", [nullcontext, pytest.param(emulated_gpu, marks=pytest.mark.emulated)]
)
def test_rows_may_be_more_than_32_bits_apart(around):
    """The memory between the rows is never touched, so that the system need not have it."""
    generator = torch.Generator().manual_seed(0)
    stride, targets = 2**32 + 72, torch.tensor([1, 2, 70])
    near = torch.randn(3, 71, generator=generator).bfloat16()
    memory = torch.empty(2 * stride + 71, dtype=torch.bfloat16)
    far = memory.as_strided((3, 71), (stride, 1)).copy_(near)
    with around():
        pairs = zip(*(ops.token_logprobs(x, targets) for x in (far, near)), strict=True)
        for logits in (far, near):
            rows = TokenRows((3, 71), logits.device, targets, 1.0, None)
            write_logprobs_gradient(rows, logits, (torch.ones(3), torch.full((3,), 0.5)), logits)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(far, near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_ratio_reward(device, dtype):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 300, (170,), generator=generator)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    x, ref = 0.2 * torch.randn(2, int(cu_seqlens[-1]), generator=generator, dtype=dtype)
    weights = torch.randn(170, generator=generator, dtype=dtype)
    tolerance = {"rtol": 1e-5 if dtype == torch.float32 else 1e-11, "atol": 1e-6}
    for mask in (None, torch.rand(len(ref), generator=generator) < 0.8):
        with device.running():
            leaf, *given = map(device.put, (x.clone().requires_grad_(), ref, cu_seqlens))
            proxies = ops.log_ratio_reward(leaf, *given, beta=0.3, mask=device.put(mask))
            (gradient,) = torch.autograd.grad(proxies, leaf, device.put(weights))
        counts = torch.ones(len(x)) if mask is None else mask
        difference = 0.3 * (x.double() - ref.double()) * counts
        sums = torch.stack([part.sum() for part in difference.split(lengths.tolist())])
        by_token = 0.3 * weights.double().repeat_interleave(lengths) * counts
        for actual, wanted in ((proxies, sums), (gradient, by_token)):
            assert wanted.abs().max() > 0.1
            torch.testing.assert_close(actual.detach().cpu().double(), wanted, **tolerance)


# --- what only a GPU has: streams, graphs, and a host that may wait for it


@pytest.fixture
def on_gpu():
    logits, batch = example(5000, torch.bfloat16)
    return logits.to(GPU), {name: x.to(GPU) for name, x in batch.items()}


@pytest.mark.gpu
def test_on_a_side_stream_and_in_a_graph(on_gpu):
    z, batch = on_gpu
    batch = {name: x for name, x in batch.items() if name != "mask"} | {"denominator": 9.0}
    expected = ops.policy_gradient_loss(z, **batch)[0].item()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            side = ops.policy_gradient_loss(z, **batch)[0]
    stream.synchronize()
    assert side.item() == expected
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = ops.policy_gradient_loss(z, **batch)
    z.mul_(0.5)
    graph.replay()
    assert captured.item() == pytest.approx(ops.policy_gradient_loss(z, **batch)[0].item())
    assert captured.item() != pytest.approx(expected)


@pytest.mark.gpu
def test_no_operator_waits_for_the_device(on_gpu):
    z, batch = on_gpu[0].requires_grad_(), on_gpu[1]
    hidden, weight = (torch.randn(n, 64, device=GPU).bfloat16().requires_grad_() for n in (T, 5000))
    unmasked = {name: values for name, values in batch.items() if name != "mask"}
    # the first one looks what torch can do
    ops.linear_policy_gradient_loss(hidden, weight, **unmasked)[0].backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for options in OPTIONS + FUNCTIONS:
            loss, _ = ops.policy_gradient_loss(z, **batch, **options)
            (2 * loss).backward()
            ops.linear_policy_gradient_loss(hidden, weight, **unmasked, **options)[0].backward()
        ops.token_logprobs(z, batch["targets"])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [7, 3085])  # beyond what a block reads at a time
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_linear_divergence(gpu, divergence, vocab, dtype):
    """Tokens with coefficient 0 are not read: their states are NaN."""
    sides = given(x.to(dtype) for x in make(9, vocab))
    exact = given(x.double() for x in sides)
    keep, tau = torch.arange(9) % 3 != 1, torch.linspace(0.5, 1.5, 9)
    options = {"beta": 0.3, "softcap": 3.0, "temperature": tau}
    for x in sides[::2]:
        x.data[~keep] = torch.nan
    names, inputs = [], [gpu.put(x) for x in sides]
    with gpu.watched(names):
        loss, metrics = linear_divergence(
            *inputs, divergence, **gpu.put(options), coefficients=gpu.put(keep), chunk_tokens=4
        )
    assert names == ["divergence"] * 2
    expected = defined(exact, divergence, **options).where(keep, 0.0)
    wanted = gradients(expected.sum() / keep.sum(), exact)
    assert error(metrics["divergence"].cpu(), expected) <= (1e-3 if gpu.name == "cuda" else 1e-5)
    for a, b in zip(gradients(loss, inputs), wanted, strict=True):
        assert error(a.cpu(), b) <= 4 * OF_GPU[dtype]


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_divergence_of_equal_nan_and_infinite_logits(gpu, divergence):
    policy, weight, teacher, of_teacher = (x.detach().float() for x in make(6, 900))
    teacher, low = teacher.abs(), of_teacher.clone()
    policy[3] = torch.nan
    of_teacher[5], low[5] = -torch.inf, -1e30

    def of(*sides):
        inputs = given(sides, free=(0,))
        loss, metrics = linear_divergence(*inputs, divergence)
        found = metrics["divergence"], torch.autograd.grad(loss, inputs[0])[0]
        return [x.double().cpu() for x in found]

    expected = of(policy, weight, teacher, low)
    with gpu.running():
        actual = of(*(gpu.put(x) for x in (policy, weight, teacher, of_teacher)))
        equal = of(*[gpu.put(policy.nan_to_num()), gpu.put(weight)] * 2)
    assert not any(x.any() for x in equal)
    if divergence == "reverse":  # the policy may choose what its teacher never does
        expected = [x * y for x, y in zip(expected, (torch.inf, torch.nan), strict=True)]
    for a, b in zip(actual, expected, strict=True):
        b[3] = torch.nan
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)
