"""The token loss operators on CPU and CUDA; names that end in _ overwrite the logits.

token_loss computes the gradient in its forward pass, so that the logits are read once.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maxrl_fast import _C
from maxrl_fast.algorithms.arguments import check_tensor
from maxrl_fast.algorithms.losses import LOSSES
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.derivatives import register_backward
from maxrl_fast.ops.dispatch import KernelLaunch, check_fields, operator
from maxrl_fast.ops.token_batch import LossTerms, TokenBatch, real_dtype

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


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


def loss_arguments(batch: TokenBatch, terms: LossTerms) -> tuple[Any, ...]:
    """Return the arguments of token_loss after the logits, in the order of LOSS_SCHEMA."""
    temperatures, temperature = split_temperature(batch.temperature)
    named = {**vars(batch), "temperatures": temperatures, "temperature": temperature, **vars(terms)}
    return tuple([named[name] for name in _LOSS_ARGUMENTS])


def batch_and_terms(arguments: Sequence[Any]) -> tuple[TokenBatch, LossTerms]:
    """Undo `loss_arguments`."""
    batch, terms = TokenBatch(*_OF_BATCH(arguments)), LossTerms(*_OF_TERMS(arguments))
    if (temperatures := arguments[_LOSS_ARGUMENTS.index("temperatures")]) is not None:
        batch.temperature = temperatures
    return batch, terms


def split_temperature(temperature: float | Tensor) -> tuple[Tensor | None, float]:
    return (temperature, 1.0) if isinstance(temperature, Tensor) else (None, temperature)


def shape_of(logits: Tensor) -> tuple[int, int]:
    check_tensor("logits", logits)
    if logits.dim() != 2 or logits.dtype not in DTYPES:
        raise ValueError(
            f"logits must be [T, V] of {', '.join(DTYPES.values())}, got {logits.dtype} "
            f"{tuple(logits.shape)}"
        )
    return logits.shape[0], logits.shape[1]


class LogitsLaunch(KernelLaunch):
    __slots__ = ("arguments", "dtype", "real", "shape")

    def __init__(
        self, logits: Tensor, targets: Tensor, temperatures: Tensor | None, temperature: float
    ):
        super().__init__(logits.device)
        self.shape = shape_of(logits)
        self.real, self.dtype = real_dtype(logits.dtype), logits.dtype
        self.arguments = {
            "dtype": DTYPES[logits.dtype],
            "logits": self.matrix("logits", logits),
            "tokens": (  # TokenRows of csrc/token_loss.h
                *self.shape,
                self.address("targets", targets, torch.int64, self.shape[:1]),
                self.address("temperatures", temperatures, self.real, self.shape[:1]),
                temperature,
            ),
        }

    def matrix(self, name: str, tensor: Tensor) -> tuple[int, int]:
        return self.rows(name, tensor, self.dtype, self.shape), tensor.stride(0)

    def run_logprobs_backward(
        self, grad_logprobs: Tensor, grad_entropy: Tensor, gradient: Tensor
    ) -> None:
        self.launch(
            "token_logprobs_backward",
            **self.arguments,
            **self.addresses(
                self.real, self.shape[0], grad_logprobs=grad_logprobs, grad_entropy=grad_entropy
            ),
            gradient=self.matrix("gradient", gradient),
        )

    def refuse(self, row: int | None, targets: Tensor) -> None:
        """Raise ValueError if the CPU kernel found a wrong target; CUDA kernels make the loss
        NaN."""
        if row is not None and row >= 0:
            got = f"{int(targets[row])} at token {row}"
            raise ValueError(f"targets must be in [0, {self.shape[1]}), got {got}")


# The arguments of token_loss after the logits: the fields of TokenBatch and LossTerms.
LOSS_SCHEMA = (
    "Tensor targets, Tensor? temperatures, float temperature, Tensor cu_seqlens, "
    "Tensor advantages, bool advantages_per_token, Tensor? importance_weights, "
    "bool importance_weights_per_token, Tensor? old_logprobs, Tensor? ref_logprobs, "
    "Tensor? sequence_log_ratio, Tensor? mask, Tensor? sequence_tokens, Tensor denominator, "
    "str loss, float clip_low, float clip_high, float dual_clip, str kl, float kl_coef, "
    "float entropy_coef"
)
_LOSS_ARGUMENTS = tuple(argument.split()[1] for argument in LOSS_SCHEMA.split(", "))
_OF_BATCH, _OF_TERMS = (
    itemgetter(*map(_LOSS_ARGUMENTS.index, record.__dataclass_fields__))
    for record in (TokenBatch, LossTerms)
)


@operator(schema=f"(Tensor logits, {LOSS_SCHEMA}, bool needs_gradient) -> (Tensor, Tensor)")
def token_loss(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The second result is the gradient of the logits [T, V], or [0, 0] if not needed."""
    *of_loss, needs_gradient = arguments
    batch, terms = batch_and_terms(of_loss)
    if not needs_gradient:
        return launch_token_loss(logits, None, batch, terms), logits.new_empty(0, 0)
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return launch_token_loss(logits, gradient, batch, terms), gradient


