"""The token loss kernels on CPU and CUDA.

token_loss computes the gradient in its forward pass, so that the logits are read once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maxrl_fast import _C
from maxrl_fast.algorithms.arguments import check_tensor
from maxrl_fast.algorithms.losses import LOSSES
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.derivatives import check_first_order
from maxrl_fast.ops.dispatch import KernelLaunch, check_fields, dtype_name
from maxrl_fast.ops.loss_terms import KERNEL_TERMS
from maxrl_fast.ops.token_batch import TokenBatch, real_dtype

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class LossSums(NamedTuple):
    """LossSums of csrc/token_loss.h: scalar tensors."""

    loss: Tensor  # weighted
    tokens: Tensor  # not masked
    dropped_tokens: Tensor  # tokens with zero gradient; the sums below are over the others
    ratio: Tensor
    ratio_clamped: Tensor  # tokens whose ratio to the sampling or reference policy was clamped
    clipped_low: Tensor
    clipped_high: Tensor
    kl: Tensor
    entropy: Tensor
    logprob_diff: Tensor  # |logp - old|


NUM_SUMS = len(LossSums._fields)
check_fields("LossSums", LossSums._fields)
check_fields("Loss", tuple(name for name, loss in LOSSES.items() if loss.fused))


def shape_of(logits: Tensor) -> tuple[int, int]:
    check_tensor("logits", logits)
    if logits.dim() != 2 or logits.dtype not in DTYPES:
        raise ValueError(
            f"logits must be [T, V] of {', '.join(map(dtype_name, DTYPES))}, got {logits.dtype} "
            f"{tuple(logits.shape)}"
        )
    return logits.shape[0], logits.shape[1]


class LogitsLaunch(KernelLaunch):
    """A launch of a kernel that reads rows of logits [T, V]."""

    __slots__ = ("arguments", "dtype", "real", "shape", "targets")

    def __init__(self, logits: Tensor, targets: Tensor, temperature: Tensor):
        super().__init__(logits.device)
        self.shape, self.targets = shape_of(logits), targets
        self.real, self.dtype = real_dtype(logits.dtype), logits.dtype
        self.arguments: dict[str, Any] = {
            "dtype": logits.dtype,
            "logits": self.matrix("logits", logits),
            "tokens": (  # TokenRows of csrc/token_loss.h
                *self.shape,
                self.address("targets", targets, torch.int64, self.shape[:1]),
                self.address("temperature", temperature, torch.float64, self.shape[:1]),
            ),
        }

    def matrix(self, name: str, tensor: Tensor) -> tuple[int, int]:
        return self.address(name, tensor, tensor.dtype, self.shape, True), tensor.stride(0)

    def run(self, kernel: str, to: Tensor | None = None, **arguments: Any) -> None:
        """Run the kernel for the dtype of the gradient [T, V] that it writes `to`: memory that may
        be the logits, on a GPU also in half precision the first half of each of their rows.

        Raises ValueError if the CPU kernel finds a wrong target; CUDA kernels make the loss NaN.
        """
        if to is not None:
            arguments["gradient"] = self.matrix("gradient", to)
            if to.dtype != self.dtype:
                kernel += f"_in_{dtype_name(to.dtype)}"
        row = self.launch(kernel, **self.arguments, **arguments)
        if row is not None and row >= 0:
            got = f"{int(self.targets[row])} at token {row}"
            raise ValueError(f"targets must be in [0, {self.shape[1]}), got {got}")


def run_loss(
    logits: Tensor, gradient: Tensor | None, batch: TokenBatch, terms: Sequence[Any]
) -> Tensor:
    """Return the LossSums, and write the gradient if it is given."""
    call = LogitsLaunch(logits, batch.targets, batch.temperature)
    size = _C.LOSS_WORKSPACE if dispatch.is_gpu(logits.device) else NUM_SUMS
    workspace = torch.zeros(size, dtype=torch.float64, device=logits.device)
    numbers = call.addresses(
        torch.float64,
        len(logits),
        advantages=batch.advantages,
        weights=batch.weights,
        old_logprobs=batch.old_logprobs,
        ref_logprobs=batch.ref_logprobs,
        sequence_log_ratio=batch.sequence_log_ratio,
    )
    others = dict(zip(KERNEL_TERMS, terms, strict=True))
    call.run("token_loss", gradient, gradient=(0, 0), sums=workspace, **numbers, **others)
    return workspace[:NUM_SUMS]


def needs_sequence_ratio(batch: TokenBatch, terms: Sequence[Any]) -> bool:
    return LOSSES[terms[0]].by_sequence and batch.old_logprobs is not None


def token_loss(
    logits: Tensor, batch: TokenBatch, terms: Sequence[Any], needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the LossSums, and the gradient of the logits [T, V] if it is needed."""
    gradient = None
    if needs_gradient:
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return write_loss(logits, gradient, batch, terms), gradient


def write_loss(
    logits: Tensor, gradient: Tensor | None, batch: TokenBatch, terms: Sequence[Any]
) -> Tensor:
    """Return the LossSums, and write `gradient`, which may be the logits."""
    if needs_sequence_ratio(batch, terms):
        logprobs, _ = token_logprobs(logits, batch.targets, batch.temperature)
        batch = batch.with_sequence_ratio(logprobs)
    return run_loss(logits, gradient, batch, terms)


def token_logprobs(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return each target's log-prob and each row's entropy [T], without a gradient."""
    call = LogitsLaunch(logits, targets, temperature)
    logprobs, entropy = (
        torch.empty(len(targets), dtype=call.real, device=logits.device) for _ in range(2)
    )
    call.run("token_logprobs", logprobs=logprobs, entropy=entropy)
    return logprobs, entropy


class TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits, targets, temperature)
        return token_logprobs(logits, targets, temperature)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order("token_logprobs")
        logits, *rows = ctx.saved_tensors
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
        write_logprobs_gradient(logits, [*rows, *(x.contiguous() for x in grads)], gradient)
        return gradient, None, None


def write_logprobs_gradient(logits: Tensor, rows: Sequence[Tensor], gradient: Tensor) -> None:
    """Write the gradient of the logits [T, V].

    rows: targets, temperature, and the gradients of the log-probs and of the entropy, [T] each.
    """
    targets, temperature, grad_logprobs, grad_entropy = rows
    call = LogitsLaunch(logits, targets, temperature)
    grads = call.addresses(
        call.real, call.shape[0], grad_logprobs=grad_logprobs, grad_entropy=grad_entropy
    )
    call.run("token_logprobs_backward", gradient, **grads)
