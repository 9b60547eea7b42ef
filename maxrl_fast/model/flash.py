"""FlashAttention of packed sequences, forward and backward, with the log-sum-exp.

`kernel_for` picks the available backend. On a GPU in half precision: the implementation that
`choose` activated, else the flash-attn package, else torch's; otherwise plain PyTorch.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import attention as registry

from maxrl_fast.errors import InputError
from maxrl_fast.records import cumulative
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
    # a causal query attends only to the last `window` keys up to its own; 0: to all
    window: int = 0
    softcap: float = 0.0  # scores s become softcap * tanh(s / softcap); 0: they stay

    def __post_init__(self) -> None:
        if bool(((self.q_lengths > 0) & (self.k_lengths < 1)).any()):
            raise ValueError("every sequence of queries must have at least one key")

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


def kernel_of(q: Tensor, spec: VarlenSpec) -> Kernel:
    return kernel_for(q.device, q.dtype, q.shape[-1], spec.softcap)


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
    # as rollout/decode_attention.py: four queries to the first keys of each of three prompts
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
