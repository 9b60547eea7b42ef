"""The token loss and log-probabilities from hidden states and the output matrix: logits exist for one chunk of tokens only."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.ops import token_loss_kernel as kernels
from maxrl_fast.ops._gate import has_kernels
from maxrl_fast.ops.arguments import check_tensor, check_whole
from maxrl_fast.ops.token_batch import LossTerms, TokenBatch, check_rows, prepare
from maxrl_fast.ops.token_loss import loss_and_metrics, with_sequence_ratios
from maxrl_fast.ops.token_loss_kernel import DTYPES, NUM_SUMS, loss_arguments, scaled, split_temperature
from maxrl_fast.ops.token_loss_reference import token_logprobs_reference, token_loss_reference

_CHUNK_BYTES = {"cpu": 1 << 25, "cuda": 1 << 30}  # of logits; products of more rows are no faster
_MIN_CHUNK = 128  # tokens, below which the products are slow


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
    """policy_gradient_loss of the logits hidden @ weight.T, which are never whole in memory.

    Loss and gradients come in one pass over chunks of tokens: the chunk's logits, their gradient in their place, and its
    products with weight and hidden states. Beside the gradients of hidden [T, H] and weight [V, H] float32, memory peaks at
    one chunk of logits (and its float32 copy where a CPU multiplies half precision), whatever T; the gradient of a weight in
    half precision is there in float32, and rounded, at the end. gspo makes two passes, the
    first for its sequences' ratios. Tokens that cannot teach are left out of all products; on a GPU this waits for the
    device once.

    Args:
        hidden: [T, H] float32, bfloat16, float16 or float64; logits have its dtype.
        weight: [V, H], of the same dtype or float32 (a master copy); its gradient adds up in float32. Frozen
            (requires_grad False), it gets none, and none is allocated.
        chunk_tokens: tokens at a time. Default: 32 MiB of logits on a CPU, 1 GiB on a GPU, but at least 128.
        others: of policy_gradient_loss.

    Returns:
        What policy_gradient_loss returns.

    Raises:
        What policy_gradient_loss raises, and ValueError where hidden and weight do not fit each other. The backward pass can
        run only once on a GPU.
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
    # Inside the function it cannot be seen whether gradients are wanted at all.
    sums: Tensor = _LinearLoss.apply(hidden, weight, batch, terms, chunk, torch.is_grad_enabled())
    total, metrics = loss_and_metrics(sums, hidden)
    # The kernel has counted only the rows it was given.
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
    """token_logprobs of the logits hidden @ weight.T, a chunk of tokens at a time.

    Args, Returns, Raises: those of token_logprobs; hidden [T, H], weight [V, H] and chunk_tokens are
    linear_policy_gradient_loss's. The backward pass computes the logits again.
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
    """V, and the tokens of a chunk."""
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
        check_whole("chunk_tokens", chunk_tokens, "at least 1", lambda x: x >= 1)
    row_bytes = max(len(weight) * hidden.element_size(), 1)
    return len(weight), chunk_tokens or max(_CHUNK_BYTES.get(hidden.device.type, 1 << 25) // row_bytes, _MIN_CHUNK)


class _Chunks:
    """Logits of hidden @ weight.T, chunk after chunk in the same memory, and the way back through the product."""

    def __init__(self, hidden: Tensor, weight: Tensor, size: int, needs_hidden: bool, needs_weight: bool):
        self.hidden, self.weight, self.size = hidden, weight.to(hidden.dtype), size
        self.by_hidden = torch.empty_like(hidden) if needs_hidden else None
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.by_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        self.buffer = hidden.new_empty(min(size, len(hidden)), len(weight))

    def __iter__(self) -> Any:
        """(start, stop, logits [stop - start, V])."""
        for start in range(0, len(self.hidden), self.size):
            stop = min(start + self.size, len(self.hidden))
            yield start, stop, torch.mm(self.hidden[start:stop], self.weight.T, out=self.buffer[: stop - start])

    def back(self, start: int, stop: int, gradient: Tensor) -> None:
        """Take the chunk's gradient [stop - start, V]."""
        if self.by_hidden is not None:
            torch.mm(gradient, self.weight, out=self.by_hidden[start:stop])
        if self.by_weight is not None:
            hidden = self.hidden[start:stop]
            if gradient.dtype == self.by_weight.dtype:
                self.by_weight.addmm_(gradient.T, hidden)
            elif gradient.device.type == "cuda" and _adds_half_products(gradient.device, gradient.dtype):
                torch.addmm(self.by_weight, gradient.T, hidden, out_dtype=self.by_weight.dtype, out=self.by_weight)
            elif gradient.device.type == "cuda":
                self.by_weight += torch.mm(gradient.T, hidden, out_dtype=self.by_weight.dtype)
            else:
                self.by_weight.addmm_(gradient.T.to(self.by_weight.dtype), hidden.to(self.by_weight.dtype))


@cache
def _adds_half_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds products of half precision to a float32 matrix where it lies.

    Else they take a matrix [V, H] of their own, and another pass over both. Not every version does: asked for once.
    """
    total, half = torch.ones(16, 16, device=device), torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, half, half, out_dtype=torch.float32, out=total)
    except RuntimeError:  # it wants one dtype
        return False
    return bool((total == 17).all())


class _LinearLoss(torch.autograd.Function):
    """Sums [9] of the loss; the gradients are ready with them."""

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
                sums += kernels.token_loss_(logits, **arguments)
                chunks.back(start, stop, logits)
            else:
                sums += kernels.token_loss(logits, **arguments, needs_gradient=False)[0]
        chunks.buffer = logits = chunks.buffer.new_empty(0)  # free before the gradient is rounded
        by_weight = None if chunks.by_weight is None else chunks.by_weight.to(weight.dtype)
        ctx.save_for_backward(chunks.by_hidden, by_weight)
        ctx.is_spent = False
        return sums

    @staticmethod
    def backward(ctx: Any, *by_sums: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        if ctx.is_spent and by_sums[0].device.type == "cuda":
            raise RuntimeError("backward ran already, and scaled the gradient in place: compute the loss again instead")
        ctx.is_spent = True
        by_loss = by_sums[0][0]
        return *(None if x is None else scaled(x, by_loss) for x in gradients), None, None, None, None


def _logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float | Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, [T] each."""
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
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperatures = ctx.saved_tensors
        temperature = ctx.temperature if temperatures is None else temperatures
        by_logprobs, by_entropy = (slope.contiguous() for slope in slopes)
        chunks = _Chunks(hidden, weight, ctx.chunk, *ctx.needs_input_grad[:2])
        for start, stop, logits in chunks:
            rows = _rows(targets, temperature, start, stop)
            kernels.token_logprobs_backward_(logits, *rows, by_logprobs[start:stop], by_entropy[start:stop])
            chunks.back(start, stop, logits)
        by_weight = None if chunks.by_weight is None else chunks.by_weight.to(weight.dtype)
        return chunks.by_hidden, by_weight, None, None, None
