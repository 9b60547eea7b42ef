"""`maxrl_fast::linear` on a CPU: the matrix multiplications of linear layers in float32 training.

csrc/cpu/linear.cpp multiplies many rows by a small matrix, for which PyTorch's library is slow
(bench/README.md). Bias and residual are added as results are written.
"""

from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import is_traced
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.derivatives import first_order
from maxrl_fast.ops.dispatch import KernelLaunch, operator

FEWEST_ROWS = 64  # below it, packing the matrix costs too much
LARGEST_MATRIX = 1 << 20  # numbers; PyTorch's products of larger ones are as fast


def has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Under torch.autocast, torch.compile and torch.func PyTorch's product is used."""
    return (
        x.device.type == "cpu"
        and not dispatch.is_gpu(x.device)
        and x.dtype == weight.dtype == torch.float32
        and x.dim() == 2
        and len(x) >= FEWEST_ROWS
        and weight.shape[0] % 16 == weight.shape[1] % 16 == 0
        and 0 < weight.numel() <= LARGEST_MATRIX
        and not is_traced()
        and not torch.is_autocast_enabled("cpu")
    )


@operator()
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None) -> Tensor:
    call, (num_rows, in_size), out_size = KernelLaunch(x.device), x.shape, len(weight)
    y = x.new_empty(num_rows, out_size)
    call.launch(
        "linear",
        num_rows=num_rows,
        in_size=in_size,
        out_size=out_size,
        x=call.address("x", x, torch.float32, (num_rows, in_size)),
        weight=call.address("weight", weight, torch.float32, (out_size, in_size)),
        bias=call.address("bias", bias, torch.float32, (out_size,)),
        added=call.address("added", added, torch.float32, (num_rows, out_size)),
        y=call.keep(y),
    )
    return y


@operator()
def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, needs_x: bool, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients are [0] where they are not needed."""
    call, (num_rows, in_size), out_size = KernelLaunch(x.device), x.shape, len(weight)
    shapes = (
        ((num_rows, in_size), needs_x),
        ((out_size, in_size), needs_weight or needs_bias),
        ((out_size,), needs_bias),
    )
    grads = [x.new_empty(shape if is_needed else 0) for shape, is_needed in shapes]
    addresses = [call.keep(x) if yes else 0 for x, (_, yes) in zip(grads, shapes, strict=True)]
    call.launch(
        "linear_backward",
        num_rows=num_rows,
        in_size=in_size,
        out_size=out_size,
        grad=call.address("grad", grad, torch.float32, (num_rows, out_size)),
        x=call.address("x", x, torch.float32, (num_rows, in_size)),
        weight=call.address("weight", weight, torch.float32, (out_size, in_size)),
        grad_x=addresses[0],
        grad_weight=addresses[1],
        grad_bias=addresses[2],
    )
    return grads[0], grads[1], grads[2]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None
    ) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        y: Tensor = linear(x, weight, bias, None if added is None else added.contiguous())
        return y

    @staticmethod
    @first_order("linear")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight, needs_bias, needs_added = ctx.needs_input_grad
        grads: list[Tensor | None] = [None] * 3
        if needs_x or needs_weight or needs_bias:
            needed = needs_x, needs_weight, needs_bias
            results = linear_backward(grad.contiguous(), *ctx.saved_tensors, *needed)
            grads = [x if yes else None for x, yes in zip(results, needed, strict=True)]
        return *grads, grad if needs_added else None
