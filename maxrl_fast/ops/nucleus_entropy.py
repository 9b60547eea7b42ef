"""The entropy of the nucleus of each row of logits, from hidden states and the output matrix, one chunk of logits at a time."""

from typing import Any

import torch
from torch import Tensor

from maxrl_fast.ops.derivatives import first_order
from maxrl_fast.ops.logit_chunks import Chunks, default_chunk
from maxrl_fast.ops.token_batch import real_dtype

_COPIES = 8  # of a chunk of logits, in float32, that sorting and the gradient take beside it


def linear_nucleus_entropy(
    hidden: Tensor, weight: Tensor, *, top_p: float, temperature: float = 1.0, softcap: float = 0.0
) -> Tensor:
    """Return the entropy [T], in nats, of the nucleus of softmax(hidden @ weight.T / temperature), renormalised.

    The nucleus is the fewest most probable tokens that have `top_p` of the probability together; of equally probable ones the
    first. It is taken as constant: the entropy's gradient in the logits is -q (log q + entropy) / temperature for a token of
    the nucleus with the renormalised probability q, and 0 for others.

    In plain PyTorch, with a sort of every row: for few rows. Logits are computed again in the backward pass. Beside the results
    it needs the memory of a small chunk of logits and of its float32 copies, which together take as much as a chunk of
    linear_token_logprobs (at most 32 MiB on a CPU and 1.25 GiB on a GPU, but at least one row).

    Args:
        hidden: [T, H]; logits have its dtype, and are computed in float32, or in float64 for float64.
        weight: [V, H], of the same dtype or float32.
        top_p: above 0 and at most 1.
        softcap: as in linear_policy_gradient_loss.
    """
    entropy: Tensor = _NucleusEntropy.apply(hidden, weight, top_p, temperature, softcap)
    return entropy


class _NucleusEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, *numbers: float) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.numbers = top_p, temperature, softcap = numbers
        chunks = Chunks(hidden, weight, _chunk_tokens(hidden, weight), False, False, softcap)
        real = real_dtype(hidden.dtype)
        parts = [_entropy(logits.to(real) / temperature, top_p)[1] for _, _, logits in chunks]
        return torch.cat([hidden.new_empty(0, dtype=real), *parts])

    @staticmethod
    @first_order("linear_nucleus_entropy")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, weight), (top_p, temperature, softcap) = ctx.saved_tensors, ctx.numbers
        needed = ctx.needs_input_grad[:2]
        chunks = Chunks(hidden, weight, _chunk_tokens(hidden, weight), needed[0], needed[1], softcap)
        for start, stop, logits in chunks:
            log_q, entropy = _entropy(logits.to(grad.dtype) / temperature, top_p)
            slope = log_q.exp() * (log_q.clamp_min(torch.finfo(log_q.dtype).min) + entropy[:, None])  # 0 outside the nucleus
            logits.copy_(slope.mul_((-grad[start:stop] / temperature)[:, None]))
            chunks.backward(start, stop, logits)
        gradients = zip(chunks.gradients(), needed, strict=True)
        return *(gradient if is_needed else None for gradient, is_needed in gradients), None, None, None


def _chunk_tokens(hidden: Tensor, weight: Tensor) -> int:
    own, of_copies = hidden.element_size(), _COPIES * real_dtype(hidden.dtype).itemsize
    return max(default_chunk(hidden, len(weight)) * own // of_copies, 1)


def _entropy(z: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return log q [T, V] of the nuclei of softmax(z), -inf outside of them, and their entropies [T]."""
    log_p = torch.log_softmax(z, -1)
    ordered, order = log_p.sort(dim=-1, descending=True, stable=True)
    p = ordered.exp()
    is_in = p.cumsum(-1) - p < top_p  # what comes before has less than top_p; the first always is
    is_in[:, 0] = True
    mask = torch.zeros_like(is_in).scatter_(-1, order, is_in)
    log_q = torch.log_softmax(log_p.masked_fill(~mask, -torch.inf), -1)
    return log_q, -(log_q.exp() * log_q.clamp_min(torch.finfo(log_q.dtype).min)).sum(-1)
