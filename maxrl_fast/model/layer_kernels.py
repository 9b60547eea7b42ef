"""The parts of a decoder layer between its products: residual addition with RMS norm, rotary
embedding, SwiGLU; in PyTorch (TORCH_OPS) and in one launch of csrc/cuda/layer_*.cu or one pass of
csrc/cpu/layer.cpp (KERNELS).

Kernels compute in float32 (float64 for float64), round once, and sum gradients of weights in an
order that depends only on the shapes. Backward passes write the gradient of q, k and v, or of gate
and up, as one matrix, so autograd adds and copies nothing."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from maxrl_fast.ops import dispatch
from maxrl_fast.ops.dispatch import DEVICE_DTYPES, KernelLaunch, check_first_order

CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16)

_MOST_PARTIALS, _PARTIAL_NUMBERS = 2048, 1 << 21  # of the sums over rows: at most 8 MiB


class Rotary(NamedTuple):
    """cos and sin [P, 1, D/2], for TORCH_OPS in the compute dtype, for KERNELS in float32 and at
    the row of each token [U] int64; None: row u for token u."""

    cos: Tensor
    sin: Tensor
    positions: Tensor | None = None


class HeadNorms(NamedTuple):
    """Weights [D] of the RMS norms of query and key heads (Qwen3)."""

    q: Tensor
    k: Tensor
    eps: float


Heads = tuple[Tensor, Tensor, Tensor]  # q [U, Hq, D], k and v [U, Hkv, D]


class LayerOps(NamedTuple):
    # (x [U, H], delta [U, H] or None for 0, weight [H], eps) -> x + delta, and its norm
    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    # ([q | k | v] [U, (Hq + 2 Hkv) D], (Hq, Hkv, Hkv), norms, rotary) -> q and k, normed and
    # rotated, and v
    rotate_heads: Callable[[Tensor, tuple[int, int, int], HeadNorms | None, Rotary], Heads]
    # ([gate | up] [U, 2 F]) -> silu(gate) up [U, F]
    swiglu: Callable[[Tensor], Tensor]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def _add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x = x if delta is None else x + delta
    return x, _rms_norm(x, weight, eps)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate x [U, heads, D]: dimension i with i + D/2."""
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * rotary.cos - x2 * rotary.sin, x2 * rotary.cos + x1 * rotary.sin], -1)


def _rotate_heads(
    packed: Tensor, counts: tuple[int, int, int], norms: HeadNorms | None, rotary: Rotary
) -> Heads:
    q, k, v = packed.unflatten(1, (sum(counts), -1)).split(counts, 1)
    if norms is not None:
        q, k = _rms_norm(q, norms.q, norms.eps), _rms_norm(k, norms.k, norms.eps)
    return rotate(q, rotary), rotate(k, rotary), v


def _swiglu(packed: Tensor) -> Tensor:
    gate, up = packed.chunk(2, -1)
    return F.silu(gate) * up


TORCH_OPS = LayerOps(_add_rms_norm, _rotate_heads, _swiglu)


