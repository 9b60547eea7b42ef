"""The exact divergence of a policy from a teacher, from hidden states: on a GPU by a kernel, where
logits are float32, and in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import check_choice, check_number, is_host_readable
from maxrl_fast.algorithms.options import Limit
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.dispatch import DEVICE_DTYPES, KernelLaunch, eager
from maxrl_fast.ops.logit_chunks import Chunks, check_hidden
from maxrl_fast.ops.loss import LossFunction
from maxrl_fast.ops.loss_kernel import (
    check_values,
    checked,
    loss_denominator,
    real_dtype,
    token_temperature,
)

DIVERGENCES = ("reverse", "forward", "jsd")
# beyond it float32 rounds beta or 1 - beta to 1, and the logarithm of the mixture is infinite
BETA = Limit("from 1e-7 to 1 - 1e-7", lambda x: 1e-7 <= x <= 1 - 1e-7)
# of logits that are computed at a time, in float32: temporary copies stay in a CPU's cache
_BLOCK_BYTES = {"cpu": 1 << 20, "cuda": 1 << 27}
_MAX_LOG_RATIO = 80.0  # its exp is finite in float32; smaller probabilities add nothing to jsd


@eager
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
    """Return sum_t c_t D_t / denominator, D_t a token's exact divergence of the policy P from the
    teacher Q, and metrics (docs/token_loss.md#divergence-from-a-teacher).

    Computed as linear_policy_gradient_loss, whose arguments it shares, in the memory of two chunks
    of logits. The teacher is a constant. Equal logits give exactly 0, and gradients of 0.

    Args:
        teacher_hidden, teacher_weight: [T, K] and [V, K], with any K and dtypes.
        divergence: "reverse", KL(P || Q); "forward", KL(Q || P); "jsd", beta KL(Q || M) + (1 -
            beta) KL(P || M), M = beta Q + (1 - beta) P: that of GKD (Agarwal et al. 2024).
        temperature: of both sides.
        softcap, teacher_softcap: of one.
        coefficients: c [T], numbers or a mask. Tokens with 0 are not read. Default: 1.
        denominator: a number, or []. Default: the number of tokens that are read.

    Returns the loss, a scalar as there, and the detached metric divergence: D [T] float64, 0 for
    tokens that are not read."""
    check_choice("divergence", divergence, DIVERGENCES)
    beta = check_number("beta", beta, BETA.wanted, BETA.holds)
    vocab, chunk = check_hidden(hidden, weight, chunk_tokens, softcap)
    teachers, _ = check_hidden(teacher_hidden, teacher_weight, None, teacher_softcap, "teacher_")
    device, size, real = hidden.device, len(hidden), real_dtype(hidden.dtype)
    if (len(teacher_hidden), teachers, teacher_hidden.device) != (size, vocab, device):
        raise ValueError(
            f"teacher_hidden and teacher_weight must have T = {size} and V = {vocab} rows on "
            f"{device}, got {len(teacher_hidden)} and {teachers} on {teacher_hidden.device}"
        )
    c = torch.ones(size, device=device) if coefficients is None else coefficients
    checked("coefficients", c, size, device)
    mask = c != 0
    if is_host_readable(c):
        check_values("coefficients", c, "finite", ~c.double().isfinite(), None)
    tau = token_temperature(temperature, size, device, mask).to(real)
    divisor = loss_denominator(denominator, "token_mean", size, 0, mask, device)
    needs = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight)]
    with torch.no_grad():
        index: Any = slice(None) if coefficients is None else mask.nonzero()[:, 0]
        chunks = Chunks(hidden.detach()[index], weight.detach(), chunk, softcap, needs)
        teacher = teacher_hidden.detach()[index], teacher_weight.detach()
        factors = (c.double() / divisor)[index]
        own, grad_hidden, grad_weight = _divergences(
            chunks,
            Chunks(*teacher, chunks.size, teacher_softcap),
            *(factors, tau[index, None], divergence, beta),
        )
        if grad_hidden is not None and coefficients is not None:
            grad_hidden = torch.zeros_like(hidden).index_copy_(0, index, grad_hidden)
        values = c.new_zeros(size, dtype=torch.float64)
        values[index] = own
    loss = _Divergence.apply(hidden, weight, factors.dot(own), grad_hidden, grad_weight)
    return loss.to(real), {"divergence": values}


class _Divergence(LossFunction):
    name = "linear_divergence"

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, loss: Tensor, *gradients: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()


def _divergences(
    chunks: Chunks, teacher: Chunks, c: Tensor, tau: Tensor, divergence: str, beta: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return D [C] float64 and the needed gradients of c's sum with D, by hidden and weight."""
    slopes = (c[:, None] / tau).to(tau.dtype)
    takes_kernel = dispatch.is_gpu(c.device) and dispatch.has_kernels(c.device)
    call = KernelLaunch(c.device) if takes_kernel else None
    has_gradient = chunks.grad_hidden is not None or chunks.grad_weight is not None
    block = _BLOCK_BYTES.get(c.device.type, 1 << 20) // tau.element_size()
    # not a list: tensors that stay among those that are freed would fragment the heap
    values = torch.empty_like(c)
    for (start, stop, logits), (*_, other) in zip(chunks, teacher, strict=True):
        of_logits, given = chunks.gradient(start, stop), {logits.dtype, other.dtype}
        if call and given == {torch.float32} and of_logits.dtype in DEVICE_DTYPES:
            call.launch(
                "divergence",
                dtype=of_logits.dtype,
                policy=call.matrix("policy", logits),
                teacher=call.matrix("teacher", other),
                gradient=call.matrix("gradient", of_logits) if has_gradient else (0, 0),
                num_rows=len(logits),
                vocab_size=logits.shape[1],
                temperature=tau[start:stop],
                coefficients=c[start:stop],
                values=values[start:stop],
                divergence=divergence,
                beta=beta,
            )
            chunks.backward(start, stop)
            continue
        step = max(block // max(logits.shape[1], 1), 1)
        for i in range(start, stop, step):
            rows, part = slice(i, min(i + step, stop)), slice(i - start, i - start + step)
            log_p, log_q = (
                torch.log_softmax(x[part].to(tau.dtype) / tau[rows], -1) for x in (logits, other)
            )
            values[rows], gradient = _divergence(log_p, log_q, divergence, beta)
            of_logits[part] = gradient.mul_(slopes[rows])
        chunks.backward(start, stop)
    # frees the chunks before the gradient is rounded
    call, logits = None, values
    logits = other = of_logits = chunks.buffer = teacher.buffer = values
    return values, *chunks.gradients()


def _divergence(
    log_p: Tensor, log_q: Tensor, divergence: str, beta: float
) -> tuple[Tensor, Tensor]:
    """Return D [C] of rows [C, V], which are overwritten, and its gradients by P's logits."""
    dot, p, d = torch.linalg.vecdot, log_p.exp(), log_p.sub_(log_q)
    if divergence == "forward":
        q = log_q.exp_()
        return -dot(q, d), p.sub_(q)
    share, of_teacher = 1.0, 0.0
    if divergence == "jsd":
        share, up = 1 - beta, d.neg_().clamp_(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)  # log q - log p
        of_teacher = beta * dot(log_q.exp_(), _over_mixture(up.neg(), share))
        d = _over_mixture(up, beta)
    mean = dot(p, d)
    return share * mean + of_teacher, d.sub_(mean[:, None]).mul_(p).mul_(share)


def _over_mixture(up: Tensor, share: float) -> Tensor:
    """Return log(a / (share b + (1 - share) a)) for up = log b - log a: 0 where a = b."""
    return torch.expm1(up).mul_(share).log1p_().neg_()
