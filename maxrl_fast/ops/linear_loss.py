"""Policy-gradient losses and log-probabilities from hidden states and the output matrix, one chunk of logits at a time.

The operators behind them have no kernels of their own: they call those of token_loss_kernel.py and multiply matrices. As
operators they are opaque to torch.compile, which could not trace the number of rows that have a gradient.
"""

import math
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.ops import _gate
from maxrl_fast.ops import token_loss_kernel as kernels
from maxrl_fast.ops._gate import has_kernels, operator, register_fake
from maxrl_fast.ops.arguments import check_integer, check_number, check_tensor
from maxrl_fast.ops.derivatives import needs_gradient, register_backward
from maxrl_fast.ops.token_batch import LossTerms, TokenBatch, check_rows, prepare, real_dtype
from maxrl_fast.ops.token_loss import loss_and_metrics, with_sequence_ratios
from maxrl_fast.ops.token_loss_kernel import DTYPES, NUM_SUMS, batch_and_terms, loss_arguments, scaled, split_temperature
from maxrl_fast.ops.token_loss_reference import token_logprobs_reference, token_loss_reference

_CHUNK_BYTES = {"cpu": 1 << 25, "cuda": 5 << 28}  # of logits; larger matrix multiplications are no faster
_MIN_CHUNK = 128  # tokens; smaller matrix multiplications are slow
_TILE = 128, 256  # rows and columns of a product that a multiprocessor computes at a time, in cuBLAS's large kernels
_ROW_MULTIPLE = 64  # elements of a row of logits on a GPU: rows that start at 128 bytes are read 16 bytes at a time


def linear_policy_gradient_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
    *,
    advantages_per_token: bool | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    importance_weights: Tensor | None = None,
    importance_weights_per_token: bool | None = None,
    loss: str = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl: str = "k3",
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    loss_options: Mapping[str, float] | None = None,
    temperature: float | Tensor = 1.0,
    aggregation: str = "token_mean",
    mask: Tensor | None = None,
    denominator: float | Tensor | None = None,
    softcap: float = 0.0,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return policy_gradient_loss of the logits hidden @ weight.T without ever holding all logits in memory.

    The forward pass computes loss and gradients, chunk by chunk: the logits of a chunk, their gradient in the same memory, and
    its matrix multiplications with weight and hidden states. Beside the gradients of hidden [T, H] and of weight [V, H], the
    latter in float32 until the end, it needs memory for one chunk of logits (and its float32 copy where a CPU multiplies half
    precision), for any T. On a GPU the rows of a chunk are padded to a multiple of 64 logits, so that a chunk of C tokens takes
    C ceil(V / 64) 64 numbers. Losses with the ratio of a sequence take two passes, the first for these ratios.

    Tokens with zero gradient are left out of the multiplications. On a GPU this needs a mask, since the host waits for the
    number of these tokens; without a mask no call waits, and all tokens are multiplied.

    Args:
        hidden: [T, H] float32, bfloat16, float16 or float64; logits have its dtype.
        weight: [V, H], of the same dtype or float32 (a master copy). Its gradient is accumulated in float32, and not allocated
            if weight is frozen (requires_grad False).
        softcap: logits z become softcap * tanh(z / softcap), before the temperature (Gemma 2); 0: they stay. A gradient
            through it takes the memory of a second chunk.
        chunk_tokens: tokens per chunk. Default: 32 MiB of logits on a CPU, at most 1.25 GiB on a GPU (there a number of tokens
            that the multiprocessors divide evenly), but at least 128 tokens.
        others: as in policy_gradient_loss.

    Returns:
        What policy_gradient_loss returns.

    Raises:
        What policy_gradient_loss raises, and ValueError if hidden and weight do not fit each other. On a GPU the backward pass
        can run only once.
    """
    size, chunk = _check(hidden, weight, chunk_tokens, softcap)
    batch, terms = prepare(
        hidden.dtype,
        hidden.device,
        (len(hidden), size),
        targets,
        advantages,
        cu_seqlens,
        advantages_per_token=advantages_per_token,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        importance_weights=importance_weights,
        importance_weights_per_token=importance_weights_per_token,
        loss=loss,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        kl=kl,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        loss_options=loss_options,
        temperature=temperature,
        aggregation=aggregation,
        mask=mask,
        denominator=denominator,
    )
    if not has_kernels(hidden.device):
        return loss_and_metrics(token_loss_reference(_logits(hidden, weight, softcap), batch, terms), hidden)
    counted = len(batch) if mask is None else mask.sum()
    needed = needs_gradient(hidden), needs_gradient(weight)
    sums, *_ = linear_loss(hidden, weight, *loss_arguments(batch, terms), chunk, softcap, *needed)
    total, metrics = loss_and_metrics(sums, hidden)
    # The kernel has counted only the rows that it was given.
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

    Arguments and results are as in token_logprobs; hidden [T, H], weight [V, H], softcap and chunk_tokens are as in
    linear_policy_gradient_loss. The backward pass computes the logits again.
    """
    size, chunk = _check(hidden, weight, chunk_tokens, softcap)
    check_rows((len(hidden), size), targets, temperature, hidden.device)
    targets = targets.long().contiguous()
    if not has_kernels(hidden.device):
        return token_logprobs_reference(_logits(hidden, weight, softcap), targets, temperature)
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().to(real_dtype(hidden.dtype)).contiguous()
    logprobs, entropy = linear_logprobs(hidden, weight, targets, *split_temperature(temperature), chunk, softcap)
    return logprobs, entropy