def layer_ops(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> LayerOps:
    """Return KERNELS where they support these sizes of hidden states, MLP rows and heads: on a GPU
    multiples of 16, 16 and 32 bytes, hidden states of at most 16 KiB and heads of 1."""
    if not dispatch.is_gpu(device):
        fits = device.type == "cpu" and dtype in CPU_DTYPES
    else:
        fits = dtype in DEVICE_DTYPES and dispatch.has_kernels(device)
        hidden, intermediate, head = (size * dtype.itemsize for size in sizes)
        fits &= hidden % 16 == intermediate % 16 == head % 32 == 0
        fits &= hidden <= 16 << 10 and head <= 1 << 10
    return KERNELS if fits else TORCH_OPS


def _partials(like: Tensor, num_rows: int, width: int) -> int:
    """Return the number of partial sums over rows; on a CPU the kernel adds them up."""
    if not dispatch.is_gpu(like.device):
        return 1
    return min(num_rows, _MOST_PARTIALS, max(1, _PARTIAL_NUMBERS // width))


def _sizes(x: Tensor) -> dict[str, Any]:
    return {"dtype": x.dtype, "num_rows": len(x), "size": x.shape[1]}


def _empty_sums(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.promote_types(like.dtype, torch.float32))


class _AddRmsNorm(torch.autograd.Function):
    """Without delta the sum is x itself, so the kernel adds both gradients of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        call, rounded, normed = KernelLaunch(x.device), weight.to(x.dtype), torch.empty_like(x)
        total = x if delta is None else torch.empty_like(x)
        call.launch(
            "add_rms_norm",
            **_sizes(x),
            eps=eps,
            **call.addresses(x.dtype, *x.shape, x=x, delta=delta),
            **call.addresses(x.dtype, x.shape[1], weight=rounded),
            sum=None if delta is None else total,
            normed=normed,
        )
        ctx.save_for_backward(total, rounded)
        ctx.has_delta, ctx.eps, ctx.weight_dtype = delta is not None, eps, weight.dtype
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(
        ctx: Any, grad_total: Tensor | None, grad_normed: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        check_first_order("add_rms_norm")
        if grad_normed is None:
            return grad_total, grad_total if ctx.has_delta else None, None, None
        x, weight = ctx.saved_tensors
        call, grad_x = KernelLaunch(x.device), torch.empty_like(x)
        partials = _empty_sums(x, _partials(x, *x.shape), x.shape[1])
        call.launch(
            "add_rms_norm_backward",
            **_sizes(x),
            eps=ctx.eps,
            sum=x,
            grad_sum=None if grad_total is None else grad_total.contiguous(),
            grad_normed=grad_normed.contiguous(),
            weight=weight,
            grad_x=grad_x,
            num_partials=len(partials),
            grad_weight=partials,
        )
        grad_weight = partials[0] if len(partials) == 1 else partials.sum(0)
        return grad_x, grad_x if ctx.has_delta else None, grad_weight.to(ctx.weight_dtype), None


def _rotation(
    call: KernelLaunch,
    heads: Sequence[Tensor | None],
    norms: Sequence[Tensor | None],
    rotary: Rotary,
    to: list[Tensor],
) -> dict[str, Any]:
    """Rows of all heads [U, heads, D] may have any stride."""
    q, (cos, sin, positions), (num_rows, _, dim) = to[0], rotary, to[0].shape

    def argument(name: str, x: Tensor | None) -> tuple[int, int, int]:
        if x is None:  # address, row stride and number of heads
            return 0, 0, 0
        address = call.address(name, x, q.dtype, (num_rows, x.shape[1], dim), True)
        return address, x.stride(0) if num_rows > 1 else 0, x.shape[1]

    shape = (num_rows if positions is None else len(cos), 1, dim // 2)
    return {
        "dtype": q.dtype,
        "num_rows": num_rows,
        "head_dim": dim,
        "from": [argument(name, x) for name, x in zip("qkv", heads, strict=True)],
        "norm": [
            call.address(name, x, q.dtype, (dim,))
            for name, x in zip(("q_norm", "k_norm"), norms, strict=True)
        ],
        **call.addresses(torch.float32, *shape, cos=cos, sin=sin),
        "positions": call.address("positions", positions, torch.int64, (num_rows,)),
        "num_positions": len(cos),
        "to": [call.keep(x) for x in to],
        "to_stride": [x.stride(0) for x in to],
    }


def _parts(packed: Tensor, counts: tuple[int, ...]) -> list[Tensor]:
    """Return views [U, heads, D] of packed heads [U, all heads D]."""
    return list(packed.unflatten(1, (sum(counts), -1)).split(counts, 1))


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        counts: tuple[int, int, int],
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
    ) -> Heads:
        norms = tuple(None if norm is None else norm.to(packed.dtype) for norm in (q_norm, k_norm))
        # a rotation's gradient does not need the heads
        ctx.save_for_backward(None if q_norm is None else packed, *norms, cos, sin, positions)
        ctx.eps, ctx.norm_dtype = eps, None if q_norm is None else q_norm.dtype
        call = KernelLaunch(packed.device)
        q, k, v = _parts(packed, counts)
        to = [x.new_empty(x.shape) for x in (q, k, v)]
        inputs = _rotation(call, (q, k, v), norms, Rotary(cos, sin, positions), to)
        call.launch("rotate_heads", **inputs, eps=eps, direction=1.0)
        return to[0], to[1], to[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order("rotate_heads")
        packed, q_norm, k_norm, *tables = ctx.saved_tensors
        rotary = Rotary(*tables)
        call, given = KernelLaunch(grads[0].device), tuple(x.contiguous() for x in grads)
        counts, (num_rows, _, dim) = tuple(x.shape[1] for x in given), given[0].shape
        grad = given[0].new_empty(num_rows, sum(counts) * dim)
        to = _parts(grad, counts)
        if packed is None:
            inputs = _rotation(call, given, (None, None), rotary, to)
            call.launch("rotate_heads", **inputs, eps=0.0, direction=-1.0)
            return grad, *(None,) * 7
        q, k, _ = _parts(packed, counts)
        num_normed, is_gpu = counts[0] + counts[1], dispatch.is_gpu(grad.device)
        num_partials = _partials(grad, num_rows, num_normed * dim)
        of_norms = _empty_sums(grad, *((num_partials, num_normed) if is_gpu else (2,)), dim)
        if is_gpu:  # on a CPU the kernel copies it
            to[2].copy_(given[2])
        heads = q, k, None if is_gpu else given[2]
        call.launch(
            "rotate_heads_backward",
            **_rotation(call, heads, (q_norm, k_norm), rotary, to),
            eps=ctx.eps,
            direction=1.0,
            grad=[call.keep(x) for x in given[:2]],
            num_partials=num_partials,
            grad_norm=of_norms,
        )
        if is_gpu:
            of_norms = torch.stack([x.sum((0, 1)) for x in of_norms.split(counts[:2], 1)])
        return grad, None, *of_norms.to(ctx.norm_dtype).unbind(), *(None,) * 4


def _rotate_heads_in_kernel(
    packed: Tensor, counts: tuple[int, int, int], norms: HeadNorms | None, rotary: Rotary
) -> Heads:
    heads: Heads = _RotateHeads.apply(packed, counts, *(norms or (None, None, 0.0)), *rotary)
    return heads


def _gate_and_up(call: KernelLaunch, packed: Tensor) -> dict[str, Any]:
    num_rows, size = packed.shape
    address = call.address("packed", packed, packed.dtype, packed.shape)
    return {
        "dtype": packed.dtype,
        "num_rows": num_rows,
        "size": size // 2,
        "gate": address,
        "up": address + size // 2 * packed.itemsize if address else 0,
        "gate_stride": size,
        "up_stride": size,
    }


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        call, out = KernelLaunch(packed.device), packed.new_empty(len(packed), packed.shape[1] // 2)
        call.launch("swiglu", **_gate_and_up(call, packed), out=out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
        check_first_order("swiglu")
        (packed,), grad = ctx.saved_tensors, grad.contiguous()
        call, to = KernelLaunch(grad.device), torch.empty_like(packed)
        grad_gate, grad_up = to.chunk(2, 1)
        call.launch(
            "swiglu_backward",
            **_gate_and_up(call, packed),
            out=0,
            grad=grad,
            grad_gate=grad_gate,
            grad_up=grad_up,
            grad_stride=packed.shape[1],
        )
        return (to,)


KERNELS = LayerOps(_AddRmsNorm.apply, _rotate_heads_in_kernel, _SwiGlu.apply)


class _ChooseRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Tensor, order: Tensor | None, starts: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(rows, order, starts)
        ctx.num_rows = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order("choose_rows")
        rows, order, starts = ctx.saved_tensors
        call, (num_chosen, size), grad = KernelLaunch(grad.device), grad.shape, grad.contiguous()
        to = grad.new_empty(ctx.num_rows, size)
        call.launch(
            "chosen_rows_backward",
            dtype=grad.dtype,
            num_rows=ctx.num_rows,
            num_chosen=num_chosen,
            size=size,
            **call.addresses(torch.int64, num_chosen, rows=rows, order=order),
            starts=call.address("starts", starts, torch.int64, (ctx.num_rows + 1,)),
            grad=grad,
            to=to,
        )
        return to, None, None, None


def choose_rows(x: Tensor, rows: Tensor, by_row: list[Tensor] | None = None) -> Tensor:
    """Return x[rows] for x [U, H] and rows [R] int64, of which the gradient adds repeated ones in
    order: on a CPU on all threads, on a GPU in float32. There they need `by_row`: the order [R]
    that sorts them, and where each of the U rows begins in it [U+1]."""
    if dispatch.is_gpu(x.device):
        in_kernel = x.dtype in DEVICE_DTYPES and x.shape[1] * x.element_size() % 16 == 0
        in_kernel = in_kernel and by_row is not None and dispatch.has_kernels(x.device)
    else:
        in_kernel = x.device.type == "cpu" and x.dtype in CPU_DTYPES
    if not in_kernel:
        return x.index_select(0, rows)
    chosen: Tensor = _ChooseRows.apply(x, rows.contiguous(), *(by_row or (None, None)))
    return chosen
