"""Policy-gradient losses of packed responses, and log-probs: from logits, and from hidden states
and the output matrix, one chunk of logits at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from maxrl_fast import _C
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.dispatch import KernelLaunch, check_first_order, eager, has_kernels
from maxrl_fast.ops.logit_chunks import (
    Chunks,
    by_chunks,
    by_function,
    capped_logits,
    check_hidden,
    loss_of_logits,
    scaled,
    token_logprobs_reference,
    tokens_of,
)
from maxrl_fast.ops.loss_kernel import (
    NUM_SUMS,
    LossInputs,
    LossSums,
    LossTerms,
    TokenRows,
    real_dtype,
    shape_of,
    terms_of,
)

_NAMES = LossSums._fields[1:]  # two counts, then means over the tokens with a gradient


class Metrics(Mapping[str, Tensor]):
    """The metrics of LossSums [10] or more: made when one is read. Detached float64 scalars."""

    _values: Mapping[str, Tensor] = {}

    def __init__(self, sums: Tensor):
        self.sums = sums

    def __getitem__(self, name: str) -> Tensor:
        if not self._values:
            tokens, dropped, *_ = counts = self.sums[1:3].unbind()
            means = self.sums[3:NUM_SUMS] / (tokens - dropped).clamp_min(1)  # one launch for all
            self._values = dict(zip(_NAMES, (*counts, *means.unbind()), strict=True))
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


@eager
def token_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Return each target's log-prob and each row's entropy under softmax(logits / temperature), [T]
    each, float32 (float64 for float64 logits), differentiable once.

    Args:
        logits: [T, V] float32, bfloat16, float16 or float64.
        targets: [T] integers below V.
        temperature: a number, or [T].
    """
    rows = TokenRows(shape_of(logits), logits.device, targets, temperature, None)
    if not has_kernels(logits.device):
        rows.check()
        return token_logprobs_reference(logits, rows.targets, rows.temperatures())
    logits = logits.float() if logits.dtype is torch.float16 else logits
    logprobs, entropy = TokenLogprobs.apply(logits, rows)
    return logprobs, entropy


@eager
def policy_gradient_loss(
    logits: Tensor,
    targets: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
    *,
    advantages_per_token: bool | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    importance_weights: Tensor | None = None,
    importance_weights_per_token: bool | None = None,
    loss: str | Callable[..., Tensor] = "ppo",
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
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the policy-gradient loss of packed responses, and metrics: docs/token_loss.md.

    Args:
        logits: [T, V] float32, bfloat16, float16 or float64, with any row stride, computed in
            float32 (float64 for float64).
        targets: [T] integers.
        advantages, importance_weights: [S] or [T]; weights, at least 0, are factors of the policy
            gradient. advantages_per_token, importance_weights_per_token: whether they are [T], if
            T = S. Default: their length decides.
        cu_seqlens: [S+1] integers, from 0 to T.
        old_logprobs, ref_logprobs: [T] of the sampling policy (absent: the ratio is 1, with logp's
            gradient), and of the reference policy, required if kl_coef is not 0.
        loss, loss_options: a name in `ops.LOSSES` or a function of `ops.Tokens`; its options.
        kl: an estimator, "k1", "k2", "k3" (Schulman 2020), or "k3+", k3 with k2's gradient.
        temperature: a number, or [T].
        aggregation: "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", or
            "seq_sum_constant", which needs `denominator`.
        mask: [T] bool, False for tokens to leave out, which are not read.
        denominator: the number, or [], that divides the sum. Default: that of this call's tokens or
            responses.

    Returns the loss, a float32 scalar (float64 for float64 logits), and detached float64 scalars on
    the device: tokens, those not masked; dropped_tokens, those with zero gradient; and means over
    the others, 0 over none: ratio, ratio_clamped, clipped_low, clipped_high, kl, entropy,
    logprob_diff (|logp - old|).
    """
    numbers = clip_low, clip_high, dual_clip, kl, kl_coef, entropy_coef, loss_options
    inputs = LossInputs(
        *(shape_of(logits), logits.device, targets, temperature, mask),
        *(terms_of(loss, aggregation, *numbers), advantages, cu_seqlens, advantages_per_token),
        *(old_logprobs, ref_logprobs, importance_weights, importance_weights_per_token),
        denominator,
    )
    if not has_kernels(logits.device) or not inputs.terms.spec.fused:
        sums = _of_logits(logits, inputs)
        return sums[0].to(real_dtype(logits.dtype)), Metrics(sums.detach())
    rows = logits.float() if logits.dtype is torch.float16 else logits
    (sums, total), gradient = _new_results(rows), None
    if rows.requires_grad and torch.is_grad_enabled():
        gradient = torch.empty_like(rows, memory_format=torch.contiguous_format)
    inputs.run("token_loss", rows, 0, None, sums, total, gradient=gradient)
    return _TokenLoss.apply(rows, (total, gradient)), Metrics(sums)


_SCALARS = {torch.float32: torch.empty(()), torch.float64: torch.empty((), dtype=torch.float64)}
_SUMS = torch.empty(NUM_SUMS, dtype=torch.float64)


def _new_results(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for LossSums [10], the first of what a kernel needs, and for a loss []."""
    real = real_dtype(logits.dtype)
    if not dispatch.is_gpu(logits.device):
        return torch.empty_like(_SUMS), torch.empty_like(_SCALARS[real])  # the fastest way
    make = logits.new_empty if len(logits) else logits.new_zeros  # no row, no launch
    sums = torch.zeros(_C.LOSS_WORKSPACE, dtype=torch.float64, device=logits.device)
    return sums, make((), dtype=real)


def _of_logits(logits: Tensor, inputs: LossInputs) -> Tensor:
    """Return the LossSums of a loss that is a function."""
    inputs.check()
    tokens, tau = tokens_of(inputs), inputs.temperatures()
    if not has_kernels(logits.device) or inputs.terms.spec.reads_logits:
        # masked logits may be NaN, and so their gradient
        logits = torch.where(tokens.mask[:, None], logits, 0.0)
    return by_function(
        *(inputs, tokens),
        lambda: token_logprobs(logits, tokens.targets, temperature=tau),
        lambda: loss_of_logits(inputs, tokens, slice(0, len(logits)), scaled(logits, tau)),
    )


class LossFunction(torch.autograd.Function):
    """A loss that saves its gradients in its forward pass; the backward pass scales them. Inputs
    that come after those of the gradients have none."""

    name: str  # of the public function, for messages

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order(ctx._forward_cls.name)
        if hasattr(ctx, "is_spent") and scale.device.type == "cuda":
            raise RuntimeError(
                "backward ran already and scaled the gradient in place: compute the loss again"
            )
        ctx.is_spent = True
        gradients = [None if x is None else _times(x, scale) for x in ctx.saved_tensors]
        return *gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients))