def _logits(hidden: Tensor, weight: Tensor, softcap: float) -> Tensor:
    logits = hidden @ weight.to(hidden.dtype).T
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def _check(hidden: Tensor, weight: Tensor, chunk_tokens: int | None, softcap: float) -> tuple[int, int]:
    """Return V and the given number of tokens in a chunk, or 0; raise ValueError if hidden and weight do not fit."""
    check_number("softcap", softcap, "finite and at least 0", lambda x: 0 <= x < math.inf)
    for name, matrix in (("hidden", hidden), ("weight", weight)):
        check_tensor(name, matrix)
    if hidden.dtype not in DTYPES:
        raise ValueError(f"hidden must be {', '.join(DTYPES.values())}, got {hidden.dtype}")
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or hidden.device != weight.device:
        raise ValueError(
            f"hidden [T, H] and weight [V, H] must have one H and device, got {tuple(hidden.shape)} on {hidden.device} and "
            f"{tuple(weight.shape)} on {weight.device}"
        )
    if weight.dtype not in (hidden.dtype, torch.float32):
        raise ValueError(f"weight must be {hidden.dtype} as hidden is, or float32, got {weight.dtype}")
    if chunk_tokens is not None:
        check_integer("chunk_tokens", chunk_tokens, "at least 1", lambda x: x >= 1)
        chunk_tokens = min(chunk_tokens, torch.iinfo(torch.int64).max)
    return len(weight), chunk_tokens or 0


