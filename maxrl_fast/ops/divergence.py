"""The exact divergence between a policy and a teacher, from hidden states, in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import check_choice, check_number, is_host_readable
from maxrl_fast.ops.derivatives import needs_gradient
from maxrl_fast.ops.dispatch import operator, register_fake
from maxrl_fast.ops.logit_chunks import Chunks, check_hidden, empty_gradients
from maxrl_fast.ops.token_batch import (
    check_temperature,
    check_tokens,
    check_values,
    loss_denominator,
    real_dtype,
)
from maxrl_fast.ops.token_loss_kernel import register_loss

DIVERGENCES = ("reverse", "forward", "jsd")
# of logits, in float32: what is computed of so many rows stays in a CPU's cache
_BLOCK_BYTES = {"cpu": 1 << 20, "cuda": 1 << 27}
_MAX_LOG_RATIO = 80.0  # of jsd: exp of it is finite in float32, and below exp(-80) P adds nothing


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    divergence: str = "reverse",
    *,
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    softcap: float = 0.0,
    teacher_softcap: float = 0.0,
    coefficients: Tensor | None = None,
    denominator: float | Tensor | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return sum_t c_t D_t / denominator, D_t the exact divergence of the policy P from the teacher
    Q at token t, and metrics.

    P and Q are softmax(logits / temperature) of hidden @ weight.T and of teacher_hidden @
    teacher_weight.T, whose hidden sizes may differ:

        reverse     KL(P || Q), which on-policy distillation minimizes
        forward     KL(Q || P)
        jsd         beta KL(Q || M) + (1 - beta) KL(P || M), M = beta Q + (1 - beta) P: the
                    generalized JSD (GKD, Agarwal et al. 2024, eq. 1); divided by beta near 0 it is
                    forward, divided by 1 - beta near 1 it is reverse

    The forward pass computes loss and gradients chunk by chunk, as linear_policy_gradient_loss
    does, in the memory of two chunks of logits, one of each side. The teacher is a constant. If
    both sides have the same logits, loss and gradients are exactly 0.

    Args:
        hidden: [T, H] float32, bfloat16, float16 or float64; logits have its dtype, and their
            divergence is computed in float32 (float64 for float64).
        weight: [V, H], of the same dtype or float32. Its gradient is not allocated if it is frozen
            (requires_grad False).
        teacher_hidden, teacher_weight: [T, K] and [V, K], likewise, in any of these dtypes.
        divergence: "reverse", "forward" or "jsd".
        beta: the teacher's weight in "jsd", between 0 and 1.
        temperature: a number, or [T], of both sides.
        softcap, teacher_softcap: as in linear_policy_gradient_loss, each of its side.
        coefficients: c [T], numbers or bool (a mask). Tokens with 0 are not read; on a GPU the host
            waits for their number. Default: 1. For the mean of each response's mean give
            1 / length, and the number of responses as denominator.
        denominator: a number, or []. Give the count of the whole batch, so that the losses of
            micro-batches and ranks add up. Default: the number of tokens that are read.
        chunk_tokens: as in linear_policy_gradient_loss.

    Returns:
        The loss, a float32 scalar (float64 for float64 hidden), and metrics, detached: divergence
        [T] float64, 0 for tokens that are not read.

    Raises:
        ValueError: if an argument is unknown or does not fit; on a CPU also if a coefficient is not
            finite, or a temperature or denominator not above 0.
        TypeError: if an argument that must be a tensor is something else.
        RuntimeError: from derivatives as in policy_gradient_loss. On a GPU the backward pass can
            run only once.
    """
    check_choice("divergence", divergence, DIVERGENCES)
    beta = check_number("beta", beta, "between 0 and 1", lambda x: 0 < x < 1)
    size, chunk = check_hidden(hidden, weight, chunk_tokens, softcap)
    of_teacher, _ = check_hidden(teacher_hidden, teacher_weight, None, teacher_softcap, "teacher_")
    device, num_tokens = hidden.device, len(hidden)
    if (len(teacher_hidden), of_teacher, teacher_hidden.device) != (num_tokens, size, device):
        raise ValueError(
            f"teacher_hidden and teacher_weight must have T = {num_tokens} and V = {size} rows on "
            f"{device} as hidden and weight have, got {len(teacher_hidden)} and {of_teacher} on "
            f"{teacher_hidden.device}"
        )
    mask = None
    if coefficients is not None:
        check_tokens(num_tokens, device, mask=None, coefficients=coefficients)
        mask = coefficients != 0
        if is_host_readable(coefficients):
            is_wrong = ~coefficients.double().isfinite()
            check_values("coefficients", coefficients, "finite", is_wrong, None)
        coefficients = coefficients.detach().double()
    check_temperature(temperature, num_tokens, device, mask)
    real = real_dtype(hidden.dtype)
    if not isinstance(temperature, Tensor):
        temperature = torch.full((num_tokens,), float(temperature), dtype=real, device=device)
    sums, *_ = linear_divergences(
        hidden,
        weight,
        teacher_hidden.detach(),
        teacher_weight.detach(),
        coefficients,
        loss_denominator(denominator, "token_mean", num_tokens, 0, mask, device),
        temperature.detach().to(real),
        divergence,
        beta,
        softcap,
        teacher_softcap,
        chunk,
        needs_gradient(hidden),
        needs_gradient(weight),
    )
    return sums[0].to(real), {"divergence": sums.detach()[1:]}