def _times(gradient: Tensor, scale: Tensor) -> Tensor:
    """Return gradient times scale []. If scale is 1, as nearly always, the gradient is not read.
    On a GPU the gradient is changed in place, so that the host does not wait for the scale."""
    if dispatch.is_gpu(gradient.device) and has_kernels(gradient.device):
        call, (num_rows, row_size) = KernelLaunch(gradient.device), gradient.shape
        call.launch(
            "scale",
            dtype=gradient.dtype,
            matrix=call.matrix("gradient", gradient),
            num_rows=num_rows,
            row_size=row_size,
            scale=scale.double().contiguous(),
        )
        return gradient
    return gradient if scale.item() == 1 else gradient * scale.to(gradient.dtype)


class _TokenLoss(LossFunction):
    """Hands out a loss [] and its gradient, which are known already."""

    name = "policy_gradient_loss"

    @staticmethod
    def forward(ctx: Any, logits: Tensor, known: tuple[Tensor, Tensor | None]) -> Tensor:
        ctx.save_for_backward(known[1])
        return known[0]


class TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: TokenRows) -> tuple[Tensor, Tensor]:
        values = new_logprobs(logits)
        rows.run("token_logprobs", logits, 0, None, *values)
        rows.save(ctx, logits)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order("token_logprobs")
        logits, *_ = ctx.saved_tensors
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
        write_logprobs_gradient(ctx.rows, logits, grads, gradient)
        return gradient, None


