"""Attention of N responses that share one prompt, the prompt's keys and values computed once.

A response attends to its prompt and, causally, to itself. Both parts are ordinary FlashAttention calls that also return
their log-sum-exp, and they merge exactly:

    l = logaddexp(l1, l2)        o = o1 exp(l1 - l) + o2 exp(l2 - l)

Backward, each part's own backward is called with the *merged* o and l. The probabilities it rebuilds, exp(s - l), are
then those over prompt and response together, so the gradients are exact and those of the two parts add up.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from maxrl_fast.records import padded_slots


def kernel_name(device: torch.device) -> str:
    """What `attend` runs on this device, for the report at the start of a run."""
    return "torch flash" if device.type == "cpu" else "torch matmul-softmax"


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Softmax attention, scores scaled by D**-0.5, and its log-sum-exp.

    Shapes: q [B, Lq, heads, D], k and v [B, Lk, heads, D]; mask is added to the scores and broadcasts to
    [B, heads, Lq, Lk]. Returns o [B, Lq, heads, D] and l [B, Lq, heads] (float32, float64 for float64 inputs).
    Neither Lq nor Lk may be 0: the CPU kernel divides by them and takes the process down.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.device.type == "cpu":
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)
    else:
        o, lse = attend_reference(q, k, v, causal, mask)
    return o.transpose(1, 2), lse.transpose(1, 2)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to q, k and v given that to o; o and lse are those of this call or of the merge it went into."""
    grad, q, k, v, o, lse = (x.transpose(1, 2) for x in (grad, q, k, v, o, lse))
    if q.device.type == "cpu":
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = backward(grad, q, k, v, o, lse, 0.0, causal, attn_mask=mask)
    else:
        grads = attend_backward_reference(grad, q, k, v, o, lse, causal, mask)
    return tuple(x.transpose(1, 2) for x in grads)


def _wide(*tensors: Tensor) -> list[Tensor]:
    """In float32 at least: scores rounded to bfloat16 before the softmax would triple its error."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return scores


def attend_reference(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """`attend` written out for [B, heads, L, D], in any dtype and on any device."""
    wide_q, wide_k, wide_v = _wide(q, k, v)
    scores = _scores(wide_q, wide_k, causal, mask)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ wide_v).to(v.dtype), lse


def attend_backward_reference(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` written out for [B, heads, L, D]."""
    dtype = q.dtype
    grad, q, k, v, o = _wide(grad, q, k, v, o)
    p = (_scores(q, k, causal, mask) - lse[..., None]).exp()
    grad_p = grad @ v.transpose(-1, -2) - (grad * o).sum(-1, keepdim=True)
    grad_s = p * grad_p * q.shape[-1] ** -0.5
    grads = grad_s @ k, grad_s.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad
    return grads[0].to(dtype), grads[1].to(dtype), grads[2].to(dtype)


def merge(o1: Tensor, l1: Tensor, o2: Tensor, l2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two key sets together from attention over each: o [..., D], l [...]."""
    weight = torch.sigmoid(l1 - l2)[..., None].to(o1.dtype)  # exp(l1 - l)
    return torch.lerp(o2, o1, weight), torch.logaddexp(l1, l2)


@dataclass(frozen=True)
class Tiling:
    """Where packed tokens lie in a tile [rows, width, ...] padded on the right. Not every token need be in it."""

    tokens: Tensor | None  # [T'] int64, the packed tokens of this tile, ascending; None: all of them
    slots: Tensor  # [T'] int64, their places in the flattened tile, ascending
    rows: int
    width: int

    def pad(self, x: Tensor) -> Tensor:
        """Packed [T, ...] -> [rows, width, ...], zeros in the padding."""
        x = x if self.tokens is None else x.index_select(0, self.tokens)
        if len(self.slots) < self.rows * self.width:  # otherwise the slots, ascending, are every one
            x = x.new_zeros(self.rows * self.width, *x.shape[1:]).index_copy(0, self.slots, x)
        return x.reshape(self.rows, self.width, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """[rows, width, ...] -> this tile's tokens, packed [T', ...]."""
        x = x.flatten(0, 1)
        return x if len(self.slots) == len(x) else x.index_select(0, self.slots)

    def unpad_into(self, packed: Tensor, x: Tensor) -> None:
        """Write this tile's tokens to their places in a packed tensor [T, ...]."""
        if self.tokens is None:
            packed.copy_(self.unpad(x))
        else:
            packed.index_copy_(0, self.tokens, self.unpad(x))


def tile(lengths: Tensor) -> Tiling:
    """All sequences of a packed stream, a row each."""
    width = int(lengths.max())
    return Tiling(None, padded_slots(lengths, width), len(lengths), width)


def tiles_by_length(lengths: Tensor) -> list[Tiling]:
    """The sequences of a packed stream in tiles of similar length, so that one long response does not pad all others.

    Lengths between two powers of two share a tile; sequences of length 0 are in none.
    """
    bucket = torch.frexp(lengths.double()).exponent  # 2**(bucket - 1) <= length < 2**bucket
    of_token = bucket.repeat_interleave(lengths)
    tiles = []
    for b in bucket[lengths > 0].unique().tolist():
        chosen = tile(lengths[bucket == b])
        tokens = (of_token == b).nonzero()[:, 0]
        tiles.append(chosen if len(tokens) == len(of_token) else replace(chosen, tokens=tokens))
    return tiles


