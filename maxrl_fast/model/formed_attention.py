"""Attention with a sliding window, a soft cap or sinks, of responses that share one prompt.

Each response gets a copy of the keys and values of its prompt, or of the part of it that its window reaches, in front of its
own. Its attention is then one causal FlashAttention call. The copies exist only while a layer computes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.model import flash
from maxrl_fast.model.attention import SharedPromptLayout, shared_prompt_attention
from maxrl_fast.model.flash import VarlenSpec
from maxrl_fast.ops.derivatives import check_mode, first_order
from maxrl_fast.records import cumulative, ranges


@dataclass(frozen=True)
class AttentionForm:
    """What an attention does besides softmax(q k^T / sqrt(D)) v over all earlier tokens."""

    window: int = 0  # a token attends to the last `window` tokens, itself included; 0: to all
    softcap: float = 0.0  # scores s become softcap * tanh(s / softcap); 0: they stay
    sinks: Tensor | None = None  # [Hq]: scores of one more key for each head, whose value is 0 (gpt-oss)

    @property
    def is_plain(self) -> bool:
        return not self.window and not self.softcap and self.sinks is None


PLAIN = AttentionForm()


def formed_attention(q: Tensor, k: Tensor, v: Tensor, layout: SharedPromptLayout, form: AttentionForm = PLAIN) -> Tensor:
    """Return `shared_prompt_attention` in this form, differentiable in q, k, v and the sinks; shapes are as there."""
    if form.is_plain:
        return shared_prompt_attention(q, k, v, layout)
    check_mode("formed_attention", q, k, v)
    key = form.window, form.softcap
    if key not in layout.with_prompts:
        layout.with_prompts[key] = _with_prompts(layout, *key)
    index, spec = layout.with_prompts[key]
    if not spec.window and not spec.softcap and form.sinks is None:  # the window is longer than every sequence
        return shared_prompt_attention(q, k, v, layout)
    out: Tensor = _FormedAttention.apply(q, k, v, form.sinks, index, spec)
    return out


def _longest(layout: SharedPromptLayout) -> int:
    """Return the number of tokens of the longest sequence, a prompt with its response."""
    lengths = layout.sequences.k_lengths
    if layout.responses is None:
        return int(lengths.max())
    return max(int(lengths.max()), int((lengths[layout.answers] + layout.responses.k_lengths).max()))


def _with_prompts(layout: SharedPromptLayout, window: int, softcap: float) -> tuple[Tensor, VarlenSpec]:
    """Return which of the stream's keys each sequence and response attends to, int64 on the device, and the attention."""
    lengths, device = layout.sequences.k_lengths, layout.sequences.device
    window, ends = window if window < _longest(layout) else 0, cumulative(lengths)[1:]
    own, answers = lengths[:0], layout.answers[:0]
    if layout.responses is not None:
        own, answers = layout.responses.k_lengths, layout.answers
    num_before = lengths[answers].clamp_max(window - 1) if window else lengths[answers]
    num_before = torch.where(own > 0, num_before, 0)  # [S] keys of the prompt
    starts = torch.stack([ends[answers] - num_before, lengths.sum() + cumulative(own)[:-1]], 1).flatten()
    counts = torch.stack([num_before, own], 1).flatten()
    index = torch.cat([torch.arange(int(lengths.sum())), ranges(starts, counts)])
    spec = VarlenSpec(
        torch.cat([lengths, own]), torch.cat([lengths, num_before + own]), device, causal=True, window=window, softcap=softcap
    )
    return index.to(device), spec


class _FormedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, index: Tensor, spec: VarlenSpec) -> Tensor:
        o, lse = flash.forward(q, k[index], v[index], spec)
        if sinks is not None:  # merged as a part of the keys with the value 0
            o = o * torch.sigmoid(lse - sinks)[..., None].to(o.dtype)
            lse = torch.logaddexp(lse, sinks.to(lse.dtype))
        ctx.save_for_backward(q, k, v, o, lse, sinks, index)
        ctx.spec = spec
        return o

    @staticmethod
    @first_order("formed_attention")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, sinks, index = ctx.saved_tensors
        grad_q, *grads = flash.backward(grad, q, k[index], v[index], o, lse, ctx.spec)
        grad_k, grad_v = (_summed(part, index, x) for part, x in zip(grads, (k, v), strict=True))
        grad_sinks = None
        if sinks is not None:
            wide = (grad.to(lse.dtype) * o.to(lse.dtype)).sum(-1)  # [U, Hq]
            grad_sinks = -((sinks - lse).exp() * wide).sum(0).to(sinks.dtype)
        return grad_q, grad_k, grad_v, grad_sinks, None, None


def _summed(parts: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """Add the gradients of copies, in float32 and, on a GPU too, in one order."""
    total = torch.zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    return total.index_put_((index,), parts.to(total.dtype), accumulate=True).to(like.dtype)