def new_logprobs(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for log-probs and entropies [T] of logits or hidden states."""
    logprobs = like.new_empty(len(like), dtype=real_dtype(like.dtype))
    return logprobs, torch.empty_like(logprobs)


def write_logprobs_gradient(
    rows: TokenRows, logits: Tensor, grads: Sequence[Tensor], gradient: Tensor, first: int = 0
) -> None:
    """Write the gradient of the logits [C, V], which may be their memory, from those of the
    log-probs and the entropies [T]."""
    logprobs, entropy = (x[first : first + len(logits)].contiguous() for x in grads)
    given = "token_logprobs_backward", logits, first, None, logprobs, entropy
    rows.run(*given, gradient=gradient)


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
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return policy_gradient_loss of the logits hidden @ weight.T, one chunk of tokens at a time:
    docs/token_loss.md. Losses that are functions take two passes.

    Args:
        hidden: [T, H] float32, bfloat16, float16 or float64; logits have its dtype, on a GPU at
            least float32.
        weight: [V, H], of the same dtype or float32 (a master copy). If it is frozen (requires_grad
            False) its gradient is not allocated.
        softcap: logits z become softcap * tanh(z / softcap), before the temperature (Gemma 2); 0:
            unchanged. A gradient through it takes the memory of a second chunk.
        chunk_tokens: tokens per chunk, by default as the page says, but at least 128.
        options: further arguments of policy_gradient_loss.
    """
    size, chunk = check_hidden(hidden, weight, chunk_tokens, softcap)
    of_terms = {x: options.pop(x) for x in LossTerms.__dataclass_fields__ if x in options}
    of_rows = targets, options.pop("temperature", 1.0), options.pop("mask", None)
    given = *of_rows, LossTerms(**of_terms), advantages, cu_seqlens
    inputs = LossInputs((len(hidden), size), hidden.device, *given, **options)
    loss, sums = loss_of_hidden(hidden, weight, inputs, softcap, chunk)
    return loss, Metrics(sums)


def loss_of_hidden(
    hidden: Tensor,
    weight: Tensor,
    inputs: LossInputs,
    softcap: float = 0.0,
    chunk: int = 0,
    importance_weights: Tensor | None = None,
    statistics: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return linear_policy_gradient_loss of checked arguments, and the LossSums [10], detached.
    chunk: tokens; 0: the default. importance_weights, statistics: [T, ...], of Tokens, for losses
    that read them."""
    inputs.check()
    if has_kernels(hidden.device) and inputs.terms.spec.fused:
        if hidden.dtype is torch.float16:
            hidden, weight = hidden.float(), weight.float()
        is_enabled = torch.is_grad_enabled()
        needed = is_enabled and hidden.requires_grad, is_enabled and weight.requires_grad
        sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=hidden.device)
        return _LinearLoss.apply(hidden, weight, inputs, sums, chunk, softcap, needed), sums
    tokens, tau = tokens_of(inputs), inputs.temperatures()
    tokens.statistics = statistics
    if importance_weights is not None:
        tokens.importance_weights = importance_weights.double()
    hidden = torch.where(tokens.mask[:, None], hidden, 0.0)  # masked states may be NaN

    def logprobs() -> tuple[Tensor, Tensor]:
        options: Any = {"temperature": tau, "softcap": softcap, "chunk_tokens": chunk or None}
        return linear_token_logprobs(hidden, weight, tokens.targets, **options)

    def of_logits() -> Tensor:
        of_part = partial(loss_of_logits, inputs, tokens)
        return torch.stack(by_chunks(hidden, weight, of_part, tau, softcap)).sum(0)

    sums = by_function(inputs, tokens, logprobs, of_logits)
    return sums[0].to(real_dtype(hidden.dtype)), sums.detach()


class _LinearLoss(LossFunction):
    name = "linear_policy_gradient_loss"

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        inputs: LossInputs,
        total: Tensor,
        chunk: int,
        softcap: float,
        needed: tuple[bool, bool],
    ) -> Tensor:
        rows, index, mask = hidden, None, inputs.mask
        # On a GPU the host waits for the number of rows that are left out.
        if mask is not None or not dispatch.is_gpu(hidden.device):
            read = inputs.needed_rows().nonzero()[:, 0]
            if len(read) < len(hidden):
                index, rows = read, hidden.index_select(0, read)
                # tokens and dropped_tokens
                total[1:3] += (len(hidden) if mask is None else mask.sum()) - len(read)
        chunks = Chunks(rows, weight, chunk, softcap, needed)
        for start, stop, logits in chunks:
            gradient = chunks.gradient(start, stop) if any(needed) else None
            sums, _ = _new_results(logits)
            inputs.run("token_loss", logits, start, index, sums, None, gradient=gradient)
            total += sums[:NUM_SUMS]
            if gradient is not None:
                chunks.backward(start, stop)
        # frees the chunk before the gradient is rounded
        chunks.buffer = logits = gradient = chunks.buffer.new_empty(0)
        grad_hidden, grad_weight = chunks.gradients()
        if index is not None and grad_hidden is not None:
            grad_hidden = torch.zeros_like(hidden).index_copy_(0, index, grad_hidden)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total[0].to(real_dtype(hidden.dtype))


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
    rows = TokenRows((len(hidden), size), hidden.device, targets, temperature, None)
    rows.check()
    if not has_kernels(hidden.device):
        logits = capped_logits(hidden, weight, softcap)
        return token_logprobs_reference(logits, rows.targets, rows.temperatures())
    if hidden.dtype is torch.float16:
        hidden, weight = hidden.float(), weight.float()
    logprobs, entropy = _LinearLogprobs.apply(hidden, weight, rows, chunk, softcap)
    return logprobs, entropy


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, rows: TokenRows, chunk: int, softcap: float
    ) -> tuple[Tensor, Tensor]:
        rows.save(ctx, hidden, weight)
        ctx.chunk, ctx.softcap = chunk, softcap
        values = new_logprobs(hidden)
        for start, stop, logits in Chunks(hidden, weight, chunk, softcap):
            rows.run("token_logprobs", logits, start, None, *(x[start:stop] for x in values))
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order("linear_token_logprobs")
        hidden, weight, *_ = ctx.saved_tensors
        chunks = Chunks(hidden, weight, ctx.chunk, ctx.softcap, ctx.needs_input_grad[:2])
        for start, stop, logits in chunks:
            gradient = chunks.gradient(start, stop)
            write_logprobs_gradient(ctx.rows, logits, grads, gradient, start)
            chunks.backward(start, stop)
        return *chunks.gradients(), None, None, None
