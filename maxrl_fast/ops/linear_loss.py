"""Losses and log-probs from hidden states and the output matrix, one chunk of logits at a time."""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.ops import token_loss_kernel as kernels
from maxrl_fast.ops.derivatives import LossWithGradients, check_first_order, needs_gradient
from maxrl_fast.ops.dispatch import eager, has_kernels, is_gpu
from maxrl_fast.ops.function_loss import (
    compared,
    function_loss,
    linear_loss_of_logits,
    token_logprobs_reference,
    tokens_of,
)
from maxrl_fast.ops.logit_chunks import Chunks, capped_logits, check_hidden
from maxrl_fast.ops.loss_terms import LossTerms
from maxrl_fast.ops.token_batch import TokenBatch, real_dtype, token_batch, token_rows
from maxrl_fast.ops.token_loss import loss_and_metrics, policy_gradient_loss
from maxrl_fast.ops.token_loss_kernel import NUM_SUMS

_PARAMETERS = inspect.signature(policy_gradient_loss).parameters.values()
_OPTIONS = {x.name for x in _PARAMETERS if x.kind is x.KEYWORD_ONLY}
_TERMS = _OPTIONS & LossTerms.__dataclass_fields__.keys()


@eager
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

    The forward pass computes loss and gradients in the memory of one chunk of logits and of the
    gradients (weight's in float32 until the end), for any T. gspo and losses that are functions
    take two passes.

    Tokens with zero gradient are left out of the multiplications: on a GPU if there is a mask, as
    the host waits for their number.

    Args:
        hidden: [T, H] float32, bfloat16, float16 or float64; logits have its dtype, on a GPU at
            least float32.
        weight: [V, H], of the same dtype or float32 (a master copy). Its gradient is not allocated
            if it is frozen (requires_grad False).
        softcap: logits z become softcap * tanh(z / softcap), before the temperature (Gemma 2); 0:
            unchanged. A gradient through it takes the memory of a second chunk.
        chunk_tokens: tokens per chunk. Default: 32 MiB of logits on a CPU, on a GPU at most 1.25
            GiB, or a 32nd of its memory if that is more, but at least 128 tokens.
        options: further arguments of policy_gradient_loss; results are the same.

    Raises:
        As policy_gradient_loss, and ValueError if hidden and weight do not fit each other.
    """
    size, chunk = check_hidden(hidden, weight, chunk_tokens, softcap)
    if unknown := options.keys() - _OPTIONS:
        raise TypeError(f"linear_policy_gradient_loss does not take {', '.join(sorted(unknown))}")
    terms = LossTerms(**{name: x for name, x in options.items() if name in _TERMS})
    others = {name: x for name, x in options.items() if name not in _TERMS}
    shape = len(hidden), size
    batch = token_batch(terms, shape, hidden.device, targets, advantages, cu_seqlens, **others)
    has_mask = options.get("mask") is not None
    sums = loss_of_hidden(hidden, weight, batch, terms, softcap, chunk, has_mask=has_mask)
    return loss_and_metrics(sums, hidden)


def loss_of_hidden(
    hidden: Tensor,
    weight: Tensor,
    batch: TokenBatch,
    terms: LossTerms,
    softcap: float = 0.0,
    chunk: int = 0,
    *,
    has_mask: bool = False,
) -> Tensor:
    """Return the LossSums [10] of a checked batch, with the gradient of the first. chunk: tokens;
    0: the default."""
    spec = terms.spec
    if not has_kernels(hidden.device) or not spec.fused:
        hidden = torch.where(batch.loss_mask()[:, None], hidden, 0.0)  # masked states may be NaN
        needs_first_pass = spec.over_batch and batch.statistics is None
        if not spec.reads_logits or needs_first_pass:
            tau, chunk_tokens = batch.temperature, chunk or None
            with torch.set_grad_enabled(torch.is_grad_enabled() and not spec.reads_logits):
                logprobs, entropy = linear_token_logprobs(
                    *(hidden, weight, batch.targets),
                    temperature=tau,
                    softcap=softcap,
                    chunk_tokens=chunk_tokens,
                )
            terms, batch = compared(terms, batch, logprobs, entropy)
        if spec.reads_logits:
            return linear_loss_of_logits(terms, batch, hidden, weight, softcap)
        return function_loss(terms, batch, tokens_of(batch, logprobs, entropy))
    # On a GPU the host waits for the number of rows that are left out.
    leaves_out = has_mask or not is_gpu(hidden.device)
    needed = needs_gradient(hidden), needs_gradient(weight)
    compute = partial(
        linear_loss, hidden, weight, batch, terms.of_kernel, chunk, softcap, leaves_out, needed
    )
    sums: Tensor = LossWithGradients.apply("linear_policy_gradient_loss", compute, hidden, weight)
    return sums


@eager
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
    rows = token_rows((len(hidden), size), targets, temperature, hidden.device)
    if not has_kernels(hidden.device):
        return token_logprobs_reference(capped_logits(hidden, weight, softcap), *rows)
    logprobs, entropy = _LinearLogprobs.apply(hidden, weight, *rows, chunk, softcap)
    return logprobs, entropy


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    batch: TokenBatch,
    terms: Sequence[Any],
    chunk: int,
    softcap: float,
    leaves_out: bool,
    needed: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the LossSums, and the gradients of hidden [T, H] and weight [V, H] that are needed."""
    has_ratio = kernels.needs_sequence_ratio(batch, terms)
    rows, index, num_left_out = hidden, None, torch.tensor(0)
    if leaves_out:
        *_, kl_coef, entropy_coef = terms
        needs_every_token = bool(kl_coef or entropy_coef)
        read = batch.needed_rows(needs_every_token, has_ratio).nonzero()[:, 0]
        if len(read) < len(hidden):
            index, rows = read, hidden.index_select(0, read)
            num_left_out = batch.loss_mask().sum() - len(read)
            bounds = torch.searchsorted(read, batch.cu_seqlens)
            batch = batch.at(read)._replace(cu_seqlens=bounds)
    if has_ratio:
        inputs = rows, weight, batch.targets, batch.temperature
        logprobs, _ = linear_logprobs(*inputs, chunk, softcap)
        batch = batch.with_sequence_ratio(logprobs)
    chunks = Chunks(rows, weight, chunk, *needed, softcap)
    sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=hidden.device)
    for start, stop, logits in chunks:
        gradient = chunks.gradient(start, stop) if any(needed) else None
        part = batch.at(slice(start, stop))
        sums += kernels.run_loss(logits, gradient, part, terms)
        if gradient is not None:
            chunks.backward(start, stop)
    # frees the chunk before the gradient is rounded
    chunks.buffer = logits = gradient = chunks.buffer.new_empty(0)
    grad_hidden, grad_weight = chunks.gradients()
    if index is not None:
        sums[1:3] += num_left_out  # tokens and dropped_tokens
        if grad_hidden is not None:
            grad_hidden = torch.zeros_like(hidden).index_copy_(0, index, grad_hidden)
    return sums, grad_hidden, grad_weight


def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, chunk: int, softcap: float
) -> tuple[Tensor, Tensor]:
    parts = [
        kernels.token_logprobs(logits, targets[start:stop], temperature[start:stop])
        for start, stop, logits in Chunks(hidden, weight, chunk, False, False, softcap)
    ]
    none = hidden.new_empty(0, dtype=real_dtype(hidden.dtype))
    logprobs, entropy = (torch.cat(column) for column in zip((none, none), *parts, strict=True))
    return logprobs, entropy


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        chunk: int,
        softcap: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, targets, temperature)
        ctx.chunk, ctx.softcap = chunk, softcap
        return linear_logprobs(hidden, weight, targets, temperature, chunk, softcap)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order("linear_token_logprobs")
        hidden, weight, *numbers = ctx.saved_tensors
        numbers += [x.contiguous() for x in grads]
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        chunks = Chunks(hidden, weight, ctx.chunk, needs_hidden, needs_weight, ctx.softcap)
        for start, stop, logits in chunks:
            rows = [x[start:stop] for x in numbers]
            kernels.write_logprobs_gradient(logits, rows, chunks.gradient(start, stop))
            chunks.backward(start, stop)
        return *chunks.gradients(), None, None, None, None
