"""FlashAttention of packed sequences, forward and backward, with the log-sum-exp.

`kernel_for` picks the available backend. On a GPU in half precision: the implementation that
flash_choice.py activated, else the flash-attn package if it is right, else torch's; on a CPU
torch's CPU kernel; otherwise plain PyTorch.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from maxrl_fast.errors import InputError
from maxrl_fast.model.tiling import Tiling, causal_mask, length_buckets, padding_mask, tile
from maxrl_fast.records import cumulative
from maxrl_fast.runtime.device import to_device

_HALF = (torch.bfloat16, torch.float16)
refused = set[str]()  # names of kernels that flash_choice.py found wrong on this GPU


@dataclass(frozen=True)
class VarlenSpec:
    """Varlen attention: sequence b of the packed queries attends to sequence b of the packed keys.

    In a causal sequence the last query attends to all keys, and each query before it to one key
    fewer. A sequence without queries may have keys; one with queries must have keys.
    """

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
        """cu_seqlens of queries and keys, int32 [B+1] on the device, and their maximum lengths."""
        cu_q, cu_k = to_device(
            self.device, *(cumulative(x).to(torch.int32) for x in (self.q_lengths, self.k_lengths))
        )
        # At a maximum of 1 the kernels reorder heads as for decoding, which requires one query in
        # every sequence.
        return cu_q, cu_k, max(int(self.q_lengths.max()), 2), int(self.k_lengths.max())

    @cached_property
    def tiles(self) -> list[tuple[Tiling, Tiling, Tensor | None]]:
        """Padded tiles of queries and keys, by similar length, and the mask of each tile."""
        tiles = []
        for chosen in length_buckets(self.q_lengths):
            mask = self._mask(self.q_lengths[chosen], self.k_lengths[chosen])
            q, k = (tile(x, chosen, self.device) for x in (self.q_lengths, self.k_lengths))
            tiles.append((q, k, None if mask is None else mask.to(self.device)))
        return tiles

    def _mask(self, q_lengths: Tensor, k_lengths: Tensor) -> Tensor | None:
        """Return the mask of a tile; None if the kernel's causal mask, or none, is enough."""
        if not self.causal:
            return padding_mask(k_lengths)
        if not self.window and torch.equal(q_lengths, k_lengths):
            return None
        return causal_mask(q_lengths, k_lengths, self.window)


def forward(q: Tensor, k: Tensor, v: Tensor, spec: VarlenSpec) -> tuple[Tensor, Tensor]:
    """Return softmax attention with scores scaled by D**-0.5, and its log-sum-exp.

    q [Tq, Hq, D], k and v [Tk, Hkv, D], packed as in `spec`; Hq is a multiple of Hkv. Returns o
    [Tq, Hq, D] and l [Tq, Hq] (float32; float64 for float64 inputs).
    """
    return kernel_for(q.device, q.dtype, q.shape[-1], spec.softcap).forward(q, k, v, spec)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: VarlenSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; o and lse may be merged with another attention."""
    kernel = kernel_for(q.device, q.dtype, q.shape[-1], spec.softcap)
    return kernel.backward(grad, q, k, v, o, lse, spec)


@dataclass(frozen=True)
class Kernel:
    name: str  # printed at the start of a run
    forward: Callable[[Tensor, Tensor, Tensor, VarlenSpec], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, VarlenSpec], tuple[Tensor, Tensor, Tensor]
    ]


def kernel_for(
    device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float = 0.0
) -> Kernel:
    if device.type == "cpu":
        return PADDED_CPU
    fits = dtype in _HALF and head_dim % 8 == 0 and head_dim <= 256
    if device.type != "cuda" or not fits or not _is_recent(device):
        return PADDED_REFERENCE
    has_package = FLASH_ATTN.name not in refused and _flash_attn()
    if has_package and (softcap or current_flash_attention_impl() is None):
        return FLASH_ATTN
    return PADDED_REFERENCE if softcap else TORCH_VARLEN


@cache
def _is_recent(device: torch.device) -> bool:
    """Whether the GPU is Ampere or newer, which FlashAttention needs."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


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
) -> tuple[Tensor, Tensor, Tensor]:
    # random state of the dropout, which is off
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
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
) -> tuple[Tensor, Tensor, Tensor]:
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


