"""Attention over a forest of prefixes, whose keys and values are computed once.

On a CPU it is one kernel (csrc/cpu/attention.cpp), elsewhere FlashAttention of the segments and of
each level, merged exactly. With a sliding window, a soft cap or sinks, each segment gets a copy of
the keys and values above it (docs/prefix_trees.md)."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import attention as registry

from maxrl_fast.errors import InputError
from maxrl_fast.model.recurrence import Levels, levels_of
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.dispatch import KernelLaunch, check_first_order
from maxrl_fast.records import cumulative, ranges
from maxrl_fast.runtime.device import to_device

_HALF = (torch.bfloat16, torch.float16)
# What can replace torch's FlashAttention-2, by the major compute capability, in the order in which
# it is tried: FlashAttention-3 was written for Hopper (9) and FlashAttention-4 for Blackwell (10).
# No stopwatch decides, so a machine always computes the same numbers.
_FA4 = ("FA4", "flash_attn.cute.interface")
IMPLEMENTATIONS = {9: (("FA3", "flash_attn_interface"), _FA4), 10: (_FA4,)}

Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v


@dataclass(frozen=True)
class VarlenSpec:
    """Sequence b of the packed queries attends to sequence b of the packed keys. In a causal one
    the last query attends to all keys, and each query before it to one key fewer."""

    q_lengths: Tensor  # [B] int64, on the host
    k_lengths: Tensor  # [B] int64, on the host
    device: torch.device
    causal: bool = False
    window: int = 0  # as of AttentionVariant, as is softcap
    softcap: float = 0.0

    @cached_property
    def varlen(self) -> tuple[Tensor, Tensor, int, int]:
        """cu_seqlens of queries and keys, int32 [B+1] on the device, and the longest."""
        cu_q, cu_k = to_device(
            self.device, *(cumulative(x).to(torch.int32) for x in (self.q_lengths, self.k_lengths))
        )
        # At a maximum of 1 the kernels reorder heads as for decoding, which requires one query in
        # every sequence.
        return cu_q, cu_k, max(int(self.q_lengths.max()), 2), int(self.k_lengths.max())

    @cached_property
    def parts(self) -> list[tuple[slice, slice, Tensor]]:
        """Of each sequence with queries: rows, keys, and what attends to what [1, Lq, Lk]."""
        parts, q_end, k_end = [], 0, 0
        for q, k in zip(self.q_lengths.tolist(), self.k_lengths.tolist(), strict=True):
            q_end, k_end = q_end + q, k_end + k
            keys = torch.arange(k, device=self.device)
            at = keys[k - q :, None] if self.causal else k  # the key at which each query is
            mask = (keys <= at) & (keys > at - (self.window or k + 1))
            if q:
                own = mask.expand(1, q, k)
                parts.append((slice(q_end - q, q_end), slice(k_end - k, k_end), own))
        return parts


class Kernel(NamedTuple):
    """Softmax attention with scores scaled by D**-0.5."""

    name: str  # printed at the start of a run
    # Of q [Tq, Hq, D], k and v [Tk, Hkv, D], packed as in the spec, where Hq is a multiple of Hkv:
    # o [Tq, Hq, D] and its log-sum-exp l [Tq, Hq], at least float32.
    forward: Callable[[Tensor, Tensor, Tensor, VarlenSpec], tuple[Tensor, Tensor]]
    # (grad, q, k, v, o, l, spec): o and l may be merged with another attention
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, VarlenSpec], Gradients]


def kernel_for(
    device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float = 0.0
) -> Kernel:
    fits = dtype in _HALF and head_dim % 8 == 0 and head_dim <= 256
    if device.type != "cuda" or not fits or not _is_recent(device):
        return REFERENCE
    if _flash_attn() and (softcap or registry.current_flash_attention_impl() is None):
        return FLASH_ATTN
    return REFERENCE if softcap else TORCH_VARLEN


@cache
def _is_recent(device: torch.device) -> bool:
    """FlashAttention needs Ampere or newer."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def choose(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    is_anywhere: Callable[[bool], bool] = lambda failed: failed,
) -> list[str]:
    """Activate the first installed implementation that computes the right numbers on this GPU with
    these numbers of query and key heads and head size. Returns sentences on what was tried.
    is_anywhere: whether a flag is set on any rank, because all take the same."""
    sentences = list[str]()
    if kernel_for(device, dtype, heads[2]) is REFERENCE:
        return []
    for name, module in IMPLEMENTATIONS.get(torch.cuda.get_device_capability(device)[0], ()):
        if is_anywhere(not _is_installed(module)):
            continue
        said, reason = f"attention: {name} of {module}", _fault(name, device, dtype, heads)
        if not is_anywhere(bool(reason)):
            return [*sentences, f"{said} runs in place of PyTorch's FlashAttention-2"]
        if registry.current_flash_attention_impl() is not None:
            registry.restore_flash_attention_impl()
        reason = reason or "it failed on another rank"
        sentences.append(f"{said} was tried and refused: {reason}")
    return sentences


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False


