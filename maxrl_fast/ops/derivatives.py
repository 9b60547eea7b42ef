"""First derivatives of the operators, in reverse mode; others raise instead of returning zero."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

Backward = Callable[..., tuple[Tensor | None, ...]]


def register_backward(
    op: Any,
    function: str,
    backward: Backward,
    *,
    save: Callable[[Any, tuple[Any, ...], Any], None],
    num_inputs: int = 1,
) -> None:
    """Register an operator's first derivative with respect to its first `num_inputs` arguments.

    Who calls the operator calls `check_mode`. function: the public function, for messages.
    backward: from the context and the gradients of the results to those of the arguments. save:
    called with the context, arguments and results.
    """
    num_others = len(op._schema.arguments) - num_inputs

    @first_order(function)
    def of_all(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return *backward(ctx, *gradients), *(None,) * num_others

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        save(ctx, inputs, output)

    torch.library.register_autograd(op.name(), of_all, setup_context=setup_context)


def first_order(function: str) -> Callable[[Backward], Backward]:
    """Decorate an autograd function's backward pass to raise RuntimeError for create_graph=True.

    torch's once_differentiable raises only if the incoming gradient requires a gradient, so a
    gradient penalty would be silently missing from the loss.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def once(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            # a compiled function never has a second derivative
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise RuntimeError(
                    f"{function} can be differentiated once only, got create_graph=True, which "
                    "asks for a second derivative"
                )
            return backward(ctx, *gradients)

        return once

    return decorate


def needs_gradient(x: Tensor) -> bool:
    """Whether a gradient of `x` may be needed; in torch.func.vmap requires_grad does not tell."""
    return torch.is_grad_enabled() and (
        x.requires_grad or torch._C._are_functorch_transforms_active()
    )


def check_mode(function: str, *inputs: Tensor) -> bool:
    """Return whether autograd will need the gradient of one of these inputs.

    Raises RuntimeError if forward mode or torch.func would differentiate the function.
    """
    for x in inputs:
        if unpack_dual(x).tangent is not None:
            raise RuntimeError(
                f"{function} can be differentiated in reverse mode only (backward, "
                "torch.autograd.grad), got an input with a tangent of the forward mode "
                "(torch.func.jvp, torch.autograd.forward_ad)"
            )
    is_wanted = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if is_wanted and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{function} can be differentiated by backward and torch.autograd.grad only, got a "
            "transform of torch.func (grad, vjp, jacrev, hessian)"
        )
    return is_wanted
