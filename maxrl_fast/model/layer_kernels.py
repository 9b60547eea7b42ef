"""The elementwise parts of a decoder layer (layer_ops.py) as operators.

csrc/cuda/layer.cu has one launch for each, csrc/cpu/layer.cpp one pass. They compute in float32
(float64 for float64) and round once. Gradients of weights are summed over the rows in an order that
depends only on the shapes.
"""

from typing import Any

import torch
from torch import Tensor

from maxrl_fast.model.layer_ops import HeadNorms, Heads, LayerOps, Rotary
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.derivatives import first_order
from maxrl_fast.ops.dispatch import DEVICE_DTYPES, KernelLaunch, operator

CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
DTYPE_NAMES = {**DEVICE_DTYPES, torch.float64: "float64"}

_MOST_PARTIALS, _PARTIAL_NUMBERS = 2048, 1 << 21  # of the sums over rows: at most 8 MiB


def has_kernels(
    hidden_size: int,
    intermediate_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Return whether KERNELS supports a decoder of these sizes. On a CPU all, in CPU_DTYPES. On a
    GPU, in DEVICE_DTYPES, hidden states of at most 16 KiB and MLP rows in multiples of 16 bytes;
    heads in multiples of 32 bytes, at most 1 KiB."""
    if not dispatch.is_gpu(device):
        return device.type == "cpu" and dtype in CPU_DTYPES
    if dtype not in DEVICE_DTYPES or not dispatch.has_kernels(device):
        return False
    hidden, intermediate, head = (
        size * dtype.itemsize for size in (hidden_size, intermediate_size, head_dim)
    )
    is_aligned = hidden % 16 == intermediate % 16 == head % 32 == 0
    return is_aligned and hidden <= 16 << 10 and head <= 1 << 10


# Residual addition and RMS norm.


def _partials(like: Tensor, num_rows: int, width: int) -> int:
    """Return the number of partial sums of `width` numbers; on a CPU the kernel adds them up."""
    if not dispatch.is_gpu(like.device):
        return 1
    return min(num_rows, _MOST_PARTIALS, max(1, _PARTIAL_NUMBERS // width))


def sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@operator()
def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x + delta, empty without delta, and its norm, for rows x and delta [U, H]."""
    call, (num_rows, size) = KernelLaunch(x.device), x.shape
    total, normed = x.new_empty(0) if delta is None else torch.empty_like(x), torch.empty_like(x)
    call.launch(
        "add_rms_norm",
        dtype=DTYPE_NAMES[x.dtype],
        num_rows=num_rows,
        size=size,
        eps=eps,
        **call.addresses(x.dtype, num_rows, size, x=x, delta=delta),
        weight=call.address("weight", weight, x.dtype, (size,)),
        sum=call.keep(total),
        normed=call.keep(normed),
    )
    return total, normed


@operator()
def add_rms_norm_backward(
    grad_normed: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sum [U, H], for both summands, and of the weight, not rounded."""
    call, (num_rows, size) = KernelLaunch(x.device), x.shape
    grad_x = torch.empty_like(x)
    partials = x.new_empty(_partials(x, num_rows, size), size, dtype=sum_dtype(x))
    call.launch(
        "add_rms_norm_backward",
        dtype=DTYPE_NAMES[x.dtype],
        num_rows=num_rows,
        size=size,
        eps=eps,
        **call.addresses(
            x.dtype, num_rows, size, sum=x, grad_sum=grad_sum, grad_normed=grad_normed
        ),
        weight=call.address("weight", weight, x.dtype, (size,)),
        grad_x=call.keep(grad_x),
        num_partials=len(partials),
        grad_weight=call.keep(partials),
    )
    return grad_x, partials[0] if len(partials) == 1 else partials.sum(0)


class _AddRmsNorm(torch.autograd.Function):
    """Without delta, the first result is x itself, so the kernel adds both gradients of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        rounded = weight.to(x.dtype)
        total, normed = add_rms_norm(x, delta, rounded, eps)
        total = x if delta is None else total
        ctx.save_for_backward(total, rounded)
        ctx.has_delta, ctx.eps, ctx.weight_dtype = delta is not None, eps, weight.dtype
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    @first_order("add_rms_norm")
    def backward(
        ctx: Any, grad_total: Tensor | None, grad_normed: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_normed is None:
            return grad_total, grad_total if ctx.has_delta else None, None, None
        grad = None if grad_total is None else grad_total.contiguous()
        grad_x, grad_weight = add_rms_norm_backward(
            grad_normed.contiguous(), grad, *ctx.saved_tensors, ctx.eps
        )
        return grad_x, grad_x if ctx.has_delta else None, grad_weight.to(ctx.weight_dtype), None


def _rms_norm_in_kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed: Tensor = _AddRmsNorm.apply(x, None, weight, eps)[1]
    return normed


# Rotary embedding.


def heads_arguments(
    call: KernelLaunch,
    heads: tuple[Tensor, Tensor, Tensor | None],
    norms: tuple[Tensor | None, Tensor | None],
    tables: tuple[Tensor, Tensor, Tensor | None],
    to: list[Tensor],
) -> dict[str, Any]:
    q, (cos, sin, positions) = heads[0], tables
    num_rows, _, dim = q.shape

    def argument(name: str, x: Tensor | None) -> tuple[int, int, int]:
        """Return address, row stride and number of heads of x [U, heads, D]."""
        if x is None:
            return 0, 0, 0
        address = call.rows(name, x, q.dtype, (num_rows, x.shape[1], dim))
        return address, x.stride(0) if num_rows > 1 else 0, x.shape[1]

    shape = (num_rows if positions is None else len(cos), 1, dim // 2)
    return {
        "dtype": DTYPE_NAMES[q.dtype],
        "num_rows": num_rows,
        "head_dim": dim,
        "from": [argument(name, x) for name, x in zip("qkv", heads, strict=True)],
        "norm": [
            call.address(name, x, q.dtype, (dim,))
            for name, x in zip(("q_norm", "k_norm"), norms, strict=True)
        ],
        "cos": call.address("cos", cos, torch.float32, shape),
        "sin": call.address("sin", sin, torch.float32, shape),
        "positions": call.address("positions", positions, torch.int64, (num_rows,)),
        "num_positions": len(cos),
        "to": [call.keep(x) for x in to] + [0] * (3 - len(to)),
        "to_stride": [x.stride(0) for x in to] + [0] * (3 - len(to)),
    }


@operator()
def rotate_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    eps: float,
    direction: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return contiguous q and k, normed and rotated, and v, empty for None. Direction -1 rotates
    back."""
    call = KernelLaunch(q.device)
    to = [x.new_empty(x.shape) for x in ((q, k) if v is None else (q, k, v))]
    inputs = heads_arguments(call, (q, k, v), (q_norm, k_norm), (cos, sin, positions), to)
    call.launch("rotate_heads", **inputs, eps=eps, direction=direction)
    return to[0], to[1], q.new_empty(0) if v is None else to[2]


@operator()
def rotate_heads_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the norms' weights are not rounded."""
    to = [x.new_empty(x.shape) for x in (q, k)]
    tables, norms = (cos, sin, positions), (q_norm, k_norm)
    if dispatch.is_gpu(q.device):
        of_both = rotate_back_on_gpu((grad_q, grad_k), (q, k), norms, tables, eps, to)
        return to[0], to[1], *of_both
    of_norms = q.new_empty(2, q.shape[2], dtype=sum_dtype(q))
    rotate_back((grad_q, grad_k), (q, k, None), norms, tables, eps, to, of_norms)
    return to[0], to[1], of_norms[0], of_norms[1].clone()


def rotate_back_on_gpu(
    grads: tuple[Tensor, Tensor],
    heads: tuple[Tensor, Tensor],
    norms: tuple[Tensor | None, Tensor | None],
    tables: tuple[Tensor, Tensor, Tensor | None],
    eps: float,
    to: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Write the gradients of q and k into `to`, and return those of the norms [D], not rounded."""
    (num_rows, count, dim), all_heads = heads[0].shape, heads[0].shape[1] + heads[1].shape[1]
    shape = _partials(heads[0], num_rows, all_heads * dim), all_heads, dim
    partials = heads[0].new_empty(shape, dtype=torch.float32)
    rotate_back(grads, (*heads, None), norms, tables, eps, to, partials)
    return partials[:, :count].sum((0, 1)), partials[:, count:].sum((0, 1))


def rotate_back(
    grads: tuple[Tensor, Tensor],
    heads: tuple[Tensor, Tensor, Tensor | None],
    norms: tuple[Tensor | None, Tensor | None],
    tables: tuple[Tensor, Tensor, Tensor | None],
    eps: float,
    to: list[Tensor],
    grad_norm: Tensor,
) -> None:
    """Write the gradients of q and k into `to`, whose rows may have any stride, and of the norms.

    On a CPU heads[2] may be the gradient of v, which is copied into `to`.
    """
    call, (q, k, _) = KernelLaunch(heads[0].device), heads
    call.launch(
        "rotate_heads_backward",
        **heads_arguments(call, heads, norms, tables, to),
        eps=eps,
        direction=1.0,
        grad=[
            call.address("grad", g, q.dtype, x.shape) for g, x in zip(grads, (q, k), strict=True)
        ],
        num_partials=1 if grad_norm.dim() == 2 else len(grad_norm),
        grad_norm=call.keep(grad_norm),
    )


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        *tables: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        rounded = [None if norm is None else norm.to(q.dtype) for norm in (q_norm, k_norm)]
        # a rotation's gradient does not need them
        inputs = (None, None) if q_norm is None else (q, k)
        ctx.save_for_backward(*inputs, *rounded, *tables)
        ctx.eps, ctx.norm_dtype = eps, None if q_norm is None else q_norm.dtype
        q, k, _ = rotate_heads(q, k, None, *rounded, *tables, eps, 1.0)
        return q, k

    @staticmethod
    @first_order("rotate_heads")
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        grads = grad_q.contiguous(), grad_k.contiguous()
        q, k, q_norm, k_norm, *tables = ctx.saved_tensors
        none = (None,) * (len(tables) + 1)
        if q is None:
            grad_q, grad_k, _ = rotate_heads(*grads, None, None, None, *tables, 0.0, -1.0)
            return grad_q, grad_k, None, None, *none
        grad_q, grad_k, *of_norms = rotate_heads_backward(
            *grads, q, k, q_norm, k_norm, *tables, ctx.eps
        )
        return grad_q, grad_k, *(grad.to(ctx.norm_dtype) for grad in of_norms), *none


def _rotate_heads_in_kernel(heads: Heads, norms: HeadNorms | None, rotary: Rotary) -> Heads:
    q, k, v = heads
    q_norm, k_norm, eps = (None, None, 0.0) if norms is None else norms
    if v.is_contiguous() or v.requires_grad:  # training
        q, k = _RotateHeads.apply(q, k, q_norm, k_norm, eps, *rotary)
        return q, k, v.contiguous()
    result: Heads = rotate_heads(q, k, v, q_norm, k_norm, *rotary, eps, 1.0)
    return result


# SwiGLU.


def gate_and_up(call: KernelLaunch, gate: Tensor, up: Tensor) -> dict[str, Any]:
    num_rows, size = gate.shape
    return {
        "dtype": DTYPE_NAMES[gate.dtype],
        "num_rows": num_rows,
        "size": size,
        "gate": call.rows("gate", gate, gate.dtype, gate.shape),
        "up": call.rows("up", up, gate.dtype, gate.shape),
        "gate_stride": gate.stride(0) if num_rows > 1 else 0,
        "up_stride": up.stride(0) if num_rows > 1 else 0,
    }


@operator()
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    call, out = KernelLaunch(gate.device), gate.new_empty(gate.shape)
    call.launch("swiglu", **gate_and_up(call, gate, up), out=call.keep(out))
    return out


@operator()
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    call = KernelLaunch(gate.device)
    grads = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    call.launch(
        "swiglu_backward",
        **gate_and_up(call, gate, up),
        out=0,
        grad=call.address("grad", grad, gate.dtype, gate.shape),
        grad_gate=call.keep(grads[0]),
        grad_up=call.keep(grads[1]),
        grad_stride=gate.shape[1],
    )
    return grads


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu(gate, up)

    @staticmethod
    @first_order("swiglu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        grads: tuple[Tensor, Tensor] = swiglu_backward(grad.contiguous(), *ctx.saved_tensors)
        return grads


KERNELS = LayerOps(_rms_norm_in_kernel, _AddRmsNorm.apply, _rotate_heads_in_kernel, _SwiGlu.apply)
