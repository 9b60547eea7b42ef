"""Policy-gradient losses and log-probabilities from hidden states and the output matrix, one chunk of logits at a time."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.ops import token_loss_kernel as kernels
from maxrl_fast.ops._gate import has_kernels
from maxrl_fast.ops.arguments import check_integer, check_tensor
from maxrl_fast.ops.token_batch import LossTerms, TokenBatch, check_rows, prepare
from maxrl_fast.ops.token_loss import loss_and_metrics, with_sequence_ratios
from maxrl_fast.ops.token_loss_kernel import DTYPES, NUM_SUMS, loss_arguments, scaled, split_temperature
from maxrl_fast.ops.token_loss_reference import token_logprobs_reference, token_loss_reference

_CHUNK_BYTES = {"cpu": 1 << 25, "cuda": 1 << 30}  # of logits; larger matrix multiplications are no faster
_MIN_CHUNK = 128  # tokens; smaller matrix multiplications are slow


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
    temperature: float | Tensor = 1.0,
    aggregation: str = "token_mean",
    mask: Tensor | None = None,
    denominator: float | Tensor | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return policy_gradient_loss of the logits hidden @ weight.T without ever holding all logits in memory.

    The forward pass computes loss and gradients, chunk by chunk: the logits of a chunk, their gradient in the same memory, and
    its matrix multiplications with weight and hidden states. Beside the gradients of hidden [T, H] and of weight [V, H], the
    latter in float32 until the end, it needs memory for one chunk of logits (and its float32 copy where a CPU multiplies half
    precision), for any T. gspo takes two passes, the first for the ratios of its sequences. Tokens with zero gradient are left
    out of the multiplications; on a GPU, finding them waits for the device once.

    Args:
        hidden: [T, H] float32, bfloat16, float16 or float64; logits have its dtype.
        weight: [V, H], of the same dtype or float32 (a master copy). Its gradient is accumulated in float32, and not allocated
            if weight is frozen (requires_grad False).
        chunk_tokens: tokens per chunk. Default: 32 MiB of logits on a CPU, 1 GiB on a GPU, but at least 128 tokens.
        others: as in policy_gradient_loss.

    Returns:
        What policy_gradient_loss returns.

    Raises:
        What policy_gradient_loss raises, and ValueError if hidden and weight do not fit each other. On a GPU the backward pass
        can run only once.
    """
    size, chunk = _check(hidden, weight, chunk_tokens)
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
        temperature=temperature,
        aggregation=aggregation,
        mask=mask,
        denominator=denominator,
    )
    if not has_kernels(hidden.device):
        return loss_and_metrics(token_loss_reference(hidden @ weight.to(hidden.dtype).T, batch, terms), hidden)
    index = batch.needed_rows(terms).nonzero()[:, 0]
    counted = torch.full((), len(batch), device=hidden.device) if mask is None else mask.sum()
    if len(index) < len(batch):
        hidden, batch = hidden.index_select(0, index), batch.take(index)
    if terms.loss == "gspo" and batch.old_logprobs is not None:
        logprobs, _ = _logprobs(hidden.detach(), weight.detach(), batch.targets, batch.temperature, chunk)
        batch = with_sequence_ratios(batch, logprobs)
    # Inside the autograd function gradients are always disabled, so that it must be told.
    sums: Tensor = _LinearLoss.apply(hidden, weight, batch, terms, chunk, torch.is_grad_enabled())
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
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return token_logprobs of the logits hidden @ weight.T, one chunk of tokens at a time.

    Arguments and results are as in token_logprobs; hidden [T, H], weight [V, H] and chunk_tokens are as in
    linear_policy_gradient_loss. The backward pass computes the logits again.
    """
    size, chunk = _check(hidden, weight, chunk_tokens)
    check_rows((len(hidden), size), targets, temperature, hidden.device)
    targets = targets.long().contiguous()
    if not has_kernels(hidden.device):
        return token_logprobs_reference(hidden @ weight.to(hidden.dtype).T, targets, temperature)
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().to(torch.promote_types(hidden.dtype, torch.float32)).contiguous()
    logprobs, entropy = _LinearLogprobs.apply(hidden, weight, targets, temperature, chunk)
    return logprobs, entropy


def _check(hidden: Tensor, weight: Tensor, chunk_tokens: int | None) -> tuple[int, int]:
    """Return V and the number of tokens in a chunk; raise ValueError if hidden and weight do not fit."""
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
    row_bytes = max(len(weight) * hidden.element_size(), 1)
    return len(weight), chunk_tokens or max(_CHUNK_BYTES.get(hidden.device.type, 1 << 25) // row_bytes, _MIN_CHUNK)


class _Chunks:
    """The logits hidden @ weight.T, one chunk after the other in the same memory, and the backward pass of the product."""

    def __init__(self, hidden: Tensor, weight: Tensor, size: int, needs_hidden: bool, needs_weight: bool):
        self.hidden, self.weight, self.size = hidden, weight.to(hidden.dtype), size
        self.grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.grad_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        self.buffer = hidden.new_empty(min(size, len(hidden)), len(weight))

    def __iter__(self) -> Any:
        """Yield (start, stop, logits [stop - start, V])."""
        for start in range(0, len(self.hidden), self.size):
            stop = min(start + self.size, len(self.hidden))
            yield start, stop, torch.mm(self.hidden[start:stop], self.weight.T, out=self.buffer[: stop - start])

    def backward(self, start: int, stop: int, gradient: Tensor) -> None:
        """Add the gradient in the logits of a chunk [stop - start, V] to the gradients in hidden and weight."""
        if self.grad_hidden is not None:
            torch.mm(gradient, self.weight, out=self.grad_hidden[start:stop])
        if self.grad_weight is not None:
            hidden = self.hidden[start:stop]
            if gradient.dtype == self.grad_weight.dtype:
                self.grad_weight.addmm_(gradient.T, hidden)
            elif gradient.device.type == "cuda" and _adds_half_products(gradient.device, gradient.dtype):
                torch.addmm(self.grad_weight, gradient.T, hidden, out_dtype=self.grad_weight.dtype, out=self.grad_weight)
            elif gradient.device.type == "cuda":
                self.grad_weight += torch.mm(gradient.T, hidden, out_dtype=self.grad_weight.dtype)
            else:
                self.grad_weight.addmm_(gradient.T.to(self.grad_weight.dtype), hidden.to(self.grad_weight.dtype))


@cache
def _adds_half_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this version of torch can add a product of half-precision matrices to a float32 matrix in place.

    Otherwise the product needs a matrix [V, H] of its own, and another pass over both.
    """
    total, half = torch.ones(16, 16, device=device), torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, half, half, out_dtype=torch.float32, out=total)
    except RuntimeError:  # this version requires equal dtypes
        return False
    return bool((total == 17).all())


