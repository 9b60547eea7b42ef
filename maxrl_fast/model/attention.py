"""Attention over a forest of prefixes, whose keys and values are computed once.

On a CPU it is one kernel (csrc/cpu/attention.cpp), elsewhere FlashAttention of the segments and of
each level, merged exactly. With a sliding window, a soft cap or sinks, each segment gets a copy of
the keys and values above it (docs/prefix_trees.md)."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.model import flash
from maxrl_fast.model.flash import VarlenSpec
from maxrl_fast.model.recurrence import Levels, levels_of
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.dispatch import KernelLaunch, check_first_order, dtype_name
from maxrl_fast.records import ranges
from maxrl_fast.runtime.device import to_device

DTYPES = (torch.float32, torch.float64, torch.bfloat16)  # of the kernel
LARGEST_HEAD = 256


def merge(o1: Tensor, l1: Tensor, o2: Tensor, l2: Tensor) -> tuple[Tensor, Tensor]:
    """Join the attentions over two sets of keys: o [..., D], l [...]."""
    weight = torch.sigmoid(l1 - l2)[..., None].to(o1.dtype)  # exp(l1 - l)
    return torch.lerp(o2, o1, weight), torch.logaddexp(l1, l2)


@dataclass(frozen=True)
class AttentionVariant:
    window: int = 0  # a token attends to the last `window` tokens, itself included; 0: to all
    softcap: float = 0.0  # scores s become softcap * tanh(s / softcap); 0: they stay
    # [Hq]: scores of one more key for each head, whose value is 0 (gpt-oss)
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return not self.window and not self.softcap and self.sinks is None


PLAIN_ATTENTION = AttentionVariant()

# Rows of the queries and of the keys, Tensors, or None for all; and their attention.
Part = tuple[Any, Any, VarlenSpec]


@dataclass(frozen=True)
class Forest:
    """Segments of tokens in depth-first order: a token attends to the earlier ones of its segment,
    itself, and all of the segments above."""

    lengths: Tensor  # [M] int64, tokens of each segment, at least 1, on the host
    parents: Tensor  # [M] int64, the segment above, before it in the order; -1: none; on the host
    device: torch.device
    # by window and soft cap
    copies: dict[tuple[int, float], tuple[Tensor, VarlenSpec]] = field(default_factory=dict)

    @classmethod
    def roots(cls, lengths: Tensor) -> "Forest":
        """Packed causal sequences of lengths [M], for tensors on their device."""
        on_host = lengths.cpu()
        return cls(on_host, torch.full_like(on_host, -1), lengths.device)

    @cached_property
    def last(self) -> Tensor:
        """[M] int64, the last segment below each one, or itself."""
        last, has_parent = torch.arange(len(self.parents)), self.parents >= 0
        last.scatter_reduce_(0, self.parents[has_parent], last[has_parent], "amax")
        while not torch.equal(last, further := last[last]):
            last = further
        return last

    @cached_property
    def ends(self) -> Tensor:
        """[M] int64: token i sees token j where j <= i < end of j's segment."""
        return self.lengths.cumsum(0)[self.last]

    @cached_property
    def parts(self) -> list[Part]:
        """The attention within the segments, and that of all tokens below those of each depth, in
        which segments with nothing below are left out: FlashAttention starts blocks for each."""
        stops = self.lengths.cumsum(0)
        below = self.ends - stops  # [M] tokens
        # segments before each that have not ended
        depth = torch.arange(len(below)) - (self.last + 1).bincount().cumsum(0)[:-1]
        order = depth.argsort(stable=True)
        order = order[below[order] > 0]
        counts, stops = depth[order].bincount().tolist(), stops[order]
        q, k = below[order], self.lengths[order]
        index = to_device(self.device, ranges(stops, q), ranges(stops - k, k))
        levels = q.split(counts), k.split(counts)
        parts = [x.split([int(n.sum()) for n in y]) for x, y in zip(index, levels, strict=True)]
        specs = [VarlenSpec(*x, self.device) for x in zip(*levels, strict=True)]
        own = VarlenSpec(self.lengths, self.lengths, self.device, causal=True)
        return [(None, None, own), *zip(*parts, specs, strict=True)]

    @cached_property
    def padded(self) -> Levels:
        return levels_of(self.lengths, self.parents, self.device)

    def copied_keys(self, window: int, softcap: float) -> tuple[Tensor, VarlenSpec]:
        """Return the index of the keys that each segment attends to, and the attention, whose
        window is 0 where no sequence is longer."""
        key = window, softcap
        if key not in self.copies:
            rows = torch.arange(int(self.lengths.sum())).split(self.lengths.tolist())
            paths: list[Tensor] = []  # the tokens of each segment after those above
            for own, parent in zip(rows, self.parents.tolist(), strict=True):
                paths.append(torch.cat([paths[parent], own]) if parent >= 0 else own)
            window = window if window < max(map(len, paths), default=0) else 0
            if window:
                pairs = zip(paths, rows, strict=True)
                paths = [x[max(len(x) - len(own) - window + 1, 0) :] for x, own in pairs]
            lengths = self.lengths, torch.tensor([len(x) for x in paths], dtype=torch.int64)
            spec = VarlenSpec(*lengths, self.device, causal=True, window=window, softcap=softcap)
            self.copies[key] = torch.cat([torch.arange(0), *paths]).to(self.device), spec
        return self.copies[key]


class MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, parts: list[Part]
    ) -> Tensor:
        (_, keys, spec), *levels = parts
        kernel = flash.kernel_of(q, spec)
        o, lse = kernel.forward(q, _chosen(k, keys), _chosen(v, keys), spec)
        for rows, keys, spec in levels:
            part = kernel.forward(q[rows], _chosen(k, keys), _chosen(v, keys), spec)
            merged = merge(*part, o[rows], lse[rows])
            o.index_copy_(0, rows, merged[0])
            lse.index_copy_(0, rows, merged[1])
        if sinks is not None:  # merged as a part of the keys with the value 0
            o = o * torch.sigmoid(lse - sinks)[..., None].to(o.dtype)
            lse = torch.logaddexp(lse, sinks.to(lse.dtype))
        ctx.save_for_backward(q, k, v, o, lse, sinks)
        ctx.parts = parts
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order("tree_attention")
        q, k, v, o, lse, sinks = ctx.saved_tensors
        (_, keys, spec), *levels = ctx.parts
        kernel = flash.kernel_of(q, spec)
        grads = kernel.backward(grad, q, _chosen(k, keys), _chosen(v, keys), o, lse, spec)
        if keys is not None:
            # The gradients of copies are added in float32 and, on a GPU too, in one order.
            total = [torch.zeros_like(x, dtype=lse.dtype) for x in (k, v)]
            for x, part in zip(total, grads[1:], strict=True):
                x.index_put_((keys,), part.to(x.dtype), accumulate=True)
            grads = grads[0], total[0].to(k.dtype), total[1].to(v.dtype)
        for rows, keys, spec in levels:
            of_rows = grad[rows], q[rows], k[keys], v[keys], o[rows], lse[rows]
            # each row once: in one order
            parts = kernel.backward(*of_rows, spec)
            for x, index, part in zip(grads, (rows, keys, keys), parts, strict=True):
                x.index_add_(0, index, part)
        grad_sinks = None
        if sinks is not None:
            by_head = (grad.to(lse.dtype) * o.to(lse.dtype)).sum(-1)  # [U, Hq]
            grad_sinks = -((sinks - lse).exp() * by_head).sum(0).to(sinks.dtype)
        return *grads, grad_sinks, None


def _chosen(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x[index]


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, forest: Forest, variant: AttentionVariant = PLAIN_ATTENTION
) -> Tensor:
    """Return causal attention of each segment over the segments above it and itself [U, Hq, D], for
    q [U, Hq, D], k and v [U, Hkv, D] of a forest of U tokens. Differentiable in q, k, v and
    sinks."""
    parts = forest.parts
    if not variant.is_plain:
        index, spec = forest.copied_keys(variant.window, variant.softcap)
        if spec.window or spec.softcap or variant.sinks is not None:
            parts = [(None, index, spec)]
    if parts is forest.parts and has_kernel(q.device, q.dtype, q.shape[-1]):
        out: Tensor = _TreeAttention.apply(q, k, v, forest.lengths, forest.parents)
    else:
        out = MergedAttention.apply(q, k, v, variant.sinks, parts)
    return out


def kernel_name(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    is_own = has_kernel(device, dtype, head_dim)
    return "C++" if is_own else flash.kernel_for(device, dtype, head_dim).name


def has_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    is_cpu = device.type == "cpu" and not dispatch.is_gpu(device)
    return is_cpu and dtype in DTYPES and head_dim <= LARGEST_HEAD


# On a CPU: keys above a segment and its own in one softmax. Scores, probabilities and sums are in
# float32, in float64 for float64 inputs. Results are bitwise the same for any number of threads,
# and outputs for any way of sharing prefixes.


class _TreeAttention(torch.autograd.Function):
    """Raises ValueError if lengths [M] do not add up to U, or parents [M] are not those of segments
    in depth-first order."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, parents: Tensor
    ) -> Tensor:
        call, q, k, v = KernelLaunch(q.device), q.contiguous(), k.contiguous(), v.contiguous()
        o = torch.empty_like(q)
        # the log-sum-exp to base 2
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        call.launch(
            "tree_attention",
            **_inputs(call, q, k, v, lengths, parents),
            o=o,
            lse=lse,
            **dict.fromkeys(("grad", "grad_q", "grad_k", "grad_v")),
        )
        ctx.save_for_backward(q, k, v, o, lse, lengths, parents)
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order("tree_attention")
        q, k, v, o, lse, lengths, parents = ctx.saved_tensors
        call, grad = KernelLaunch(q.device), grad.contiguous()
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        call.launch(
            "tree_attention_backward",
            **_inputs(call, q, k, v, lengths, parents),
            o=o,
            lse=lse,
            grad=call.address("grad", grad, q.dtype, q.shape),
            **dict(zip(("grad_q", "grad_k", "grad_v"), grads, strict=True)),
        )
        return *grads, None, None


def _inputs(
    call: KernelLaunch, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, parents: Tensor
) -> Any:
    if q.dtype not in DTYPES or q.dim() != 3 or k.dim() != 3:
        raise ValueError(
            f"q and k must be {', '.join(map(dtype_name, DTYPES))} [tokens, heads, head size], got "
            f"{q.dtype} {tuple(q.shape)} and {k.dtype} {tuple(k.shape)}"
        )
    (num_tokens, heads, head_dim), key_heads = q.shape, k.shape[1]
    segments = {"lengths": lengths.contiguous(), "parents": parents.contiguous()}
    return {
        "dtype": q.dtype,
        "num_tokens": num_tokens,
        "num_segments": len(lengths),
        **call.addresses(torch.int64, len(lengths), **segments),
        "heads": heads,
        "key_heads": key_heads,
        "head_dim": head_dim,
        "q": call.address("q", q, q.dtype, q.shape),
        **call.addresses(q.dtype, num_tokens, key_heads, head_dim, k=k, v=v),
    }
