"""The elementwise parts of a decoder layer: residual addition with RMS norm, rotary embedding,
SwiGLU.

One matrix multiplication computes q, k and v, and one gate and up. TORCH_OPS implements the parts
in PyTorch, layer_kernels.py as operators.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Rotary(NamedTuple):
    """cos and sin [P, 1, D/2], and the row of each token [U] int64; None: row u for token u.

    TORCH_OPS takes them in the compute dtype and without positions, KERNELS in float32.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor | None = None


class HeadNorms(NamedTuple):
    """Weights [D] of the RMS norms of each query head and of each key head (Qwen3)."""

    q: Tensor
    k: Tensor
    eps: float


Heads = tuple[Tensor, Tensor, Tensor]  # q [U, Hq, D], k and v [U, Hkv, D]


class LayerOps(NamedTuple):
    # (x [U, H], delta [U, H] or None for 0, weight [H], eps) -> x + delta, and its norm
    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    # ([q | k | v] [U, (Hq + 2 Hkv) D], (Hq, Hkv, Hkv), norms, rotary) -> q and k, normed and
    # rotated, and v
    rotate_heads: Callable[[Tensor, tuple[int, int, int], HeadNorms | None, Rotary], Heads]
    # ([gate | up] [U, 2 F]) -> silu(gate) up [U, F]
    swiglu: Callable[[Tensor], Tensor]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def _add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x = x if delta is None else x + delta
    return x, _rms_norm(x, weight, eps)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate x [U, heads, D]: dimension i with i + D/2. Tables have x's dtype."""
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * rotary.cos - x2 * rotary.sin, x2 * rotary.cos + x1 * rotary.sin], -1)


def _rotate_heads(
    packed: Tensor, counts: tuple[int, int, int], norms: HeadNorms | None, rotary: Rotary
) -> Heads:
    q, k, v = packed.unflatten(1, (sum(counts), -1)).split(counts, 1)
    if norms is not None:
        q, k = _rms_norm(q, norms.q, norms.eps), _rms_norm(k, norms.k, norms.eps)
    return rotate(q, rotary), rotate(k, rotary), v


def _swiglu(packed: Tensor) -> Tensor:
    gate, up = packed.chunk(2, -1)
    return F.silu(gate) * up


TORCH_OPS = LayerOps(_add_rms_norm, _rotate_heads, _swiglu)