def _fault(name: str, device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]) -> str:
    """Activate an implementation; return what it does wrong, "" if nothing."""
    try:
        registry.activate_flash_attention_impl(name)
        off, most = _probe(device, dtype, heads), 2 * torch.finfo(dtype).eps
    except Exception as error:  # third-party import and kernels: anything; reported at the start
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return "" if off <= most else f"it is off by {off:.2g}, relative, at most {most:.2g}"


def _probe(device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]) -> float:
    """Return the largest relative error of forward and backward pass and decoding, against float32
    PyTorch."""
    lengths, generator = torch.tensor([129, 3, 64]), torch.Generator().manual_seed(0)
    spec = VarlenSpec(lengths, lengths, device, causal=True)
    q, k, v, grad = (
        torch.randn(196, heads[i], heads[2], generator=generator).to(device, dtype)
        for i in (0, 1, 1, 0)
    )
    wide = q.float(), k.float(), v.float()
    o, lse = REFERENCE.forward(*wide, spec)
    wanted = [o, lse, *REFERENCE.backward(grad.float(), *wide, o, lse, spec)]
    found = [*TORCH_VARLEN.forward(q, k, v, spec)]
    found += TORCH_VARLEN.backward(grad, q, k, v, o.to(dtype), lse, spec)
    # as rollout/decode_slots.py: four queries to the first keys of each of three prompts
    counts, starts = torch.tensor([64, 1, 40]), torch.arange(4, dtype=torch.int32, device=device)
    some_k, some_v = (x[:192].unflatten(0, (3, 64)) for x in wide[1:])
    mask = (torch.arange(64) < counts[:, None, None]).to(device)
    wanted.append(attend(wide[0][:12].unflatten(0, (3, 4)), some_k, some_v, mask)[0].flatten(0, 1))
    sizes = starts * 4, starts * 64, 4, 64, counts.to(device, torch.int32)
    found.append(attend_prompts(q[:12], k[:192], v[:192], *sizes)[0])
    errors = [(a.float() - b).norm() / b.norm() for a, b in zip(found, wanted, strict=True)]
    return float(torch.stack(errors).max())


def attend_prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    cache_starts: Tensor,
    most: int,
    width: int,
    lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """`forward` of queries starts[g] to starts[g + 1] - 1, at most `most`, to the first lengths [G]
    (int32) of `width` keys from cache_starts[g] on."""
    # With a maximum query length of 1 the kernel reorders heads.
    sizes = starts, cache_starts, max(most, 2), width
    o, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *sizes, 0.0, False, False, seqused_k=lengths
    )
    return o, lse.t()


# On a GPU in half precision: packed sequences without padding.


def _window(spec: VarlenSpec) -> dict[str, int]:
    return {"window_size_left": spec.window - 1, "window_size_right": 0} if spec.window else {}


