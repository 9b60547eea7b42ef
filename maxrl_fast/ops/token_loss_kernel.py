"""The token loss operators on CPU and CUDA.

token_loss computes the gradient in its forward pass, so that the logits are read once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from maxrl_fast import _C
from maxrl_fast.algorithms.arguments import check_tensor
from maxrl_fast.algorithms.losses import LOSSES
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.derivatives import register_backward
from maxrl_fast.ops.dispatch import KernelLaunch, check_fields, dtype_name, operator
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


def loss_derivative(function: str, num_gradients: int) -> Callable[[Any], None]:
    """Return what registers the derivative of an operator that returns LossSums and the gradients
    of its first arguments. Its last arguments say which gradients are needed."""

    def save(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros like the gradients
        ctx.save_for_backward(*results[1:])
        ctx.needed, ctx.is_spent = inputs[-num_gradients:], False

    def backward(ctx: Any, grad_sums: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        if grad_sums is None:
            return (None,) * num_gradients
        if ctx.is_spent and grad_sums.device.type == "cuda":
            raise RuntimeError(
                "backward ran already, and scaled the gradient in place: compute the loss again "
                "instead"
            )
        ctx.is_spent = True
        pairs = zip(gradients, ctx.needed, strict=True)
        return tuple(scaled(x, grad_sums[0]) if is_needed else None for x, is_needed in pairs)

    return partial(
        register_backward, function=function, backward=backward, save=save, num_inputs=num_gradients
    )


# The arguments of token_loss after the logits: a TokenBatch and the terms.
_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?"}
_OF_BATCH = {name: _TYPES[kind] for name, kind in get_type_hints(TokenBatch).items()}
LOSS_SCHEMA = ", ".join(f"{kind} {name}" for name, kind in (_OF_BATCH | KERNEL_TERMS).items())


def split_arguments(arguments: Sequence[Any]) -> tuple[TokenBatch, Sequence[Any], Sequence[Any]]:
    """Return the batch, the terms and what follows them."""
    end = len(_OF_BATCH) + len(KERNEL_TERMS)
    batch = TokenBatch(*arguments[: len(_OF_BATCH)])
    return batch, arguments[len(_OF_BATCH) : end], arguments[end:]


def needs_sequence_ratio(batch: TokenBatch, terms: Sequence[Any]) -> bool:
    return LOSSES[terms[0]].by_sequence and batch.old_logprobs is not None


@operator(
    schema=f"(Tensor logits, {LOSS_SCHEMA}, bool needs_gradient) -> (Tensor, Tensor)",
    derivative=loss_derivative("policy_gradient_loss", 1),
)
def token_loss(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The second result is the gradient of the logits [T, V], or [0, 0] if not needed."""
    batch, terms, (needs_gradient,) = split_arguments(arguments)
    gradient = logits.new_empty(0, 0)
    if needs_gradient:
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return write_loss(logits, gradient if needs_gradient else None, batch, terms), gradient


def write_loss(
    logits: Tensor, gradient: Tensor | None, batch: TokenBatch, terms: Sequence[Any]
) -> Tensor:
    """Return the LossSums, and write `gradient`, which may be the logits."""
    if needs_sequence_ratio(batch, terms):
        logprobs, _ = token_logprobs(logits, batch.targets, batch.temperature)
        batch = batch.with_sequence_ratio(logprobs)
    return run_loss(logits, gradient, batch, terms)


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _token_logprobs_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor]:
    return (token_logprobs_backward(*ctx.saved_tensors, *(x.contiguous() for x in grads)),)


@operator(
    derivative=partial(
        register_backward,
        function="token_logprobs",
        backward=_token_logprobs_backward,
        save=_save_rows,
    )
)
def token_logprobs(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    call = LogitsLaunch(logits, targets, temperature)
    logprobs, entropy = (
        torch.empty(len(targets), dtype=call.real, device=logits.device) for _ in range(2)
    )
    call.run("token_logprobs", logprobs=logprobs, entropy=entropy)
    return logprobs, entropy


@operator()
def token_logprobs_backward(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
) -> Tensor:
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    rows = targets, temperature, grad_logprobs, grad_entropy
    write_logprobs_gradient(logits, rows, gradient)
    return gradient


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


def scaled(gradient: Tensor, scale: Tensor, in_place: bool = False) -> Tensor:
    """Return gradient times scale []. If scale is 1, as nearly always, the gradient is not read.

    On a GPU the gradient is changed in place, so that the host does not wait for the scale.
    """
    is_traced = torch.compiler.is_compiling() or type(scale) is not Tensor
    # batched tensors come from is_grads_batched=True
    if is_traced or torch._C._functorch.is_legacy_batchedtensor(scale):
        return gradient * scale.to(gradient.dtype)
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
    scale = scale.to(gradient.dtype)
    return gradient.mul_(scale) if in_place else gradient * scale
