"""Parts of a decoder layer that take q, k and v, or gate and up, as one matrix.

One matrix multiplication computes q, k and v, and one gate and up. Backward passes write the
gradient of its output as one matrix too, so autograd adds and copies nothing.
"""

from typing import Any

import torch
from torch import Tensor

from maxrl_fast.model import layer_kernels
from maxrl_fast.model.layer_kernels import CPU_DTYPES, DTYPE_NAMES, KERNELS
from maxrl_fast.model.layer_ops import TORCH_OPS, HeadNorms, Heads, LayerOps, Rotary
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.derivatives import first_order
from maxrl_fast.ops.dispatch import DEVICE_DTYPES, KernelLaunch, operator


def layer_ops(
    hidden_size: int,
    intermediate_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LayerOps:
    sizes = hidden_size, intermediate_size, head_dim
    return PACKED_KERNELS if layer_kernels.has_kernels(*sizes, dtype, device) else TORCH_OPS


# q, k and v.


@operator()
def rotate_packed_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    packed: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `packed` [U, (Hq + 2 Hkv) D] and of the norms' weights [2, D], not
    rounded. Without norms `packed` is None and the second result is empty."""
    grads, (num_rows, _, dim) = (grad_q, grad_k, grad_v), grad_q.shape
    counts = [x.shape[1] for x in grads]
    grad = grad_q.new_empty(num_rows, sum(counts) * dim)
    to = list(grad.view(num_rows, sum(counts), dim).split(counts, 1))
    tables, norms = (cos, sin, positions), (q_norm, k_norm)
    if packed is not None:
        q, k, _ = packed.view(num_rows, sum(counts), dim).split(counts, 1)
        if dispatch.is_gpu(grad.device):
            to[2].copy_(grad_v)
            heads = (grad_q, grad_k), (q, k), norms, tables, eps, to[:2]
            return grad, torch.stack(layer_kernels.rotate_back_on_gpu(*heads))
        of_norms = grad.new_empty(2, dim, dtype=layer_kernels.sum_dtype(grad))
        layer_kernels.rotate_back(
            (grad_q, grad_k), (q, k, grad_v), norms, tables, eps, to, of_norms
        )
        return grad, of_norms
    call = KernelLaunch(grad_q.device)
    call.launch(
        "rotate_heads",
        **layer_kernels.heads_arguments(call, grads, norms, tables, to),
        eps=0.0,
        direction=-1.0,
    )
    return grad, grad_q.new_empty(0)


class _RotatePacked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        counts: tuple[int, int, int],
        *tables: Tensor | None,
    ) -> Heads:
        rounded = [None if norm is None else norm.to(packed.dtype) for norm in (q_norm, k_norm)]
        ctx.save_for_backward(None if q_norm is None else packed, *rounded, *tables)
        ctx.eps, ctx.norm_dtype = eps, None if q_norm is None else q_norm.dtype
        q, k, v = packed.unflatten(1, (sum(counts), -1)).split(counts, 1)
        heads: Heads = layer_kernels.rotate_heads(q, k, v, *rounded, *tables, eps, 1.0)
        return heads

    @staticmethod
    @first_order("rotate_heads")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grad, of_norms = rotate_packed_backward(*(x.contiguous() for x in grads), *saved, ctx.eps)
        norms = (None, None) if ctx.norm_dtype is None else of_norms.to(ctx.norm_dtype).unbind()
        return grad, *norms, *(None,) * (len(saved) - 1)


def _rotate_packed(
    packed: Tensor, counts: tuple[int, int, int], norms: HeadNorms | None, rotary: Rotary
) -> Heads:
    norm_arguments = (None, None, 0.0) if norms is None else norms
    heads: Heads = _RotatePacked.apply(packed, *norm_arguments, counts, *rotary)
    return heads


# Gate and up.


@operator()
def swiglu_packed_backward(grad: Tensor, packed: Tensor) -> Tensor:
    """Return the gradient of [gate | up] [U, 2 F] from that of silu(gate) up [U, F]."""
    call, to = KernelLaunch(grad.device), torch.empty_like(packed)
    gate, up = packed.chunk(2, 1)  # views [U, F] of rows [U, 2 F]
    grad_gate, grad_up = to.chunk(2, 1)
    call.launch(
        "swiglu_backward",
        **layer_kernels.gate_and_up(call, gate, up),
        out=0,
        grad=call.address("grad", grad, gate.dtype, gate.shape),
        grad_gate=call.keep(grad_gate),
        grad_up=call.keep(grad_up),
        grad_stride=packed.shape[1],
    )
    return to


class _SwiGluPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        out: Tensor = layer_kernels.swiglu(*packed.chunk(2, 1))
        return out

    @staticmethod
    @first_order("swiglu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
        return (swiglu_packed_backward(grad.contiguous(), *ctx.saved_tensors),)


PACKED_KERNELS = KERNELS._replace(rotate_packed=_rotate_packed, swiglu_packed=_SwiGluPacked.apply)

# Rows.


@operator()
def choose_rows_backward(grad: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Return the gradient [num_rows, H] from that of the chosen rows [R, H]."""
    call, (num_chosen, size) = KernelLaunch(grad.device), grad.shape
    to, order, starts = grad.new_empty(num_rows, size), None, None
    if dispatch.is_gpu(grad.device):
        ascending, order = rows.sort(stable=True)
        starts = torch.searchsorted(ascending, torch.arange(num_rows + 1, device=rows.device))
    call.launch(
        "chosen_rows_backward",
        dtype=DTYPE_NAMES[grad.dtype],
        num_rows=num_rows,
        num_chosen=num_chosen,
        size=size,
        rows=call.address("rows", rows, torch.int64, (num_chosen,)),
        order=call.address("order", order, torch.int64, (num_chosen,)),
        starts=call.address("starts", starts, torch.int64, (num_rows + 1,)),
        grad=call.address("grad", grad, grad.dtype, grad.shape),
        to=call.keep(to),
    )
    return to


class _ChooseRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = len(x)
        return x.index_select(0, rows)

    @staticmethod
    @first_order("choose_rows")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return choose_rows_backward(grad.contiguous(), *ctx.saved_tensors, ctx.num_rows), None


def choose_rows(x: Tensor, rows: Tensor, *, repeats: bool = False) -> Tensor:
    """Return x[rows] for x [U, H] and rows [R] int64. On a GPU rows that may repeat need `repeats`.

    The gradient adds repeated rows in order: on a CPU on all threads, where PyTorch uses one, and
    on a GPU in float32, where PyTorch adds in x's dtype and in any order.
    """
    if dispatch.is_gpu(x.device):
        in_kernel = x.dtype in DEVICE_DTYPES and x.shape[1] * x.element_size() % 16 == 0
        in_kernel = in_kernel and repeats and dispatch.has_kernels(x.device)
    else:
        in_kernel = x.device.type == "cpu" and x.dtype in CPU_DTYPES
    if not in_kernel:
        return x.index_select(0, rows)
    chosen: Tensor = _ChooseRows.apply(x, rows.contiguous())
    return chosen
