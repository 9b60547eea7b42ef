"""Attention of N responses that share one prompt, whose keys and values are computed once.

A response attends to its prompt and, causally, to itself. On a CPU one kernel does this
(attention_kernel.py), for float32, bfloat16 and float64 and heads of at most 256. Elsewhere, and
for others, both parts are ordinary FlashAttention calls that also return their log-sum-exp, and
they merge exactly:

    l = logaddexp(l1, l2)        o = o1 exp(l1 - l) + o2 exp(l2 - l)

In the backward pass, each part's FlashAttention backward is called with the *merged* o and l. It
then recomputes the probabilities exp(s - l) over prompt and response together, so the gradients are
exact and the two parts add up.

With a sliding window, a soft cap or sinks, each response gets a copy of the keys and values of its
prompt, or of the part of it that its window reaches, in front of its own. Its attention is then one
causal FlashAttention call. The copies exist only while a layer computes.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.model import attention_kernel, flash
from maxrl_fast.model.flash import VarlenSpec
from maxrl_fast.ops.derivatives import check_mode, first_order
from maxrl_fast.records import cumulative, ranges


def merge(o1: Tensor, l1: Tensor, o2: Tensor, l2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention over two sets of keys, from that over each: o [..., D], l [...]."""
    weight = torch.sigmoid(l1 - l2)[..., None].to(o1.dtype)  # exp(l1 - l)
    return torch.lerp(o2, o1, weight), torch.logaddexp(l1, l2)


@dataclass(frozen=True)
class AttentionVariant:
    """What an attention does besides softmax(q k^T / sqrt(D)) v over all earlier tokens."""

    window: int = 0  # a token attends to the last `window` tokens, itself included; 0: to all
    softcap: float = 0.0  # scores s become softcap * tanh(s / softcap); 0: they stay
    # [Hq]: scores of one more key for each head, whose value is 0 (gpt-oss)
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return not self.window and not self.softcap and self.sinks is None


PLAIN_ATTENTION = AttentionVariant()


@dataclass(frozen=True)
class SharedPromptLayout:
    """B packed causal sequences, then S responses to some of them.

    The sequences are prompts that several responses share, and whole sequences (a prompt with its
    response) where sharing would not save time.
    """

    lengths: Tensor  # [B] int64, on the host
    response_lengths: Tensor  # [S] int64, on the host
    prompt_index: Tensor  # [S] int64, each response's sequence, ascending, on the host
    device: torch.device
    # by window and soft cap
    copies: dict[tuple[int, float], tuple[Tensor, VarlenSpec]] = field(default_factory=dict)

    @cached_property
    def sequences(self) -> VarlenSpec:
        return VarlenSpec(self.lengths, self.lengths, self.device, causal=True)

    @cached_property
    def to_prompts(self) -> VarlenSpec | None:
        """All responses to sequence b attend to all of sequence b; None without responses."""
        by_prompt = torch.zeros_like(self.lengths).index_add(
            0, self.prompt_index, self.response_lengths
        )
        return VarlenSpec(by_prompt, self.lengths, self.device) if bool(by_prompt.any()) else None

    @cached_property
    def responses(self) -> VarlenSpec | None:
        """Causal attention of each response to itself; None without responses."""
        own = self.response_lengths
        return VarlenSpec(own, own, self.device, causal=True) if bool(own.any()) else None

    @property
    def sizes(self) -> list[int]:
        """Numbers of tokens: of the sequences, and of the responses."""
        return [int(self.lengths.sum()), int(self.response_lengths.sum())]

    def copied_prompts(self, window: int, softcap: float) -> tuple[Tensor, VarlenSpec]:
        """Return the index of the keys that each sequence and response attends to, and the
        attention; made once for all layers. The window becomes 0 where no sequence is longer."""
        key = window, softcap
        if key in self.copies:
            return self.copies[key]
        lengths, own, prompts = self.lengths, self.response_lengths, self.lengths[self.prompt_index]
        window = window if window < int(torch.cat([lengths, prompts + own]).max()) else 0
        # [S] keys of the prompt
        num_before = torch.where(own > 0, prompts.clamp_max(window - 1) if window else prompts, 0)
        starts = torch.stack(
            [
                cumulative(lengths)[1:][self.prompt_index] - num_before,
                lengths.sum() + cumulative(own)[:-1],
            ],
            1,
        )
        index = torch.cat(
            [
                torch.arange(int(lengths.sum())),
                ranges(starts.flatten(), torch.stack([num_before, own], 1).flatten()),
            ]
        )
        spec = VarlenSpec(
            torch.cat([lengths, own]),
            torch.cat([lengths, num_before + own]),
            self.device,
            causal=True,
            window=window,
            softcap=softcap,
        )
        self.copies[key] = index.to(self.device), spec
        return self.copies[key]


