"""First derivatives in reverse mode; others raise instead of returning zero.

Every autograd.Function of the package takes the context in its forward pass: PyTorch itself then
raises in forward mode and in the transforms of torch.func.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.ops import dispatch
from maxrl_fast.ops.dispatch import KernelLaunch


def check_first_order(function: str) -> None:
    """Raise RuntimeError in a backward pass with create_graph=True.

    torch's once_differentiable raises only if the incoming gradient requires a gradient, so a
    gradient penalty would be silently missing from the loss.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{function} can be differentiated once only, got create_graph=True, which asks for a "
            "second derivative"
        )


def needs_gradient(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


class LossWithGradients(torch.autograd.Function):
    """A loss that is computed together with its gradients, which the backward pass scales.

    `compute()` returns numbers, of which the first is the loss, and for each of the inputs its
    gradient, or None where it is not needed. function: the public function, for messages.
    """

    @staticmethod
    def forward(
        ctx: Any, function: str, compute: Callable[[], tuple[Any, ...]], *inputs: Tensor
    ) -> Tensor:
        sums: Tensor
        sums, *gradients = compute()
        ctx.save_for_backward(*gradients)
        ctx.function, ctx.is_spent = function, False
        return sums

    @staticmethod
    def backward(ctx: Any, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order(ctx.function)
        if ctx.is_spent and grad_sums.device.type == "cuda":
            raise RuntimeError(
                "backward ran already, and scaled the gradient in place: compute the loss again "
                "instead"
            )
        ctx.is_spent = True
        gradients = (None if x is None else scaled(x, grad_sums[0]) for x in ctx.saved_tensors)
        return None, None, *gradients


def scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """Return gradient times scale []. If scale is 1, as nearly always, the gradient is not read.

    On a GPU the gradient is changed in place, so that the host does not wait for the scale.
    """
    if dispatch.is_gpu(gradient.device) and dispatch.has_kernels(gradient.device):
        scale = scale.double().contiguous()
        shape, call = (gradient.shape[0], gradient.shape[1]), KernelLaunch(gradient.device)
        call.launch(
            "scale",
            dtype=gradient.dtype,
            matrix=(
                call.address("gradient", gradient, gradient.dtype, shape, True),
                gradient.stride(0),
            ),
            num_rows=shape[0],
            row_size=shape[1],
            scale=call.address("scale", scale, torch.float64, ()),
        )
        return gradient
    if float(scale) == 1:
        return gradient
    return gradient * scale.to(gradient.dtype)
