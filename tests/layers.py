"""Inputs and checks of the kernels of a decoder layer, for an emulated GPU and for a real one."""

import torch

from maxrl_fast.model.layer_kernels import KERNELS, choose_rows
from maxrl_fast.model.layer_ops import TORCH_OPS, HeadNorms, Rotary

CPU = torch.device("cpu")
NORMS = [(1, 8), (5, 256), (3, 896), (700, 40), (2, 1544), (3, 4096)]  # rows, size
# rows, query heads, key heads, head size
ROTATIONS = [(1, 1, 1, 16), (7, 4, 2, 64), (37, 3, 1, 96), (5, 8, 2, 256)]
MATRICES = [(1, 8), (5, 264), (37, 48), (3, 4864)]  # rows, size
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


def numbers(*shape, seed=0, dtype=torch.float64):
    """Return numbers that `dtype` represents, in float64 for the reference."""
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        .to(dtype)
        .double()
    )


def with_gradients(function, inputs, dtype, device=CPU):
    """Return the results of a function and the gradients of its inputs, for a fixed gradient in
    each result.
    """
    inputs = [x.to(device, dtype).requires_grad_() for x in inputs]
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


def check_norm(rows, size, dtype, device, around_kernels):
    """Compare addition with RMS norm, and the norm alone, with float64."""
    inputs = [numbers(rows, size, seed=i, dtype=dtype) for i in range(2)]
    weight = (1 + numbers(size, seed=2, dtype=dtype) / 2).to(dtype).double()

    def norm_of(parts):
        return lambda x, weight, *delta: parts.add_rms_norm(x, *(delta or (None,)), weight, 1e-2)

    for x, *delta in (inputs, inputs[:1]):
        chosen = [x, weight, *delta]
        expected = with_gradients(norm_of(TORCH_OPS), chosen, torch.float64)
        with around_kernels():
            actual = with_gradients(norm_of(KERNELS), chosen, dtype, device)
        assert_rows_equal(actual, expected, dtype)


def check_rotation(rows, heads, kv_heads, dim, has_norms, dtype, device, around_kernels):
    """Compare rotation and norms of heads with float64, with a table and without."""
    counts = heads, kv_heads, kv_heads
    inputs = [numbers(rows, sum(counts) * dim, dtype=dtype)]
    inputs += [
        (1 + numbers(dim, seed=2 + i) / 2).to(dtype).double() for i in range(2 if has_norms else 0)
    ]
    angles, positions = (
        3 * numbers(rows + 4, 1, dim // 2, seed=4).float(),
        (torch.arange(rows) * 5) % (rows + 4),
    )
    table = angles.cos(), angles.sin()
    chosen = [x[positions] for x in table]

    def rotated(parts, rotary):
        def function(packed, *norms):
            return parts.rotate_heads(
                packed, counts, HeadNorms(*norms, 1e-2) if norms else None, rotary
            )

        return function

    expected = with_gradients(
        rotated(TORCH_OPS, Rotary(*(x.double() for x in chosen))), inputs, torch.float64
    )
    by_position = Rotary(*(x.to(device) for x in (*table, positions)))
    with around_kernels():
        for rotary in (by_position, Rotary(*(x.to(device) for x in chosen))):
            actual = with_gradients(rotated(KERNELS, rotary), inputs, dtype, device)
            assert_rows_equal(actual, expected, dtype)
    v = inputs[0].to(dtype).unflatten(1, (-1, dim))[:, -kv_heads:]
    assert torch.equal(actual[2], v)  # copied, bitwise


def check_swiglu(rows, size, dtype, device, around_kernels):
    """Compare SwiGLU with float64."""
    inputs = [(3 * numbers(rows, 2 * size)).to(dtype).double()]
    expected = with_gradients(TORCH_OPS.swiglu, inputs, torch.float64)
    with around_kernels():
        actual = with_gradients(KERNELS.swiglu, inputs, dtype, device)
    assert_rows_equal(actual, expected, dtype)


def check_chosen_rows(rows, size, dtype, device, around_kernel):
    """Compare the gradient of rows that are chosen often, one 300 times, or never, with float64,
    for equal gradients too, whose sum in half precision would stop to grow."""
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.cat([torch.randint(rows, (2 * rows,), generator=generator), torch.ones(300)])
    chosen = chosen.long()[torch.randperm(len(chosen), generator=generator)] % rows
    starts = torch.searchsorted(chosen.sort().values, torch.arange(rows + 1))
    by_row = [chosen.argsort(stable=True).to(device), starts.to(device)]
    for grad in (numbers(len(chosen), size, dtype=dtype), torch.ones(len(chosen), size) / 3):
        grad = grad.to(dtype)
        expected = torch.zeros(rows, size, dtype=torch.float64).index_add(0, chosen, grad.double())
        x = torch.zeros(rows, size, dtype=dtype, device=device, requires_grad=True)
        with around_kernel():
            out = choose_rows(x, chosen.to(device), by_row)
            (actual,) = torch.autograd.grad(out, x, grad.to(device))
        error = (actual.cpu().double() - expected).abs()
        assert (error <= max(TOLERANCE[dtype], 1e-5) * expected.abs() + 1e-4).all()
