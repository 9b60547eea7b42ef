"""Losses and log-probs from hidden states and the output matrix, one chunk of logits at a time.

Registered as operators, because torch.compile could not trace the number of rows with a gradient.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.losses.registry import LOSSES, call_rows
from maxrl_fast.ops import dispatch
from maxrl_fast.ops import token_loss_kernel as kernels
from maxrl_fast.ops.derivatives import needs_gradient, register_backward
from maxrl_fast.ops.dispatch import has_kernels, operator, register_fake
from maxrl_fast.ops.function_loss import (
    function_loss,
    linear_rows,
    token_logprobs_reference,
    tokens_of,
)
from maxrl_fast.ops.logit_chunks import (
    Chunks,
    capped_logits,
    check_hidden,
    empty_gradients,
    rows_of,
)
from maxrl_fast.ops.token_batch import LossTerms, TokenBatch, check_rows, prepare, real_dtype
from maxrl_fast.ops.token_loss import loss_and_metrics, policy_gradient_loss
from maxrl_fast.ops.token_loss_kernel import (
    NUM_SUMS,
    batch_and_terms,
    loss_arguments,
    split_temperature,
)

_DEFAULTS = {
    x: y for x, y in (policy_gradient_loss.__kwdefaults__ or {}).items() if x != "in_place"
}


def linear_policy_gradient_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
    *,
    softcap: float = 0.0,
    chunk_tokens: int | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return policy_gradient_loss of the logits hidden @ weight.T, one chunk of tokens at a time.

    The forward pass computes loss and gradients chunk by chunk: a chunk's logits, their gradient in
    the same memory, and its matrix multiplications with weight and hidden states. Besides the
    gradients, weight's in float32 until the end, it needs memory for one chunk of logits (and its
    float32 copy if a CPU multiplies half precision), for any T. gspo takes two passes, the first
    for sequence ratios; losses that are functions (`ops.LOSSES`) take two, for log-probs and their
    gradient.

    Tokens with zero gradient are left out of the multiplications. On a GPU this needs a mask, and
    the host waits for the number of these tokens; without a mask all tokens are multiplied.

    Args:
        hidden: [T, H] float32, bfloat16, float16 or float64; logits have its dtype.
        weight: [V, H], of the same dtype or float32 (a master copy). Its gradient is not allocated
            if it is frozen (requires_grad False).
        softcap: logits z become softcap * tanh(z / softcap), before the temperature (Gemma 2); 0:
            unchanged. A gradient through it takes the memory of a second chunk.
        chunk_tokens: tokens per chunk. Default: 32 MiB of logits on a CPU, at most 1.25 GiB on a
            GPU, 5 GiB on one of 100 GB or more, but at least 128 tokens.
        options: further arguments of policy_gradient_loss, except in_place; results are the same.

    Raises:
        As policy_gradient_loss, and ValueError if hidden and weight do not fit each other. On a GPU
        the backward pass can run only once.
    """
    size, chunk = check_hidden(hidden, weight, chunk_tokens, softcap)
    if unknown := options.keys() - _DEFAULTS.keys():
        raise TypeError(f"linear_policy_gradient_loss does not take {', '.join(sorted(unknown))}")
    given = {**_DEFAULTS, **options}
    shape = len(hidden), size
    batch, terms, row, numbers = prepare(
        hidden.dtype, hidden.device, shape, targets, advantages, cu_seqlens, **given
    )
    if not has_kernels(hidden.device) or not row.fused:
        hidden = torch.where(batch.counted()[:, None], hidden, 0.0)  # masked states may be NaN
        targets = batch.targets.where(batch.counted(), 0)
        scale: dict[str, Any] = {"temperature": batch.unmasked_temperature(), "softcap": softcap}
        values = linear_token_logprobs(hidden, weight, targets, **scale, chunk_tokens=chunk_tokens)
        reads = None if row.rows is None else partial(call_rows, row, numbers)
        rows = None if reads is None else linear_rows(hidden, weight, targets, reads, **scale)
        sums = function_loss(row, numbers, terms, batch, tokens_of(batch, *values, rows))
        return loss_and_metrics(sums, hidden)
    counted = len(batch) if batch.mask is None else batch.mask.sum()
    needed = needs_gradient(hidden), needs_gradient(weight)
    sums, *_ = linear_loss(hidden, weight, *loss_arguments(batch, terms), chunk, softcap, *needed)
    total, metrics = loss_and_metrics(sums, hidden)
    # The kernel counted only the rows it was given.
    left_out = counted - metrics["tokens"]
    return total, metrics | {
        "tokens": metrics["tokens"] + left_out,
        "dropped_tokens": metrics["dropped_tokens"] + left_out,
    }


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float = 0.0,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return token_logprobs of the logits hidden @ weight.T, one chunk of tokens at a time.

    hidden [T, H], weight [V, H], softcap and chunk_tokens are as in linear_policy_gradient_loss,
    the rest as in token_logprobs. The backward pass recomputes the logits.
    """
    size, chunk = check_hidden(hidden, weight, chunk_tokens, softcap)
    check_rows((len(hidden), size), targets, temperature, hidden.device)
    targets = targets.long().contiguous()
    if not has_kernels(hidden.device):
        logits = capped_logits(hidden, weight, softcap)
        return token_logprobs_reference(logits, targets, temperature)
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().to(real_dtype(hidden.dtype)).contiguous()
    logprobs, entropy = linear_logprobs(
        hidden, weight, targets, *split_temperature(temperature), chunk, softcap
    )
    return logprobs, entropy


@operator(
    schema=f"(Tensor hidden, Tensor weight, {kernels.LOSS_SCHEMA}, SymInt chunk, float softcap, "
    "bool needs_hidden, bool needs_weight) -> (Tensor, Tensor, Tensor)"
)
def linear_loss(hidden: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the LossSums, and the gradients of hidden [T, H] and weight [V, H], or [0] if not
    needed."""
    *loss, chunk, softcap, needs_hidden, needs_weight = arguments
    batch, terms = batch_and_terms(loss)
    index, rows = _needed_index(batch, terms), hidden
    if index is not None:
        rows, batch = hidden.index_select(0, index), batch.take(index)
    if LOSSES[terms.loss].by_sequence and batch.old_logprobs is not None:
        logprobs, _ = _logprobs(rows, weight, batch.targets, batch.temperature, chunk, softcap)
        batch = replace(batch, sequence_log_ratio=batch.log_ratio_of_sequences(logprobs))
    chunks = Chunks(rows, weight, chunk, needs_hidden, needs_weight, softcap)
    sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=hidden.device)
    for start, stop, logits in chunks:
        gradient = logits if needs_hidden or needs_weight else None  # in the memory of the logits
        sums += kernels.launch_token_loss(logits, gradient, batch.rows(start, stop), terms)
        if gradient is not None:
            chunks.backward(start, stop, gradient)
    # frees the chunk before the gradient is rounded
    chunks.buffer = logits = gradient = chunks.buffer.new_empty(0)
    grad_hidden, grad_weight = chunks.gradients()
    if needs_hidden and index is not None:
        grad_hidden = torch.zeros_like(hidden).index_copy_(0, index, grad_hidden)
    return sums, grad_hidden, grad_weight


