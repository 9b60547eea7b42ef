"""The operators behind the token losses, on the CPU and on CUDA: `maxrl_fast::token_loss`, `token_loss_` (the gradient takes
the logits' place), `token_logprobs`, `token_logprobs_backward` and `token_logprobs_backward_`.

A forward pass of token_loss writes the gradient already: the logits are read once, whatever the loss.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maxrl_fast import _C
from maxrl_fast.ops import _gate
from maxrl_fast.ops._gate import address
from maxrl_fast.ops.token_batch import LossOptions, TokenBatch, real_dtype

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
# Sums of csrc/token_loss.h: the loss, weighted; tokens that count; those of them not read, because they teach nothing; and
# sums over the tokens read.
SUMS = ("loss", "tokens", "dropped_tokens", "ratio", "clipped_low", "clipped_high", "kl", "entropy", "mismatch")

_TOKENS = "Tensor targets, Tensor? temperatures, float temperature"
_LOSS = (
    f"{_TOKENS}, Tensor cu_seqlens, Tensor advantages, Tensor? importance_weights, Tensor? old_logprobs, "
    "Tensor? ref_logprobs, Tensor? sequence_log_ratio, Tensor? mask, Tensor? sequence_tokens, Tensor denominator, str loss, "
    "float clip_low, float clip_high, float dual_clip, str kl, float kl_coef, float entropy_coef"
)
_SCHEMAS = {
    # gradient: [0, 0] where it is not needed
    "token_loss": f"(Tensor logits, {_LOSS}, bool needs_gradient) -> (Tensor sums, Tensor gradient)",
    "token_loss_": f"(Tensor(a!) logits, {_LOSS}) -> Tensor",
    "token_logprobs": f"(Tensor logits, {_TOKENS}) -> (Tensor logprobs, Tensor entropy)",
    "token_logprobs_backward": f"(Tensor logits, {_TOKENS}, Tensor by_logprobs, Tensor by_entropy) -> Tensor",
    "token_logprobs_backward_": f"(Tensor(a!) logits, {_TOKENS}, Tensor by_logprobs, Tensor by_entropy) -> ()",
}
for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"maxrl_fast::{_name}", _schema, tags=(torch.Tag.pt2_compliant_tag,))


def loss_arguments(batch: TokenBatch, options: LossOptions) -> tuple[Any, ...]:
    """The operators' arguments behind the logits."""
    temperatures, temperature = split_temperature(batch.temperature)
    tensors = (
        batch.cu_seqlens,
        batch.advantages,
        batch.importance_weights,
        batch.old_logprobs,
        batch.ref_logprobs,
        batch.sequence_log_ratio,
        batch.mask,
        batch.sequence_tokens,
        batch.denominator,
    )
    choices = (options.loss, options.clip_low, options.clip_high, options.dual_clip, options.kl, options.kl_coef)
    return (batch.targets, temperatures, temperature, *tensors, *choices, options.entropy_coef)


def split_temperature(temperature: float | Tensor) -> tuple[Tensor | None, float]:
    """One a token, or one for all."""
    return (temperature, 1.0) if isinstance(temperature, Tensor) else (None, temperature)


