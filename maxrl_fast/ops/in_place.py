"""The token loss that overwrites the logits with their gradient; later use of them is an error."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.ops.derivatives import check_mode, first_order
from maxrl_fast.ops.token_loss_kernel import scaled


def overwrite(logits: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the differentiable LossSums [10] of `compute`, which overwrites the logits.

    If an earlier operation saved the logits, autograd notices their changed version and raises. A
    later operation's backward pass goes through `_ConsumedLogits`, which raises too.
    """
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(
            f"in_place needs logits whose rows are contiguous, got strides {logits.stride()}"
        )
    if logits.shape[0] > 1 and logits.stride(0) < logits.shape[1]:
        raise ValueError(
            f"in_place needs logits whose rows do not share memory, got strides {logits.stride()}"
        )
    check_mode("policy_gradient_loss", logits)
    gradient = _Gradient(logits.detach())
    sums: Tensor = _Loss.apply(logits, gradient, compute)
    _ConsumedLogits.apply(logits)
    gradient.version = logits._version
    return sums


class _Gradient:
    """The gradient in the memory of the logits, until the backward pass takes it."""

    def __init__(self, values: Tensor):
        self.values: Tensor | None = values
        self.version = 0

    def take(self) -> Tensor:
        values, self.values = self.values, None
        if values is None:
            raise RuntimeError(
                "backward ran already, and in_place keeps one gradient: compute the loss again "
                "instead"
            )
        if values._version != self.version:
            raise RuntimeError(
                "the logits were changed after policy_gradient_loss(in_place=True) left their "
                "gradient there"
            )
        return values


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, gradient: _Gradient, compute: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.gradient = gradient
        assert gradient.values is not None
        sums = compute(gradient.values)
        torch.autograd.graph.increment_version(logits)
        return sums

    @staticmethod
    @first_order("policy_gradient_loss")
    def backward(ctx: Any, *grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        return scaled(ctx.gradient.take(), grad_sums[0][0], in_place=True), None, None


class _ConsumedLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise RuntimeError(
            "the logits were used after policy_gradient_loss(in_place=True) had put its gradient "
            "in their place: use them before and without keeping them, or leave in_place out"
        )