# Elsewhere: padded tiles.


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute `forward` for sequences of equal length: q [B, Lq, heads, D], k and v [B, Lk, heads,
    D].

    mask is added to the scores and broadcasts to [B, heads, Lq, Lk]. Returns o [B, Lq, heads, D]
    and l [B, Lq, heads]. Lq and Lk must not be 0: torch's CPU kernel would crash.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.device.type == "cpu" and not softcap:
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=_for_cpu(mask, q)
        )
    else:
        o, lse = attend_reference(q, k, v, causal, mask, softcap)
    return o.transpose(1, 2), lse.transpose(1, 2)


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `backward` for sequences of equal length."""
    grad, q, k, v, o, lse = (x.transpose(1, 2) for x in (grad, q, k, v, o, lse))
    if q.device.type == "cpu" and not softcap:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = kernel(grad, q, k, v, o, lse, 0.0, causal, attn_mask=_for_cpu(mask, q))
    else:
        grads = attend_backward_reference(grad, q, k, v, o, lse, causal, mask, softcap)
    return tuple(x.transpose(1, 2) for x in grads)


def _for_cpu(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """The CPU kernel would misread a float32 mask of float64 queries."""
    return None if mask is None else mask.to(torch.promote_types(q.dtype, torch.float32))


def _upcast(*tensors: Tensor) -> list[Tensor]:
    """Cast to float32 at least: bfloat16 scores before the softmax would triple its error."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, softcap: float) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute `attend` in plain PyTorch, for [B, heads, L, D]."""
    wide_q, wide_k, wide_v = _upcast(q, k, v)
    scores = _scores(wide_q, wide_k, causal, mask, softcap)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ wide_v).to(v.dtype), lse


def attend_backward_reference(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attend_backward` in plain PyTorch, for [B, heads, L, D]."""
    dtype = q.dtype
    grad, q, k, v, o = _upcast(grad, q, k, v, o)
    scores = _scores(q, k, causal, mask, softcap)
    p = (scores - lse[..., None]).exp()
    grad_p = grad @ v.transpose(-1, -2) - (grad * o).sum(-1, keepdim=True)
    grad_s = p * grad_p * q.shape[-1] ** -0.5
    if softcap:
        grad_s = grad_s * (1 - (scores / softcap).clamp_min(-1).square())  # masked scores are -inf
    grads = grad_s @ k, grad_s.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad
    return grads[0].to(dtype), grads[1].to(dtype), grads[2].to(dtype)


def _repeat_heads(x: Tensor, repeats: int) -> Tensor:
    """Expand [B, L, Hkv, D] to [B, L, Hkv * repeats, D]."""
    return x if repeats == 1 else x[:, :, :, None].expand(-1, -1, -1, repeats, -1).flatten(2, 3)


def _how(spec: VarlenSpec, mask: Tensor | None) -> dict[str, Any]:
    """Return the options of `attend` for a tile; a mask already contains the causal mask."""
    return {"causal": spec.causal and mask is None, "mask": mask, "softcap": spec.softcap}


def _padded_forward(q: Tensor, k: Tensor, v: Tensor, spec: VarlenSpec) -> tuple[Tensor, Tensor]:
    o = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    repeats = q.shape[1] // k.shape[1]
    for q_tile, k_tile, mask in spec.tiles:
        keys = (_repeat_heads(k_tile.pad(x), repeats) for x in (k, v))
        part = attend(q_tile.pad(q), *keys, **_how(spec, mask))
        q_tile.unpad_into(o, part[0])
        q_tile.unpad_into(lse, part[1])
    return o, lse


def _padded_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: VarlenSpec
) -> tuple[Tensor, Tensor, Tensor]:
    # keys without queries get gradient 0
    grads = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    repeats = q.shape[1] // k.shape[1]
    for q_tile, k_tile, mask in spec.tiles:
        grad_o, padded_q, padded_o, padded_l = (q_tile.pad(x) for x in (grad, q, o, lse))
        padded_k, padded_v = (_repeat_heads(k_tile.pad(x), repeats) for x in (k, v))
        grad_q, *grad_kv = attend_backward(
            grad_o, padded_q, padded_k, padded_v, padded_o, padded_l, **_how(spec, mask)
        )
        q_tile.unpad_into(grads[0], grad_q)
        for packed, part in zip(grads[1:], grad_kv, strict=True):
            part = part if repeats == 1 else part.unflatten(2, (-1, repeats)).sum(3)
            k_tile.unpad_into(packed, part)
    return grads


PADDED_CPU = Kernel("torch flash", _padded_forward, _padded_backward)
PADDED_REFERENCE = Kernel(
    "torch matmul-softmax, which stores all scores", _padded_forward, _padded_backward
)
TORCH_VARLEN = Kernel("torch flash varlen", _torch_varlen_forward, _torch_varlen_backward)
FLASH_ATTN = Kernel("flash-attn varlen", _flash_attn_forward, _flash_attn_backward)