def _matrix(name: str, tensor: Tensor, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> _C.Matrix:
    """A matrix whose rows are contiguous, at any distance."""
    side_by_side = shape[1] <= 1 or tensor.stride(1) == 1 or not tensor.numel()
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device or not side_by_side:
        raise ValueError(
            f"{name} must be {dtype} {tuple(shape)} on {device} with elements of a row side by side, got {tensor.dtype} "
            f"{tuple(tensor.shape)} on {tensor.device} with strides {tensor.stride()}"
        )
    return _C.Matrix(tensor.data_ptr(), tensor.stride(0))


class _Call:
    """The kernels' view of logits and of what goes with every row."""

    def __init__(self, logits: Tensor, targets: Tensor, temperatures: Tensor | None, temperature: float):
        if logits.dim() != 2 or logits.dtype not in DTYPES:
            raise ValueError(f"logits must be [T, V] of {', '.join(DTYPES.values())}, got {logits.dtype} {tuple(logits.shape)}")
        self.shape, self.device, self.real = (logits.shape[0], logits.shape[1]), logits.device, real_dtype(logits.dtype)
        self.dtype = logits.dtype
        self.arguments = {
            "dtype": DTYPES[logits.dtype],
            "logits": self.matrix("logits", logits),
            "tokens": _C.Tokens(
                num_tokens=self.shape[0],
                vocab_size=self.shape[1],
                targets=self.address("targets", targets, torch.int64),
                temperatures=self.address("temperatures", temperatures, self.real),
                temperature=temperature,
            ),
        }

    def matrix(self, name: str, tensor: Tensor) -> _C.Matrix:
        return _matrix(name, tensor, self.shape, self.dtype, self.device)

    def address(self, name: str, tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int:
        """0 for None. The shape is [T] unless given."""
        return 0 if tensor is None else address(name, tensor, dtype, shape or self.shape[:1], self.device)

    def run(self, name: str, **arguments: Any) -> Any:
        """The kernel of this device."""
        return _gate.launch(name, self.device, **self.arguments, **arguments)

    def refuse(self, row: int | None, targets: Tensor) -> None:
        """Raise where a kernel found that a target is not in the vocabulary. CUDA's make the loss NaN instead."""
        if row is not None and row >= 0:
            raise ValueError(f"targets must be in [0, {self.shape[1]}), got {int(targets[row])} at token {row}")


def _token_loss(
    logits: Tensor,
    gradient: Tensor | None,
    targets: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    cu_seqlens: Tensor,
    advantages: Tensor,
    importance_weights: Tensor | None,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    sequence_log_ratio: Tensor | None,
    mask: Tensor | None,
    sequence_tokens: Tensor | None,
    denominator: Tensor,
    *options: Any,
) -> Tensor:
    """Sums [9]; the gradient, which may be the logits, is written."""
    call = _Call(logits, targets, temperatures, temperature)
    num_sequences = len(cu_seqlens) - 1

    def per_token(values: Tensor | None) -> bool:
        return values is not None and len(values) != num_sequences

    def values_at(name: str, values: Tensor | None) -> int:
        return call.address(name, values, call.real, *(() if per_token(values) else (num_sequences,)))

    sequences = _C.Sequences(
        num_sequences=num_sequences,
        cu_seqlens=call.address("cu_seqlens", cu_seqlens, torch.int64, num_sequences + 1),
        advantages=values_at("advantages", advantages),
        advantages_per_token=per_token(advantages),
        importance_weights=values_at("importance_weights", importance_weights),
        importance_per_token=per_token(importance_weights),
        old_logprobs=call.address("old_logprobs", old_logprobs, call.real),
        ref_logprobs=call.address("ref_logprobs", ref_logprobs, call.real),
        sequence_log_ratio=call.address("sequence_log_ratio", sequence_log_ratio, call.real, num_sequences),
        mask=call.address("mask", mask, torch.bool),
        sequence_tokens=call.address("sequence_tokens", sequence_tokens, torch.int64, num_sequences),
        denominator=address("denominator", denominator, torch.float64, (), call.device),
    )
    size = _C.LOSS_WORKSPACE if _gate.is_gpu(logits.device) else len(SUMS)
    sums = torch.zeros(size, dtype=torch.float64, device=logits.device)
    row = call.run(
        "token_loss",
        sequences=sequences,
        options=_C.LossOptions(**dict(zip(LossOptions.__dataclass_fields__, options, strict=True))),
        gradient=_C.Matrix(0, 0) if gradient is None else call.matrix("gradient", gradient),
        sums=sums.data_ptr(),
    )
    call.refuse(row, targets)
    return sums[: len(SUMS)]


def _token_loss_functional(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *of_loss, needs_gradient = arguments
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format) if needs_gradient else None
    sums = _token_loss(logits, gradient, *of_loss)
    return sums, logits.new_empty(0, 0) if gradient is None else gradient


def _token_loss_in_place(logits: Tensor, *arguments: Any) -> Tensor:
    return _token_loss(logits, logits, *arguments)


def _token_logprobs(logits: Tensor, targets: Tensor, temperatures: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
    call = _Call(logits, targets, temperatures, temperature)
    logprobs, entropy = (torch.empty(len(targets), dtype=call.real, device=logits.device) for _ in range(2))
    call.refuse(call.run("token_logprobs", logprobs=logprobs.data_ptr(), entropy=entropy.data_ptr()), targets)
    return logprobs, entropy


def _token_logprobs_gradient(
    logits: Tensor,
    gradient: Tensor,
    targets: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    by_logprobs: Tensor,
    by_entropy: Tensor,
) -> None:
    call = _Call(logits, targets, temperatures, temperature)
    call.run(
        "token_logprobs_backward",
        by_logprobs=call.address("by_logprobs", by_logprobs, call.real),
        by_entropy=call.address("by_entropy", by_entropy, call.real),
        gradient=call.matrix("gradient", gradient),
    )


def _token_logprobs_backward(logits: Tensor, *arguments: Any) -> Tensor:
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _token_logprobs_gradient(logits, gradient, *arguments)
    return gradient


def _token_logprobs_backward_in_place(logits: Tensor, *arguments: Any) -> None:
    _token_logprobs_gradient(logits, logits, *arguments)


def _fake_loss(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    shape = logits.shape if arguments[-1] else (0, 0)
    return logits.new_empty(len(SUMS), dtype=torch.float64), logits.new_empty(shape)


def _fake_logprobs(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    shape, dtype = logits.shape[:1], real_dtype(logits.dtype)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=dtype)


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "token_loss": (_token_loss_functional, _fake_loss),
    "token_loss_": (
        _token_loss_in_place,
        lambda logits, *_: logits.new_empty(len(SUMS), dtype=torch.float64),
    ),
    "token_logprobs": (_token_logprobs, _fake_logprobs),
    "token_logprobs_backward": (
        _token_logprobs_backward,
        lambda logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
    ),
    "token_logprobs_backward_": (_token_logprobs_backward_in_place, lambda *_: None),
}
for _name, (_implementation, _fake) in _IMPLEMENTATIONS.items():
    for _device in ("CPU", "CUDA"):
        torch.library.impl(f"maxrl_fast::{_name}", _device, _implementation)
    torch.library.register_fake(f"maxrl_fast::{_name}", _fake)


def scaled(gradient: Tensor, scale: Tensor, in_place: bool = False) -> Tensor:
    """gradient times scale []. Where scale is 1, as it nearly always is, the gradient itself, and without a pass over it.

    On a GPU the device looks at the scale, so that the host need not wait, and the gradient is changed in place always.
    """
    if torch.compiler.is_compiling() or type(scale) is not Tensor:  # traced: the scale has no value yet
        return gradient * scale.to(gradient.dtype)
    if _gate.is_gpu(gradient.device) and _gate.has_kernels(gradient.device):
        scale = scale.double().contiguous()
        shape = (gradient.shape[0], gradient.shape[1])
        _gate.launch(
            "scale",
            gradient.device,
            dtype=DTYPES[gradient.dtype],
            matrix=_matrix("gradient", gradient, shape, gradient.dtype, gradient.device),
            num_rows=shape[0],
            row_size=shape[1],
            scale=scale.data_ptr(),
        )
        return gradient
    if float(scale) == 1:
        return gradient
    scale = scale.to(gradient.dtype)
    return gradient.mul_(scale) if in_place else gradient * scale


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # as zeros [T, V], for the output that has no gradient
    ctx.save_for_backward(output[1])
    ctx.num_inputs, ctx.is_spent = len(inputs), False


def _loss_backward(ctx: Any, by_sums: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    (gradient,) = ctx.saved_tensors
    nothing = (None,) * (ctx.num_inputs - 1)
    if by_sums is None:
        return None, *nothing
    if ctx.is_spent and gradient.device.type == "cuda":
        raise RuntimeError("backward ran already, and scaled the gradient in place: compute the loss again instead")
    ctx.is_spent = True
    return scaled(gradient, by_sums[0]), *nothing


torch.library.register_autograd("maxrl_fast::token_loss", _loss_backward, setup_context=_save_gradient)


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, targets, temperatures, ctx.temperature = inputs
    ctx.save_for_backward(logits, targets, temperatures)


def _logprobs_backward(ctx: Any, by_logprobs: Tensor, by_entropy: Tensor) -> tuple[Tensor | None, ...]:
    logits, targets, temperatures = ctx.saved_tensors
    slopes = (by_logprobs.contiguous(), by_entropy.contiguous())
    op = torch.ops.maxrl_fast.token_logprobs_backward
    return op(logits, targets, temperatures, ctx.temperature, *slopes), None, None, None


torch.library.register_autograd("maxrl_fast::token_logprobs", _logprobs_backward, setup_context=_save_rows)