def _torch_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, spec: VarlenSpec
) -> tuple[Tensor, Tensor]:
    o, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *spec.varlen, 0.0, spec.causal, False, **_window(spec)
    )
    return o, lse.t()


def _torch_varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: VarlenSpec
) -> Gradients:
    # random state of the dropout, which is off
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    grads: Gradients = torch.ops.aten._flash_attention_backward(
        *(grad.contiguous(), q, k, v, o, lse.t().contiguous(), *spec.varlen),
        *(0.0, spec.causal, no_dropout, unused),
        **_window(spec),
    )
    return grads


@cache
def _flash_attn() -> Any:
    """Return flash-attn's varlen functions; None if the package is absent or older than 2.7."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        package = importlib.import_module("flash_attn")
        interface = importlib.import_module("flash_attn.flash_attn_interface")
        major, minor = str(package.__version__).split(".")[:2]
        return interface if (int(major), int(minor)) >= (2, 7) else None
    except ImportError as error:
        if getattr(error, "name", None) == "flash_attn.flash_attn_interface":
            # a package of the same name without FlashAttention-2, such as FlashAttention-4
            return None
        raise InputError(
            f"flash-attn is installed but cannot be imported ({error}); reinstall it for torch "
            f"{torch.__version__}, or uninstall it: torch's own FlashAttention then runs"
        ) from error


def _flash_attn_forward(q: Tensor, k: Tensor, v: Tensor, spec: VarlenSpec) -> tuple[Tensor, Tensor]:
    o, lse, *_ = _flash_attn()._flash_attn_varlen_forward(
        *(q, k, v, *spec.varlen),
        **{"dropout_p": 0.0, "softmax_scale": q.shape[-1] ** -0.5, "causal": spec.causal},
        **_window(spec),
        **({"softcap": spec.softcap} if spec.softcap else {}),
    )
    return o, lse.t()


def _flash_attn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: VarlenSpec
) -> Gradients:
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _flash_attn()._flash_attn_varlen_backward(
        *(grad.contiguous(), q, k, v, o, lse.t().contiguous(), *grads, *spec.varlen),
        **{"dropout_p": 0.0, "softmax_scale": q.shape[-1] ** -0.5, "causal": spec.causal},
        **({"window_size_left": -1, "window_size_right": -1} | _window(spec)),  # -1: no limit
        **{"softcap": spec.softcap, "alibi_slopes": None},
        # as torch's own kernel; otherwise gradients of queries are added by atomics
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return grads


# Elsewhere: matrix multiplications and softmax, which store all scores.


def _by_head(x: Tensor, key_heads: int) -> Tensor:
    """Return [B, Hkv, R, L, ...] of [B, L, Hkv R, ...]."""
    return x.unflatten(2, (key_heads, -1)).movedim(1, 3)


def _by_token(x: Tensor) -> Tensor:
    return x.movedim(3, 1).flatten(2, 3)


def _upcast(*tensors: Tensor) -> list[Tensor]:
    """Cast to float32 at least: bfloat16 scores before the softmax would triple its error."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _scores(q: Tensor, k: Tensor, mask: Tensor, softcap: float) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).mul_(q.shape[-1] ** -0.5)
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    return scores.masked_fill_(~mask[:, None, None], float("-inf"))


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return o [B, Lq, Hq, D], 0 for a query of no key, and l [B, Lq, Hq], for k and v [B, Lk, Hkv,
    D] where mask [B, Lq, Lk] is true."""
    wide_q, wide_k, wide_v = (_by_head(x, k.shape[2]) for x in _upcast(q, k, v))
    scores = _scores(wide_q, wide_k, mask, softcap)
    lse = scores.logsumexp(-1).clamp_min(torch.finfo(scores.dtype).min)
    o = scores.sub_(lse[..., None]).exp_() @ wide_v
    return _by_token(o).to(v.dtype), _by_token(lse)


def _reference_forward(q: Tensor, k: Tensor, v: Tensor, spec: VarlenSpec) -> tuple[Tensor, Tensor]:
    o = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, keys, mask in spec.parts:
        part = attend(q[None, rows], k[None, keys], v[None, keys], mask, spec.softcap)
        o[rows], lse[rows] = part[0][0], part[1][0]
    return o, lse


def _reference_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: VarlenSpec
) -> Gradients:
    # keys without queries get gradient 0
    totals = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    scale, heads = q.shape[-1] ** -0.5, k.shape[1]
    for rows, keys, mask in spec.parts:
        grad_o, own_q, own_o = (_by_head(x[None, rows], heads) for x in _upcast(grad, q, o))
        own_k, own_v = (_by_head(x[None, keys], heads) for x in _upcast(k, v))
        scores = _scores(own_q, own_k, mask, spec.softcap)
        slope: Any = scale
        if spec.softcap:
            slope = scale * (1 - (scores / spec.softcap).clamp_min(-1).square())
        p = scores.sub_(_by_head(lse[None, rows], heads)[..., None]).exp_()  # 0 where masked
        grad_s = grad_o @ own_v.transpose(-1, -2)
        grad_s.sub_((grad_o * own_o).sum(-1, keepdim=True)).mul_(p).mul_(slope)
        totals[0][rows] = _by_token(grad_s @ own_k)[0]
        totals[1][keys] = _by_token((grad_s.transpose(-1, -2) @ own_q).sum(2, keepdim=True))[0]
        totals[2][keys] = _by_token((p.transpose(-1, -2) @ grad_o).sum(2, keepdim=True))[0]
    return totals


REFERENCE = Kernel(
    "torch matmul-softmax, which stores all scores", _reference_forward, _reference_backward
)
TORCH_VARLEN = Kernel("torch flash varlen", _torch_varlen_forward, _torch_varlen_backward)
FLASH_ATTN = Kernel("flash-attn varlen", _flash_attn_forward, _flash_attn_backward)


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
            if window:  # no query of the segment attends to more
                paths = [x[-(len(own) + window - 1) :] for x, own in zip(paths, rows, strict=True)]
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
        kernel = kernel_for(q.device, q.dtype, q.shape[-1], spec.softcap)
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
        kernel = kernel_for(q.device, q.dtype, q.shape[-1], spec.softcap)
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
    return "C++" if is_own else kernel_for(device, dtype, head_dim).name


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
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o = torch.empty_like(q)
        # the log-sum-exp to base 2
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        inputs = q, k, v, o, lse, lengths.contiguous(), parents.contiguous()
        _launch("tree_attention", *inputs)
        ctx.save_for_backward(*inputs)
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order("tree_attention")
        saved = ctx.saved_tensors  # which activation checkpointing gives once
        grads = tuple(map(torch.empty_like, saved[:3]))
        _launch("tree_attention_backward", *saved, grad.contiguous(), *grads)
        return *grads, None, None


def _launch(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    lengths: Tensor,
    parents: Tensor,
    grad: Tensor | None = None,
    *grads: Tensor,
) -> None:
    call, (num_tokens, heads, head_dim), key_heads = KernelLaunch(q.device), q.shape, k.shape[1]
    call.launch(
        kernel,
        dtype=q.dtype,
        num_tokens=num_tokens,
        num_segments=len(lengths),
        **call.addresses(torch.int64, len(lengths), lengths=lengths, parents=parents),
        heads=heads,
        key_heads=key_heads,
        head_dim=head_dim,
        **call.addresses(q.dtype, *q.shape, q=q, grad=grad),
        **call.addresses(q.dtype, num_tokens, key_heads, head_dim, k=k, v=v),
        o=o,
        lse=lse,
        **dict(zip_longest(("grad_q", "grad_k", "grad_v"), grads)),
    )