def row_stride(vocab_size: int, device: torch.device) -> int:
    """Return the distance between rows of logits, in elements."""
    multiple = _ROW_MULTIPLE if _gate.is_gpu(device) else 1
    return -(-vocab_size // multiple) * multiple


def default_chunk(hidden: Tensor, vocab_size: int) -> int:
    """Return the number of tokens in a chunk of the logits [T, V] of `hidden` [T, H]."""
    device = hidden.device
    row_bytes = max(row_stride(vocab_size, device) * hidden.element_size(), 1)
    most = max(_CHUNK_BYTES.get(device.type, 1 << 25) // row_bytes, _MIN_CHUNK)
    if device.type != "cuda":
        return most
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return chunk_tokens(len(hidden), most, hidden.shape[1], multiprocessors)


@lru_cache(maxsize=256)
def chunk_tokens(num_tokens: int, most: int, hidden_size: int, multiprocessors: int) -> int:
    """Return how many tokens, at most `most`, to multiply at a time, so that the multiprocessors are idle least.

    The gradient in the hidden states of a chunk [C, H] has few tiles, and its last wave of tiles takes as long as a full one,
    so the result is the multiple of 128 with the fewest waves over all tokens, the largest of these. The other two products
    have V / 256 times H / 256 or C / 128 tiles: their last wave hardly counts. For example, 4224 tokens at H = 4096 are 33 x 16
    tiles of 128 x 256, four waves of 132 multiprocessors.
    """
    if num_tokens <= most:
        return max(num_tokens, 1)
    rows, columns = _TILE
    width = -(-hidden_size // columns)

    def waves(tokens: int) -> int:
        return -(-(-(-tokens // rows) * width) // multiprocessors)

    def total(size: int) -> int:
        full, rest = divmod(num_tokens, size)
        return full * waves(size) + waves(rest)

    largest = most // rows * rows
    return min(range(largest, largest // 2, -rows), key=total)


class _Chunks:
    """The logits hidden @ weight.T, one chunk after the other in the same memory, and the backward pass of the product."""

    def __init__(self, hidden: Tensor, weight: Tensor, size: int, needs_hidden: bool, needs_weight: bool, softcap: float = 0.0):
        self.hidden, self.weight, self.dtype = hidden, weight.to(hidden.dtype), weight.dtype
        self.size = size or default_chunk(hidden, len(weight))
        self.grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        # On a GPU the first product overwrites the gradient in the weight, which saves two passes over it.
        overwrites = _gate.is_gpu(hidden.device) and len(hidden) > 0
        make = torch.empty_like if overwrites else torch.zeros_like
        self.grad_weight, self.beta = make(weight, dtype=dtype) if needs_weight else None, 0 if overwrites else 1
        stride = row_stride(len(weight), hidden.device)
        self.buffer = hidden.new_empty(min(self.size, len(hidden)), stride)[:, : len(weight)]
        self.softcap = softcap
        self.slope = torch.empty_like(self.buffer) if softcap and (needs_hidden or needs_weight) else None

    def __iter__(self) -> Any:
        """Yield (start, stop, logits [stop - start, V])."""
        for start in range(0, len(self.hidden), self.size):
            stop = min(start + self.size, len(self.hidden))
            logits = torch.mm(self.hidden[start:stop], self.weight.T, out=self.buffer[: stop - start])
            if self.softcap:
                bounded = logits.div_(self.softcap).tanh_()
                if self.slope is not None:
                    torch.square(bounded, out=self.slope[: stop - start]).neg_().add_(1)  # d tanh(x) / dx
                bounded.mul_(self.softcap)
            yield start, stop, logits

    def backward(self, start: int, stop: int, gradient: Tensor) -> None:
        """Add the gradient in the logits of a chunk [stop - start, V] to the gradients in hidden and weight."""
        if self.slope is not None:
            gradient = gradient.mul_(self.slope[: stop - start])
        if self.grad_hidden is not None:
            torch.mm(gradient, self.weight, out=self.grad_hidden[start:stop])
        if self.grad_weight is not None:
            self.grad_weight = self._added(self.grad_weight, gradient, self.hidden[start:stop])

    def _added(self, total: Tensor, gradient: Tensor, hidden: Tensor) -> Tensor:
        """Return total [V, H] + gradient.T @ hidden, in the memory of `total` where torch can do so."""
        beta, self.beta = self.beta, 1
        if gradient.dtype == total.dtype:
            return total.addmm_(gradient.T, hidden, beta=beta)
        if gradient.device.type != "cuda":
            return total.addmm_(gradient.T.to(total.dtype), hidden.to(total.dtype), beta=beta)
        if _adds_half_products(gradient.device, gradient.dtype):
            return torch.addmm(total, gradient.T, hidden, beta=beta, out_dtype=total.dtype, out=total)
        product = torch.mm(gradient.T, hidden, out_dtype=total.dtype)
        return total.add_(product) if beta else product

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients in hidden and weight, of their dtypes; [0] where they are not needed."""
        hidden, weight = self.grad_hidden, self.grad_weight
        return (
            self.hidden.new_empty(0) if hidden is None else hidden,
            self.hidden.new_empty(0, dtype=self.dtype) if weight is None else weight.to(self.dtype),
        )


@cache
def _adds_half_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this version of torch can add a product of half-precision matrices to a float32 matrix in place.

    Otherwise the product needs a matrix [V, H] of its own, and another pass over both.
    """
    total, half = torch.ones(16, 16, device=device), torch.ones(16, 16, device=device, dtype=dtype)
    unwritten = torch.full_like(total, torch.nan)
    try:
        torch.addmm(total, half, half, out_dtype=torch.float32, out=total)
        torch.addmm(unwritten, half, half, beta=0, out_dtype=torch.float32, out=unwritten)
    except RuntimeError:  # this version requires equal dtypes
        return False
    return bool((total == 17).all() & (unwritten == 16).all())


@operator(
    schema=f"(Tensor hidden, Tensor weight, {kernels.LOSS_SCHEMA}, SymInt chunk, float softcap, bool needs_hidden, "
    "bool needs_weight) -> (Tensor, Tensor, Tensor)"
)
def linear_loss(hidden: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the LossSums, and the gradients in hidden [T, H] and weight [V, H], or [0] where they are not needed.

    The arguments behind the weight are those of token_loss, the tokens in a chunk, the soft cap, and which gradients to give.
    """
    *loss, chunk, softcap, needs_hidden, needs_weight = arguments
    batch, terms = batch_and_terms(loss)
    index, rows = _needed_index(batch, terms), hidden
    if index is not None:
        rows, batch = hidden.index_select(0, index), batch.take(index)
    if terms.by_sequence and batch.old_logprobs is not None:
        logprobs, _ = _logprobs(rows, weight, batch.targets, batch.temperature, chunk, softcap)
        batch = with_sequence_ratios(batch, terms, logprobs)
    chunks = _Chunks(rows, weight, chunk, needs_hidden, needs_weight, softcap)
    sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=hidden.device)
    for start, stop, logits in chunks:
        part = loss_arguments(batch.rows(start, stop), terms)
        if needs_hidden or needs_weight:
            sums += kernels.token_loss_(logits, *part)
            chunks.backward(start, stop, logits)
        else:
            sums += kernels.token_loss(logits, *part, False)[0]
    chunks.buffer = logits = chunks.buffer.new_empty(0)  # frees the memory before the gradient is rounded
    grad_hidden, grad_weight = chunks.gradients()
    if needs_hidden and index is not None:
        grad_hidden = torch.zeros_like(hidden).index_copy_(0, index, grad_hidden)
    return sums, grad_hidden, grad_weight


def _needed_index(batch: TokenBatch, terms: LossTerms) -> Tensor | None:
    """Return which tokens the loss reads, int64; None for all. Without a mask nothing on a GPU is read back by the host."""
    if _gate.is_gpu(batch.targets.device) and batch.mask is None:
        return None
    index = batch.needed_rows(terms).nonzero()[:, 0]
    return index if len(index) < len(batch) else None


@register_fake(linear_loss)
def _(hidden: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return hidden.new_empty(NUM_SUMS, dtype=torch.float64), *_empty_gradients(hidden, weight, *arguments[-2:])


def _empty_gradients(hidden: Tensor, weight: Tensor, needs_hidden: bool, needs_weight: bool) -> tuple[Tensor, Tensor]:
    needed = ((hidden, needs_hidden), (weight, needs_weight))
    grad_hidden, grad_weight = (torch.empty_like(x) if is_needed else x.new_empty(0) for x, is_needed in needed)
    return grad_hidden, grad_weight


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else autograd makes zeros like the gradients
    ctx.save_for_backward(*output[1:])
    ctx.needed, ctx.is_spent = inputs[-2:], False


def _linear_loss_backward(ctx: Any, grad_sums: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    gradients = ctx.saved_tensors
    if grad_sums is None:
        return None, None
    if ctx.is_spent and grad_sums.device.type == "cuda":
        raise RuntimeError("backward ran already, and scaled the gradient in place: compute the loss again instead")
    ctx.is_spent = True
    return tuple(scaled(x, grad_sums[0]) if is_needed else None for x, is_needed in zip(gradients, ctx.needed, strict=True))


register_backward(linear_loss, "linear_policy_gradient_loss", _linear_loss_backward, save=_save_gradients, num_inputs=2)


def _logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float | Tensor, chunk: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies, [T] each."""
    parts = [
        kernels.token_logprobs(logits, *_rows(targets, temperature, start, stop))
        for start, stop, logits in _Chunks(hidden, weight, chunk, False, False, softcap)
    ]
    none = hidden.new_empty(0, dtype=real_dtype(hidden.dtype))
    return tuple(torch.cat([none, *(part[i] for part in parts)]) for i in range(2))  # type: ignore[return-value]


def _rows(targets: Tensor, temperature: float | Tensor, start: int, stop: int) -> tuple[Any, ...]:
    chosen = temperature[start:stop] if isinstance(temperature, Tensor) else temperature
    return targets[start:stop], *split_temperature(chosen)


@operator()
def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor | None, temperature: float, chunk: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the targets [T], and the entropies [T]."""
    return _logprobs(hidden, weight, targets, temperature if temperatures is None else temperatures, chunk, softcap)


@register_fake(linear_logprobs)
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor | None, temperature: float, chunk: int, softcap: float
) -> tuple[Tensor, Tensor]:
    shape, dtype = hidden.shape[:1], real_dtype(hidden.dtype)
    return hidden.new_empty(shape, dtype=dtype), hidden.new_empty(shape, dtype=dtype)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.temperature, ctx.chunk, ctx.softcap = inputs
    ctx.save_for_backward(*tensors)


def _linear_logprobs_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad[:2]
    contiguous = (grad.contiguous() for grad in grads)
    gradients = linear_logprobs_backward(*ctx.saved_tensors, ctx.temperature, *contiguous, ctx.chunk, ctx.softcap, *needed)
    return tuple(gradient if is_needed else None for gradient, is_needed in zip(gradients, needed, strict=True))


register_backward(linear_logprobs, "linear_token_logprobs", _linear_logprobs_backward, save=_save_inputs, num_inputs=2)


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
    """Return the gradients in hidden [T, H] and weight [V, H], or [0] where they are not needed."""
    chunks = _Chunks(hidden, weight, chunk, needs_hidden, needs_weight, softcap)
    for start, stop, logits in chunks:
        rows = _rows(targets, temperature if temperatures is None else temperatures, start, stop)
        kernels.token_logprobs_backward_(logits, *rows, grad_logprobs[start:stop], grad_entropy[start:stop])
        chunks.backward(start, stop, logits)
    return chunks.gradients()


@register_fake(linear_logprobs_backward)
def _(
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
    return _empty_gradients(hidden, weight, needs_hidden, needs_weight)