@dataclass(frozen=True)
class SharedPromptLayout:
    """How a packed stream, the tokens of all prompts and then of all responses, is laid out for attention."""

    prompts: Tiling  # [G, P]
    groups: Tiling | None  # [G, tokens of the largest group], all responses of a prompt side by side; None without any
    responses: list[Tiling]
    prompt_mask: Tensor | None  # [G, 1, 1, P] float32, -inf on padding; None when all prompts have the same length

    @classmethod
    def build(cls, prompt_lengths: Tensor, response_lengths: Tensor, groups: Tensor) -> "SharedPromptLayout":
        """From prompt lengths [G], response lengths [S] and each response's group [S], in ascending order."""
        of_group = torch.zeros_like(prompt_lengths).index_add(0, groups, response_lengths)
        return cls(
            prompts=tile(prompt_lengths),
            groups=tile(of_group) if int(of_group.sum()) else None,
            responses=tiles_by_length(response_lengths),
            prompt_mask=padding_mask(prompt_lengths),
        )

    @property
    def sizes(self) -> list[int]:
        """Number of prompt tokens and of response tokens in the stream."""
        return [len(self.prompts.slots), 0 if self.groups is None else len(self.groups.slots)]


def padding_mask(lengths: Tensor) -> Tensor | None:
    """[G, 1, 1, longest] float32 to add to scores, -inf on padding; None when there is no padding."""
    width = int(lengths.max())
    if int(lengths.min()) == width:
        return None
    padding = torch.arange(width, device=lengths.device) >= lengths[:, None]
    return torch.zeros(padding.shape, device=lengths.device).masked_fill(padding, float("-inf"))[:, None, None, :]


class MergedAttention(torch.autograd.Function):
    """Responses attend to the prompt of their group and causally to themselves.

    Shapes: q, k, v [tokens of all responses, heads, D]; k_prompt, v_prompt [G, P, heads, D].
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, k_prompt: Tensor, v_prompt: Tensor, layout: SharedPromptLayout
    ) -> Tensor:
        assert layout.groups is not None
        o1, l1 = attend(layout.groups.pad(q), k_prompt, v_prompt, mask=layout.prompt_mask)
        o2, l2 = torch.empty_like(q), l1.new_empty(q.shape[:2])
        for tiling in layout.responses:
            o, lse = attend(tiling.pad(q), tiling.pad(k), tiling.pad(v), causal=True)
            tiling.unpad_into(o2, o)
            tiling.unpad_into(l2, lse)
        o, lse = merge(layout.groups.unpad(o1), layout.groups.unpad(l1), o2, l2)
        ctx.save_for_backward(q, k, v, k_prompt, v_prompt, o, lse)
        ctx.layout = layout
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, k_prompt, v_prompt, o, lse = ctx.saved_tensors
        layout = ctx.layout
        grad_o, of_group, merged_o, merged_lse = (layout.groups.pad(x) for x in (grad, q, o, lse))
        grad_q1, grad_k_prompt, grad_v_prompt = attend_backward(
            grad_o, of_group, k_prompt, v_prompt, merged_o, merged_lse, mask=layout.prompt_mask
        )
        grad_q2, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for tiling in layout.responses:
            grads = attend_backward(*(tiling.pad(x) for x in (grad, q, k, v, o, lse)), causal=True)
            for packed, part in zip((grad_q2, grad_k, grad_v), grads, strict=True):
                tiling.unpad_into(packed, part)
        return grad_q2.add_(layout.groups.unpad(grad_q1)), grad_k, grad_v, grad_k_prompt, grad_v_prompt, None


def shared_prompt_attention(q: Tensor, k: Tensor, v: Tensor, layout: SharedPromptLayout) -> Tensor:
    """Causal attention of every response over [its prompt, itself], and of every prompt over itself.

    Shapes: q [U, Hq, D], k and v [U, Hkv, D], with U the tokens of all prompts, then those of all responses, packed as
    `layout` says; Hq is a multiple of Hkv. Returns [U, Hq, D]. Differentiable in q, k and v.
    """
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    (q_prompt, q_own), (k_prompt, k_own), (v_prompt, v_own) = (x.split(layout.sizes) for x in (q, k, v))

    prompt = [layout.prompts.pad(x) for x in (q_prompt, k_prompt, v_prompt)]
    q_prompt, k_prompt, v_prompt = (x.transpose(1, 2) for x in prompt)
    out_prompt = scaled_dot_product_attention(q_prompt, k_prompt, v_prompt, is_causal=True)
    out_prompt = layout.prompts.unpad(out_prompt.transpose(1, 2))
    if layout.groups is None:
        return out_prompt
    return torch.cat([out_prompt, MergedAttention.apply(q_own, k_own, v_own, *prompt[1:], layout)])