def _needed_index(batch: TokenBatch, terms: LossTerms) -> Tensor | None:
    """Return the tokens that the loss reads, int64; None: all, also on a GPU without a mask."""
    if dispatch.is_gpu(batch.targets.device) and batch.mask is None:
        return None
    index = batch.needed_rows(terms, LOSSES[terms.loss].by_sequence).nonzero()[:, 0]
    return index if len(index) < len(batch) else None


@register_fake(linear_loss)
def _(hidden: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    sums = hidden.new_empty(NUM_SUMS, dtype=torch.float64)
    return sums, *empty_gradients(hidden, weight, *arguments[-2:])


kernels.register_loss(linear_loss, "linear_policy_gradient_loss", 2)


def _logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    chunk: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    parts = [
        kernels.token_logprobs(logits, *rows_of(targets, temperature, start, stop))
        for start, stop, logits in Chunks(hidden, weight, chunk, False, False, softcap)
    ]
    none = hidden.new_empty(0, dtype=real_dtype(hidden.dtype))
    logprobs, entropy = (torch.cat(column) for column in zip((none, none), *parts, strict=True))
    return logprobs, entropy


@operator()
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    chunk: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    tau = temperature if temperatures is None else temperatures
    return _logprobs(hidden, weight, targets, tau, chunk, softcap)


@register_fake(linear_logprobs)
def _(hidden: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    shape, dtype = hidden.shape[:1], real_dtype(hidden.dtype)
    return hidden.new_empty(shape, dtype=dtype), hidden.new_empty(shape, dtype=dtype)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.temperature, ctx.chunk, ctx.softcap = inputs
    ctx.save_for_backward(*tensors)


def _linear_logprobs_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad[:2]
    contiguous = (grad.contiguous() for grad in grads)
    gradients = linear_logprobs_backward(
        *ctx.saved_tensors, ctx.temperature, *contiguous, ctx.chunk, ctx.softcap, *needed
    )
    return tuple(x if yes else None for x, yes in zip(gradients, needed, strict=True))


register_backward(
    linear_logprobs,
    "linear_token_logprobs",
    _linear_logprobs_backward,
    save=_save_inputs,
    num_inputs=2,
)


@operator()
def linear_logprobs_backward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    chunk: int,
    softcap: float,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    chunks = Chunks(hidden, weight, chunk, needs_hidden, needs_weight, softcap)
    tau = temperature if temperatures is None else temperatures
    for start, stop, logits in chunks:
        rows = rows_of(targets, tau, start, stop)
        kernels.token_logprobs_backward_(
            logits, *rows, grad_logprobs[start:stop], grad_entropy[start:stop]
        )
        chunks.backward(start, stop, logits)
    return chunks.gradients()


@register_fake(linear_logprobs_backward)
def _(hidden: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return empty_gradients(hidden, weight, *arguments[-2:])
