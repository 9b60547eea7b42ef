"""Attention of N responses that share one prompt, whose keys and values are computed once.

A response attends to its prompt and, causally, to itself. On a CPU one kernel does this (attention_kernel.py), for float32,
bfloat16 and float64 and heads of at most 256. Elsewhere, and for others, both parts are ordinary FlashAttention calls that also
return their log-sum-exp, and they merge exactly:

    l = logaddexp(l1, l2)        o = o1 exp(l1 - l) + o2 exp(l2 - l)

In the backward pass, each part's FlashAttention backward is called with the *merged* o and l. It then recomputes the
probabilities exp(s - l) over prompt and response together, so the gradients are exact and the two parts add up.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.model import attention_kernel, flash
from maxrl_fast.model.flash import VarlenSpec
from maxrl_fast.ops.derivatives import check_mode, first_order


def merge(o1: Tensor, l1: Tensor, o2: Tensor, l2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention over two sets of keys together, from the attention over each: o [..., D], l [...]."""
    weight = torch.sigmoid(l1 - l2)[..., None].to(o1.dtype)  # exp(l1 - l)
    return torch.lerp(o2, o1, weight), torch.logaddexp(l1, l2)


@dataclass(frozen=True)
class SharedPromptLayout:
    """A packed stream of causal sequences, followed by responses to some of them, and the attention between them.

    The causal sequences are prompts that several responses share, and whole sequences (a prompt with its response) where
    sharing would not save time.
    """

    sequences: VarlenSpec  # causal attention of the first part
    to_prompts: VarlenSpec | None  # all responses to sequence b attend to all of sequence b; None without responses
    responses: VarlenSpec | None  # causal attention of each response to itself
    answers: Tensor  # [S] int64, the sequence that each response answers, on the host
    with_prompts: dict[Any, Any] = field(default_factory=dict)  # what formed_attention.py makes of it, once for all layers

    @classmethod
    def build(cls, lengths: Tensor, response_lengths: Tensor, answers: Tensor, device: torch.device) -> "SharedPromptLayout":
        """Return the layout of sequences with lengths [B] and responses with response_lengths [S].

        answers [S]: the index of the sequence that each response answers, ascending. All three are on the host.
        """
        by_prompt = torch.zeros_like(lengths).index_add(0, answers, response_lengths)
        has_responses = bool(by_prompt.any())
        return cls(
            sequences=VarlenSpec(lengths, lengths, device, causal=True),
            to_prompts=VarlenSpec(by_prompt, lengths, device) if has_responses else None,
            responses=VarlenSpec(response_lengths, response_lengths, device, causal=True) if has_responses else None,
            answers=answers,
        )

    @property
    def lengths(self) -> tuple[Tensor, Tensor, Tensor]:
        """Lengths of the sequences [B] and of the responses [S], and which sequence each response answers, on the host."""
        of_responses = torch.zeros_like(self.answers) if self.responses is None else self.responses.q_lengths
        return self.sequences.q_lengths, of_responses, self.answers

    @property
    def sizes(self) -> list[int]:
        """Number of tokens in the first part and of the responses after it."""
        return [int(x.q_lengths.sum()) if x else 0 for x in (self.sequences, self.responses)]


class _SharedPromptAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: SharedPromptLayout) -> Tensor:
        (q1, q2), (k1, k2), (v1, v2) = (x.split(layout.sizes) for x in (q, k, v))
        o, lse = flash.forward(q1, k1, v1, layout.sequences)
        if layout.to_prompts is not None:
            assert layout.responses is not None
            to_prompts, own = flash.forward(q2, k1, v1, layout.to_prompts), flash.forward(q2, k2, v2, layout.responses)
            merged = merge(*to_prompts, *own)
            o, lse = torch.cat([o, merged[0]]), torch.cat([lse, merged[1]])
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.layout = layout
        return o

    @staticmethod
    @first_order("shared_prompt_attention")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layout, sizes = ctx.layout, ctx.layout.sizes
        first, second = zip(*(x.split(sizes) for x in (grad, *ctx.saved_tensors)), strict=True)
        grad_o1, q1, k1, v1, o1, lse1 = first
        grad_q1, grad_k1, grad_v1 = flash.backward(grad_o1, q1, k1, v1, o1, lse1, layout.sequences)
        if layout.to_prompts is None:
            return grad_q1, grad_k1, grad_v1, None
        grad_o2, q2, k2, v2, o2, lse2 = second
        grad_q, grad_k, grad_v = flash.backward(grad_o2, q2, k1, v1, o2, lse2, layout.to_prompts)
        grad_q2, grad_k2, grad_v2 = flash.backward(grad_o2, q2, k2, v2, o2, lse2, layout.responses)
        pairs = (grad_q1, grad_q2.add_(grad_q)), (grad_k1.add_(grad_k), grad_k2), (grad_v1.add_(grad_v), grad_v2)
        return *(torch.cat(pair) for pair in pairs), None


def shared_prompt_attention(q: Tensor, k: Tensor, v: Tensor, layout: SharedPromptLayout) -> Tensor:
    """Return causal attention, of every response over [its prompt, itself] and of every other sequence over itself.

    Shapes: q [U, Hq, D], k and v [U, Hkv, D], with U the tokens of the stream that `layout` describes; Hq is a multiple of
    Hkv. Returns [U, Hq, D]. Differentiable in q, k and v.
    """
    if _runs_own_kernel(q.device, q.dtype, q.shape[-1]):
        own: Tensor = attention_kernel.shared_prompt_attention(q, k, v, *layout.lengths)[0]
        return own
    return merged_attention(q, k, v, layout)


def merged_attention(q: Tensor, k: Tensor, v: Tensor, layout: SharedPromptLayout) -> Tensor:
    """Return `shared_prompt_attention` by calls of FlashAttention and a merge, on any device."""
    check_mode("shared_prompt_attention", q, k, v)
    out: Tensor = _SharedPromptAttention.apply(q, k, v, layout)
    return out


def kernel_name(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Return the name of what computes `shared_prompt_attention`, for the start of a run."""
    return "C++" if _runs_own_kernel(device, dtype, head_dim) else flash.kernel_for(device, dtype, head_dim).name


def _runs_own_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    is_ours = attention_kernel.has_kernel(device, dtype, head_dim)
    return is_ours and flash.kernel_for(device, dtype, head_dim) is flash.PADDED_CPU
