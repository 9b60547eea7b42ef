"""Attention of every row's newest token: to the prompt that its group shares, and to its own tokens, which the newest joins.

On a GPU the first part is FlashAttention, a group's rows side by side, and the second, with the merge, one launch of
csrc/cuda/decode_attention.cu. Elsewhere both are flash.attend with masks.
"""

from functools import cached_property

import torch
from torch import Tensor

from maxrl_fast.model import flash
from maxrl_fast.model.attention import merge
from maxrl_fast.model.decoder import DecoderConfig
from maxrl_fast.ops import _gate
from maxrl_fast.ops._gate import address

Cache = tuple[Tensor, Tensor]  # keys and values

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def has_kernel(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the CUDA kernel takes attention of these sizes: heads of whole 16-byte pieces, 32 at most, 8 on a key's."""
    head_bytes = config.head_dim * torch.empty((), dtype=dtype).element_size()
    fits = dtype in _DTYPES and head_bytes % 16 == 0 and head_bytes <= 512
    fits = fits and config.num_attention_heads // config.num_key_value_heads <= 8
    return fits and _gate.is_gpu(device) and _gate.has_kernels(device)


class Step:
    """How many keys there are in one step of G groups of N rows, the same in every layer.

    Args:
        prompt_lengths: [G] int64, each at least 1.
        lengths: [G * N] int64, tokens of each row with the newest, from 1 to `width`.
        prompt_width: positions of the prompts' cache.
        width: positions of the rows' cache that are looked at, where the kernel does not run.
    """

    def __init__(self, prompt_lengths: Tensor, lengths: Tensor, prompt_width: int, width: int, in_kernel: bool):
        self.prompt_lengths, self.lengths, self.in_kernel = prompt_lengths, lengths, in_kernel
        self.prompt_width, self.width = prompt_width, width
        self.rows = len(lengths) // len(prompt_lengths)

    @cached_property
    def varlen(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where each group's queries and keys begin, int32 [G+1], and how many keys count, int32 [G]."""
        groups = torch.arange(len(self.prompt_lengths) + 1, dtype=torch.int32, device=self.lengths.device)
        return groups * self.rows, groups * self.prompt_width, self.prompt_lengths.to(torch.int32)

    @cached_property
    def masks(self) -> tuple[Tensor, Tensor]:
        """[G, 1, 1, prompt_width] and [G * N, 1, 1, width] to add to scores: 0 before each length, -inf from there on."""
        return _mask(self.prompt_lengths, self.prompt_width), _mask(self.lengths, self.width)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prompt: Cache, own: Cache) -> Tensor:
        """Attention of q [A, Hq, D] to the prompts' cache [G, prompt_width, Hkv, D] and the rows' [A, limit, Hkv, D], into
        which k and v [A, Hkv, D] of the newest tokens go first; A = G * N. Returns [A, Hq, D]."""
        o, lse = self._to_prompts(q, prompt)
        return (self._to_own_in_kernel if self.in_kernel else self._to_own)(q, k, v, own, o, lse)

    def _to_prompts(self, q: Tensor, prompt: Cache) -> tuple[Tensor, Tensor]:
        """o [A, Hq, D] and the log-sum-exp [A, Hq]."""
        if flash.kernel_for(q.device, q.dtype, q.shape[-1]) in (flash.TORCH_VARLEN, flash.FLASH_ATTN):
            cu_q, cu_k, counts = self.varlen
            # At a longest run of 1 the kernel reorders heads.
            sizes = (cu_q, cu_k, max(self.rows, 2), self.prompt_width)
            k, v = (x.flatten(0, 1) for x in prompt)
            o, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *sizes, 0.0, False, False, seqused_k=counts)
            return o, lse.t()
        # The query heads that share a key/value head become further queries of it.
        q = _by_key_head(q, prompt[0].shape[2])  # [A, R, Hkv, D]
        o, lse = flash.attend(q.view(len(self.prompt_lengths), -1, *q.shape[2:]), *prompt, mask=self.masks[0])
        return _by_query_head(o.reshape(q.shape)), _by_query_head(lse.reshape(q.shape[:-1]))

    def _to_own(self, q: Tensor, k: Tensor, v: Tensor, own: Cache, prompt_o: Tensor, prompt_lse: Tensor) -> Tensor:
        every = torch.arange(len(q), device=q.device)
        for cache, x in zip(own, (k, v), strict=True):
            cache[every, self.lengths - 1] = x
        keys, values = (cache[:, : self.width] for cache in own)
        o, lse = flash.attend(_by_key_head(q, k.shape[1]), keys, values, mask=self.masks[1])
        return merge(prompt_o, prompt_lse, _by_query_head(o), _by_query_head(lse))[0]

    def _to_own_in_kernel(self, q: Tensor, k: Tensor, v: Tensor, own: Cache, prompt_o: Tensor, prompt_lse: Tensor) -> Tensor:
        (rows, heads, dim), kv_heads, limit = q.shape, k.shape[1], own[0].shape[1]
        q, k, v, prompt_o = (x.contiguous() for x in (q, k, v, prompt_o))
        out = torch.empty_like(q)

        def at(name: str, x: Tensor, *shape: int) -> int:
            return address(name, x, q.dtype, shape, q.device)

        _gate.launch(
            "decode_attention",
            q.device,
            dtype=_DTYPES[q.dtype],
            num_rows=rows,
            limit=limit,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            q=at("q", q, rows, heads, dim),
            k=at("k", k, rows, kv_heads, dim),
            v=at("v", v, rows, kv_heads, dim),
            k_cache=at("k_cache", own[0], rows, limit, kv_heads, dim),
            v_cache=at("v_cache", own[1], rows, limit, kv_heads, dim),
            lengths=address("lengths", self.lengths, torch.int64, (rows,), q.device),
            prompt_out=at("prompt_o", prompt_o, rows, heads, dim),
            prompt_lse=_float_address(prompt_lse, (rows, heads), q.device),
            lse_row_stride=prompt_lse.stride(0),
            lse_head_stride=prompt_lse.stride(1),
            out=out.data_ptr(),
        )
        return out


def _float_address(x: Tensor, shape: tuple[int, int], device: torch.device) -> int:
    """That of float32 numbers at any strides."""
    if x.dtype != torch.float32 or x.shape != shape or x.device != device:
        raise ValueError(f"prompt_lse must be float32 {shape} on {device}, got {x.dtype} {tuple(x.shape)} on {x.device}")
    return x.data_ptr()


def _mask(lengths: Tensor, width: int) -> Tensor:
    outside = torch.arange(width, device=lengths.device) >= lengths[:, None]
    return torch.zeros(outside.shape, device=lengths.device).masked_fill(outside, float("-inf"))[:, None, None]


def _by_key_head(q: Tensor, kv_heads: int) -> Tensor:
    """[A, Hkv * R, ...] -> [A, R, Hkv, ...]."""
    return q.unflatten(1, (kv_heads, -1)).transpose(1, 2).contiguous()


def _by_query_head(x: Tensor) -> Tensor:
    """[A, R, Hkv, ...] -> [A, Hkv * R, ...]."""
    return x.transpose(1, 2).flatten(1, 2)