def register_loss(op: Any, function: str, num_gradients: int) -> None:
    """Register the derivative of an operator that returns LossSums and gradients of its first
    arguments.

    Its last arguments say which gradients are needed.
    """

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

    register_backward(op, function, backward, save=save, num_inputs=num_gradients)


register_loss(token_loss, "policy_gradient_loss", 1)


@operator(schema=f"(Tensor(a0!) logits, {LOSS_SCHEMA}) -> Tensor")
def token_loss_(logits: Tensor, *arguments: Any) -> Tensor:
    return launch_token_loss(logits, logits, *batch_and_terms(arguments))


def launch_token_loss(
    logits: Tensor, gradient: Tensor | None, batch: TokenBatch, terms: LossTerms
) -> Tensor:
    """Write `gradient`, which may be the logits."""
    call = LogitsLaunch(logits, batch.targets, *split_temperature(batch.temperature))
    num_tokens, num_sequences = call.shape[0], batch.num_sequences
    advantages = num_tokens if batch.advantages_per_token else num_sequences
    weights = num_tokens if batch.importance_weights_per_token else num_sequences
    addresses = call.addresses
    size = _C.LOSS_WORKSPACE if dispatch.is_gpu(logits.device) else NUM_SUMS
    sums = torch.zeros(size, dtype=torch.float64, device=logits.device)
    row = call.launch(
        "token_loss",
        **call.arguments,
        num_sequences=num_sequences,
        **addresses(torch.int64, num_sequences + 1, cu_seqlens=batch.cu_seqlens),
        **addresses(call.real, advantages, advantages=batch.advantages),
        advantages_per_token=batch.advantages_per_token,
        **addresses(call.real, weights, importance_weights=batch.importance_weights),
        importance_per_token=batch.importance_weights_per_token,
        **addresses(
            call.real,
            num_tokens,
            old_logprobs=batch.old_logprobs,
            ref_logprobs=batch.ref_logprobs,
        ),
        **addresses(call.real, num_sequences, sequence_log_ratio=batch.sequence_log_ratio),
        **addresses(torch.bool, num_tokens, mask=batch.mask),
        **addresses(torch.int64, num_sequences, sequence_tokens=batch.sequence_tokens),
        denominator=call.address("denominator", batch.denominator, torch.float64, ()),
        **vars(terms),
        gradient=(0, 0) if gradient is None else call.matrix("gradient", gradient),
        sums=call.keep(sums),
    )
    call.refuse(row, batch.targets)
    return sums[:NUM_SUMS]


@operator()
def token_logprobs(
    logits: Tensor, targets: Tensor, temperatures: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    call = LogitsLaunch(logits, targets, temperatures, temperature)
    logprobs, entropy = (
        torch.empty(len(targets), dtype=call.real, device=logits.device) for _ in range(2)
    )
    results = {"logprobs": call.keep(logprobs), "entropy": call.keep(entropy)}
    call.refuse(call.launch("token_logprobs", **call.arguments, **results), targets)
    return logprobs, entropy


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, targets, temperatures, ctx.temperature = inputs
    ctx.save_for_backward(logits, targets, temperatures)


def _token_logprobs_backward(
    ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
) -> tuple[Tensor]:
    logits, targets, temperatures = ctx.saved_tensors
    grads = (grad_logprobs.contiguous(), grad_entropy.contiguous())
    return (token_logprobs_backward(logits, targets, temperatures, ctx.temperature, *grads),)


register_backward(token_logprobs, "token_logprobs", _token_logprobs_backward, save=_save_rows)


@operator()
def token_logprobs_backward(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
) -> Tensor:
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    call = LogitsLaunch(logits, targets, temperatures, temperature)
    call.run_logprobs_backward(grad_logprobs, grad_entropy, gradient)
    return gradient


@operator(mutates=("logits",))
def token_logprobs_backward_(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
) -> None:
    LogitsLaunch(logits, targets, temperatures, temperature).run_logprobs_backward(
        grad_logprobs, grad_entropy, logits
    )


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
            dtype=DTYPES[gradient.dtype],
            matrix=(call.rows("gradient", gradient, gradient.dtype, shape), gradient.stride(0)),
            num_rows=shape[0],
            row_size=shape[1],
            scale=call.address("scale", scale, torch.float64, ()),
        )
        return gradient
    if float(scale) == 1:
        return gradient
    scale = scale.to(gradient.dtype)
    return gradient.mul_(scale) if in_place else gradient * scale
