"""The kernels of a decoder layer against PyTorch in float64, and the decoder with them against the
one with PyTorch's operations, on every device.

tests/model/test_layer_kernels.py draws sizes for those of a CPU.
"""

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from maxrl_fast.model import decoder, layer_kernels
from maxrl_fast.model.layer_kernels import KERNELS, TORCH_OPS, HeadNorms, Rotary, choose_rows
from maxrl_fast.records import Rollouts
from maxrl_fast.training.passes import run_batch
from tests.batches import THREE_PROMPTS as PROMPTS
from tests.batches import one_batch
from tests.kernels.devices import CPU, Device, emulated_gpu
from tests.models import adapted, tiny_decoder

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
FAMILIES = pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])


@pytest.fixture(autouse=True)
def few_partials(request, monkeypatch):
    chosen = [request.getfixturevalue(x) for x in ("device", "gpu") if x in request.fixturenames]
    if any(x.is_reverse for x in chosen):
        monkeypatch.setattr(layer_kernels, "_MOST_PARTIALS", 3)  # several rows in every partial sum


def numbers(*shape, seed=0, dtype=torch.float64):
    """Return numbers that `dtype` represents, in float64 for the reference."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).double()


def with_gradients(function, inputs, dtype, place=CPU):
    """Return the results of a function and the gradients of its inputs, for a fixed gradient in
    each result.
    """
    inputs = [x.to(place, dtype).requires_grad_() for x in inputs]
    results = function(*inputs)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    given = [
        numbers(*x.shape, seed=5 + i, dtype=torch.bfloat16).to(x) for i, x in enumerate(results)
    ]
    return [x.detach().cpu() for x in (*results, *torch.autograd.grad(results, inputs, given))]


def assert_rows_equal(actual, expected, dtype):
    """Compare by the norm of the error of every row, so that one wrong number in a row of 1000 is
    found.
    """
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert (a.dtype, a.shape) == (dtype, e.shape)
        assert e.abs().max() > 0.1
        a, e = a.double(), e.double()
        assert (a - e).abs().max() <= 4 * TOLERANCE[dtype] * e.abs().max()
        error = (a - e).norm(dim=-1) / e.norm(dim=-1).clamp_min(0.1 * e.norm(dim=-1).mean())
        assert error.max() <= TOLERANCE[dtype]


def check(device, function, inputs, dtype):
    expected = with_gradients(function(TORCH_OPS), inputs, torch.float64)
    with device.running():
        actual = with_gradients(function(KERNELS), inputs, dtype, device.place)
    assert_rows_equal(actual, expected, dtype)
    return actual


def norm_of(parts):
    return lambda x, weight, *delta: parts.add_rms_norm(x, *(delta or (None,)), weight, 1e-2)


def rotation_of(parts, rotary, counts):
    """Return a function of [q | k | v] and norms."""

    def function(packed, *norms):
        own = rotary
        if parts is TORCH_OPS:
            angles = (x.to(packed) for x in rotary[:2])
            own = Rotary(*(x if own.positions is None else x[own.positions] for x in angles))
        return parts.rotate_heads(packed, counts, HeadNorms(*norms, 1e-2) if norms else None, own)

    return function


@DTYPES
@pytest.mark.parametrize("shape", [(1, 8), (5, 256), (3, 896), (700, 40), (2, 1544), (3, 4096)])
def test_addition_and_rms_norm(device, shape, dtype):
    inputs = [numbers(*shape, seed=i, dtype=dtype) for i in range(2)]
    weight = (1 + numbers(shape[1], seed=2, dtype=dtype) / 2).to(dtype).double()

    for x, *delta in (inputs, inputs[:1]):
        check(device, norm_of, [x, weight, *delta], dtype)


# rows, query heads, key heads, head size
@DTYPES
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (7, 4, 2, 64), (37, 3, 1, 96), (5, 8, 2, 256)])
def test_rotation_of_heads(device, shape, has_norms, dtype):
    rows, heads, kv_heads, dim = shape
    counts = heads, kv_heads, kv_heads
    inputs = [numbers(rows, sum(counts) * dim, dtype=dtype)]
    norms = [(1 + numbers(dim, seed=2 + i) / 2).to(dtype).double() for i in range(2)]
    inputs += norms if has_norms else []
    angles = 3 * numbers(rows + 4, 1, dim // 2, seed=4).float()
    positions = (torch.arange(rows) * 5) % (rows + 4)
    table = angles.cos(), angles.sin()
    chosen = [x[positions] for x in table]
    for given in ((*table, positions), chosen):
        both = {TORCH_OPS: Rotary(*given), KERNELS: Rotary(*map(device.put, given))}
        actual = check(
            device, lambda parts, x=both: rotation_of(parts, x[parts], counts), inputs, dtype
        )
        v = inputs[0].to(dtype).unflatten(1, (-1, dim))[:, -kv_heads:]
        assert torch.equal(actual[2], v)  # copied, bitwise


MATRICES = pytest.mark.parametrize("shape", [(1, 8), (5, 264), (37, 48), (3, 4864)])  # rows, size


@DTYPES
@MATRICES
def test_swiglu(device, shape, dtype):
    inputs = [(3 * numbers(shape[0], 2 * shape[1])).to(dtype).double()]
    check(device, lambda parts: parts.swiglu, inputs, dtype)


@DTYPES
@MATRICES
def test_chosen_rows(device, shape, dtype):
    """Chosen often, one 300 times, or never; for equal gradients too, whose sum in half precision
    would stop to grow.
    """
    rows, size = shape
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.cat([torch.randint(rows, (2 * rows,), generator=generator), torch.ones(300)])
    chosen = chosen.long()[torch.randperm(len(chosen), generator=generator)] % rows
    starts = torch.searchsorted(chosen.sort().values, torch.arange(rows + 1))
    by_row = [device.put(chosen.argsort(stable=True)), device.put(starts)]
    for grad in (numbers(len(chosen), size, dtype=dtype), torch.ones(len(chosen), size) / 3):
        grad = grad.to(dtype)
        expected = torch.zeros(rows, size, dtype=torch.float64).index_add(0, chosen, grad.double())
        x = torch.zeros(rows, size, dtype=dtype, device=device.place, requires_grad=True)
        with device.running():
            out = choose_rows(x, device.put(chosen), by_row if device.is_gpu else None)
            (actual,) = torch.autograd.grad(out, x, device.put(grad))
        error = (actual.cpu().double() - expected).abs()
        assert (error <= max(TOLERANCE[dtype], 1e-5) * expected.abs() + 1e-4).all()


@pytest.mark.gpu
def test_kernels_that_start_early_read_what_was_written_before():
    x, weight = (numbers(*n).to("cuda", torch.bfloat16) for n in ((4096, 1024), (1024,)))

    def chain(wait=lambda: None):
        total = delta = x
        for _ in range(50):
            total, normed = KERNELS.add_rms_norm(total, delta, weight, 1e-2)
            wait()
            half = KERNELS.swiglu(normed)
            wait()
            delta = torch.cat([half, half], 1)  # a kernel of PyTorch's
            wait()
        return total

    expected, graph = chain(torch.cuda.synchronize), torch.cuda.CUDAGraph()
    assert torch.equal(chain(), expected)
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(20):
        graph.replay()
        assert torch.equal(captured, expected)


def test_a_position_outside_the_table_gives_nan(device):
    table = (torch.ones(3, 1, 8), torch.ones(3, 1, 8), torch.tensor([0, 3, -1, 2]))
    with device.running():
        packed, rotary = device.put(torch.ones(4, 6 * 16)), Rotary(*map(device.put, table))
        q, k, _ = KERNELS.rotate_heads(packed, (2, 2, 2), None, rotary)
    expected = [False, True, True, False]
    assert q.isnan().all(-1).all(-1).tolist() == k.isnan().any(-1).any(-1).tolist() == expected


def test_large_gates_saturate_and_no_rows_are_none(device):
    gate = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 200.0, 1e30, torch.nan]])
    single = torch.float32, device.place
    with device.running():
        packed = torch.cat([gate, torch.ones(1, 8)], 1)
        out, grad = with_gradients(KERNELS.swiglu, [packed], *single)
        nothing = [torch.ones(0, 8), torch.ones(8)]
        of_none = with_gradients(lambda x, w: KERNELS.add_rms_norm(x, x, w, 1), nothing, *single)
        of_none += with_gradients(KERNELS.swiglu, [torch.ones(0, 16)], *single)
    torch.testing.assert_close(out, F.silu(gate), equal_nan=True)
    assert grad[0, :7].isfinite().all()
    assert grad[0, 7].isnan()
    assert all((x == 0).all() for x in of_none)


@pytest.mark.emulated
def test_a_launch_refuses_what_it_cannot_read():
    x, ones, add = torch.ones(4, 8), torch.ones(8), KERNELS.add_rms_norm
    packed, rotary = torch.ones(4, 36), Rotary(torch.ones(4, 1, 6), torch.ones(4, 1, 6))
    shape = r"delta must be a contiguous torch.float32 tensor of shape \(4, 8\)"
    size = "hidden_size must be a multiple of 4 up to 4096, got 6"
    head = "head_dim must be a multiple of 8 up to 256, got 12"
    aligned = "swiglu needs tensors and rows aligned to 16 bytes"
    with emulated_gpu():
        for call, message in (
            (lambda: add(x, torch.ones(4, 16)[:, ::2], ones, 1e-6), shape),
            (lambda: KERNELS.swiglu(torch.ones(33)[1:].view(4, 8)), aligned),
            (lambda: add(torch.ones(4, 6), None, torch.ones(6), 1e-6), size),
            (lambda: KERNELS.rotate_heads(packed, (1, 1, 1), None, rotary), head),
        ):
            with pytest.raises(ValueError, match=message):
                call()


# --- the decoder

ROLLOUTS = Rollouts.given([[1, 2], [3], [4, 5, 6], [7, 8], [11, 12, 13, 14, 15], [2, 3]])
# Of a CPU, whose kernels take any; those that a GPU's have in half precision too.
ANY_SIZES = {"hidden_size": 33, "intermediate_size": 45, "head_dim": 6}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def policy(family, sizes=SIZES):
    """Return a policy whose smaller weights do not multiply what is rounded."""
    model = tiny_decoder(model_type=family, tie_word_embeddings=family != "qwen3", **sizes)
    with torch.no_grad():
        for matrix in (p for p in model.parameters() if p.dim() == 2):
            matrix.mul_(0.5)
    return model


def passes(model, dtype, place=CPU):
    batch = one_batch(PROMPTS.to(place), ROLLOUTS.to(place))
    logits = F.linear(run_batch(model, batch, dtype), model.output_matrix.to(dtype))
    model.zero_grad()
    logits.float().log_softmax(-1)[:, 3].sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def trained(model, dtype, place=CPU):
    return [x.detach().double().cpu() for x in passes(model.to(place), dtype, place)]


def of_pytorch(model, dtype):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "layer_ops", lambda *_: TORCH_OPS)
        return trained(copy.deepcopy(model).to(dtype), dtype)


def errors(actual, expected):
    assert len(actual) == len(expected) > 4
    return [float((a - e).norm() / e.norm()) for a, e in zip(actual, expected, strict=True)]


@pytest.mark.parametrize("options", ["plain", "checkpointed", "lora"])
@FAMILIES
def test_a_decoder_has_the_outputs_and_gradients_of_pytorchs_operations(device, family, options):
    model = policy(family, SIZES if device.is_gpu else ANY_SIZES)
    if options == "lora":
        model = adapted(model)
    expected = of_pytorch(model, torch.float64)
    model.checkpoint_activations = options == "checkpointed"
    names = []
    with device.watched(names):
        actual = trained(model, torch.float32, device.place)
    passes = 2 if options == "checkpointed" else 1
    assert names.count("swiglu") == 2 * passes
    assert names.count("swiglu_backward") == 2
    assert names.count("add_rms_norm") == 4 * passes + 1
    # adapters: no gradient below the first norm
    assert names.count("add_rms_norm_backward") == (4 if options == "lora" else 5)
    limit = 1e-3 if device.name == "cuda" else 2e-5
    assert max(errors(actual, expected)) <= limit


@FAMILIES
def test_the_decoder_in_bfloat16_is_no_further_from_float64_with_kernels(device, family):
    """Where weights are rounded, q, k and v are one matrix multiplication, and gate and up."""
    model, products, linear = policy(family), [], F.linear
    exact, plain = of_pytorch(model, torch.float64), of_pytorch(model, torch.bfloat16)
    with device.running(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", lambda *x: (products.append(len(x[1])), linear(*x))[1])
        actual = trained(model, torch.bfloat16, device.place)
    if device.is_gpu:
        assert products == 2 * [8 * 16, 64, 2 * 96] + [32]
    error, of_plain = (math.hypot(*errors(given, exact)) for given in (actual, plain))
    assert error < 1.5 * of_plain


@pytest.mark.emulated
@FAMILIES
def test_decoding_in_kernels_has_the_decoders_hidden_states(family):
    from tests.rollout.test_device_decoder import check_hidden_states

    names = []
    check_hidden_states(
        tiny_decoder(model_type=family, **SIZES), 1e-5, lambda: Device("emulated").watched(names)
    )
    # Of the decoding model alone: 2 layers of 4 launches, and the first norm; twice, with and
    # without chosen rows.
    assert names.count("rotate_heads") == names.count("swiglu") == 4
    assert names.count("add_rms_norm") == 10