@operator()
def linear_divergences(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    coefficients: Tensor | None,  # [T] float64
    denominator: Tensor,  # [] float64
    temperature: Tensor,  # [T]
    divergence: str,
    beta: float,
    softcap: float,
    teacher_softcap: float,
    chunk: int,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and the divergences, [1 + T] float64, and the gradients of hidden [T, H] and
    weight [V, H], or [0] if not needed."""
    index, rows = None, hidden
    factors = torch.ones_like(temperature, dtype=torch.float64) / denominator
    if coefficients is not None:
        factors *= coefficients
        index = coefficients.nonzero()[:, 0]
        rows, teacher_hidden = hidden[index], teacher_hidden[index]
        factors, temperature = factors[index], temperature[index]
    values, slopes = torch.empty_like(factors), (factors / temperature).to(temperature.dtype)
    chunks = Chunks(rows, weight, chunk, needs_hidden, needs_weight, softcap)
    others = Chunks(teacher_hidden, teacher_weight, chunks.size, False, False, teacher_softcap)
    row_bytes = max(len(weight) * temperature.element_size(), 1)
    block = max(_BLOCK_BYTES.get(hidden.device.type, 1 << 20) // row_bytes, 1)
    logits = other = None
    for (start, stop, logits), (*_, other) in zip(chunks, others, strict=True):
        columns = (x[start:stop] for x in (values, slopes[:, None], temperature[:, None]))
        for z, y, value, slope, tau in zip(
            *(x.split(block) for x in (logits, other, *columns)), strict=True
        ):
            log_p, log_q = (torch.log_softmax(x.to(tau.dtype) / tau, -1) for x in (z, y))
            of_rows, gradient = _divergence(log_p, log_q, divergence, beta)
            value.copy_(of_rows)
            if needs_hidden or needs_weight:
                z.copy_(gradient.mul_(slope))
        if needs_hidden or needs_weight:
            chunks.backward(start, stop, logits)
    # frees the chunks before the gradient is rounded
    del others, logits, other
    chunks.buffer = chunks.buffer.new_empty(0)
    grad_hidden, grad_weight = chunks.gradients()
    loss = (factors * values).sum()[None]
    if index is not None:
        values = values.new_zeros(len(hidden)).index_copy_(0, index, values)
        if needs_hidden:
            grad_hidden = torch.zeros_like(hidden).index_copy_(0, index, grad_hidden)
    return torch.cat([loss, values]), grad_hidden, grad_weight


def _divergence(
    log_p: Tensor, log_q: Tensor, divergence: str, beta: float
) -> tuple[Tensor, Tensor]:
    """Return the divergences [C] of rows [C, V], which are overwritten, and their gradients with
    respect to the logits of P."""
    p, d = log_p.exp(), log_p.sub_(log_q)
    if divergence == "forward":
        q = log_q.exp_()
        return -torch.linalg.vecdot(q, d), p.sub_(q)
    weight, others = 1.0, 0.0
    if divergence == "jsd":
        weight = 1 - beta
        up = d.neg_().clamp_max_(_MAX_LOG_RATIO)  # log q - log p
        d = torch.expm1(up).mul_(beta).log1p_().neg_()  # log p - log m, 0 where p = q
        others = beta * torch.linalg.vecdot(log_q.exp_(), up.add_(d))  # KL(Q || M)
    value = torch.linalg.vecdot(p, d)
    return weight * value + others, d.sub_(value[:, None]).mul_(p).mul_(weight)


@register_fake(linear_divergences)
def _(hidden: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    sums = hidden.new_empty(1 + len(hidden), dtype=torch.float64)
    return sums, *empty_gradients(hidden, weight, *arguments[-2:])


register_loss(linear_divergences, "linear_divergence", 2)