class _LinearLoss(torch.autograd.Function):
    """Returns the LossSums [10]; the forward pass computes the gradients too."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, batch: TokenBatch, terms: LossTerms, chunk: int, is_training: bool
    ) -> Tensor:
        needs_hidden, needs_weight = (is_training and needed for needed in ctx.needs_input_grad[:2])
        chunks = _Chunks(hidden, weight, chunk, needs_hidden, needs_weight)
        sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=hidden.device)
        for start, stop, logits in chunks:
            arguments = loss_arguments(batch.rows(start, stop), terms)
            if needs_hidden or needs_weight:
                sums += kernels.token_loss_(logits, *arguments)
                chunks.backward(start, stop, logits)
            else:
                sums += kernels.token_loss(logits, *arguments, False)[0]
        chunks.buffer = logits = chunks.buffer.new_empty(0)  # frees the memory before the gradient is rounded
        grad_weight = None if chunks.grad_weight is None else chunks.grad_weight.to(weight.dtype)
        ctx.save_for_backward(chunks.grad_hidden, grad_weight)
        ctx.is_spent = False
        return sums

    @staticmethod
    def backward(ctx: Any, *grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        if ctx.is_spent and grad_sums[0].device.type == "cuda":
            raise RuntimeError("backward ran already, and scaled the gradient in place: compute the loss again instead")
        ctx.is_spent = True
        grad_loss = grad_sums[0][0]
        return *(None if x is None else scaled(x, grad_loss) for x in gradients), None, None, None, None


def _logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float | Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies, [T] each."""
    parts = [
        kernels.token_logprobs(logits, *_rows(targets, temperature, start, stop))
        for start, stop, logits in _Chunks(hidden, weight, chunk, False, False)
    ]
    none = hidden.new_empty(0, dtype=torch.promote_types(hidden.dtype, torch.float32))
    return tuple(torch.cat([none, *(part[i] for part in parts)]) for i in range(2))  # type: ignore[return-value]


def _rows(targets: Tensor, temperature: float | Tensor, start: int, stop: int) -> tuple[Any, ...]:
    chosen = temperature[start:stop] if isinstance(temperature, Tensor) else temperature
    return targets[start:stop], *split_temperature(chosen)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float | Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, targets, temperature if isinstance(temperature, Tensor) else None)
        ctx.temperature, ctx.chunk = temperature, chunk
        return _logprobs(hidden, weight, targets, temperature, chunk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperatures = ctx.saved_tensors
        temperature = ctx.temperature if temperatures is None else temperatures
        grad_logprobs, grad_entropy = (grad.contiguous() for grad in grads)
        chunks = _Chunks(hidden, weight, ctx.chunk, *ctx.needs_input_grad[:2])
        for start, stop, logits in chunks:
            rows = _rows(targets, temperature, start, stop)
            kernels.token_logprobs_backward_(logits, *rows, grad_logprobs[start:stop], grad_entropy[start:stop])
            chunks.backward(start, stop, logits)
        grad_weight = None if chunks.grad_weight is None else chunks.grad_weight.to(weight.dtype)
        return chunks.grad_hidden, grad_weight, None, None, None