class _SharedPromptAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: SharedPromptLayout) -> Tensor:
        (q1, q2), (k1, k2), (v1, v2) = (x.split(layout.sizes) for x in (q, k, v))
        o, lse = flash.forward(q1, k1, v1, layout.sequences)
        if layout.to_prompts is not None:
            assert layout.responses is not None
            to_prompts = flash.forward(q2, k1, v1, layout.to_prompts)
            o2, lse2 = merge(*to_prompts, *flash.forward(q2, k2, v2, layout.responses))
            o, lse = torch.cat([o, o2]), torch.cat([lse, lse2])
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
        pairs = (
            (grad_q1, grad_q2.add_(grad_q)),
            (grad_k1.add_(grad_k), grad_k2),
            (grad_v1.add_(grad_v), grad_v2),
        )
        return *(torch.cat(pair) for pair in pairs), None


class _VariantAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        index: Tensor,
        spec: VarlenSpec,
    ) -> Tensor:
        o, lse = flash.forward(q, k[index], v[index], spec)
        if sinks is not None:  # merged as a part of the keys with the value 0
            o = o * torch.sigmoid(lse - sinks)[..., None].to(o.dtype)
            lse = torch.logaddexp(lse, sinks.to(lse.dtype))
        ctx.save_for_backward(q, k, v, o, lse, sinks, index)
        ctx.spec = spec
        return o

    @staticmethod
    @first_order("shared_prompt_attention")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, sinks, index = ctx.saved_tensors
        grad_q, *grads = flash.backward(grad, q, k[index], v[index], o, lse, ctx.spec)
        # The gradients of copies are added in float32 and, on a GPU too, in one order.
        wide = torch.promote_types(k.dtype, torch.float32)
        total = [torch.zeros_like(x, dtype=wide) for x in (k, v)]
        for x, part in zip(total, grads, strict=True):
            x.index_put_((index,), part.to(x.dtype), accumulate=True)
        grad_sinks = None
        if sinks is not None:
            by_head = (grad.to(lse.dtype) * o.to(lse.dtype)).sum(-1)  # [U, Hq]
            grad_sinks = -((sinks - lse).exp() * by_head).sum(0).to(sinks.dtype)
        return grad_q, total[0].to(k.dtype), total[1].to(v.dtype), grad_sinks, None, None


def shared_prompt_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SharedPromptLayout,
    variant: AttentionVariant = PLAIN_ATTENTION,
) -> Tensor:
    """Return causal attention: each response over its prompt and itself, other sequences over
    themselves.

    q [U, Hq, D], k and v [U, Hkv, D], with U the tokens of `layout`; Hq is a multiple of Hkv.
    Returns [U, Hq, D]. Differentiable in q, k, v and the variant's sinks.
    """
    if not variant.is_plain:
        index, spec = layout.copied_prompts(variant.window, variant.softcap)
        if spec.window or spec.softcap or variant.sinks is not None:
            check_mode("shared_prompt_attention", q, k, v)
            out: Tensor = _VariantAttention.apply(q, k, v, variant.sinks, index, spec)
            return out
    if _runs_own_kernel(q.device, q.dtype, q.shape[-1]):
        lengths = layout.lengths, layout.response_lengths, layout.prompt_index
        own: Tensor = attention_kernel.shared_prompt_attention(q, k, v, *lengths)[0]
        return own
    return merged_attention(q, k, v, layout)


def merged_attention(q: Tensor, k: Tensor, v: Tensor, layout: SharedPromptLayout) -> Tensor:
    """Compute `shared_prompt_attention` by FlashAttention calls and a merge, on any device."""
    check_mode("shared_prompt_attention", q, k, v)
    out: Tensor = _SharedPromptAttention.apply(q, k, v, layout)
    return out


def kernel_name(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Return which kernel computes `shared_prompt_attention`."""
    is_own = _runs_own_kernel(device, dtype, head_dim)
    return "C++" if is_own else flash.kernel_for(device, dtype, head_dim).name


def _runs_own_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    is_ours = attention_kernel.has_kernel(device, dtype, head_dim)
    return is_ours and flash.kernel_for(device, dtype, head_dim) is flash.PADDED_CPU
