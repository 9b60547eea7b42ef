"""Attention of one decoding step: each sample's newest token attends to the group's prompt and to the sample's own tokens.

On a GPU the prompt part is one FlashAttention call with all samples of a group in one sequence; the own part and the merge are
one launch of csrc/cuda/decode_attention.cu. Elsewhere both parts are flash.attend with masks.
"""

from functools import cached_property

import torch
from torch import Tensor

from maxrl_fast.model import flash
from maxrl_fast.model.attention import merge
from maxrl_fast.model.decoder import DecoderConfig
from maxrl_fast.ops import _gate
from maxrl_fast.ops._gate import Call

Cache = tuple[Tensor, Tensor]  # keys and values of one layer

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def has_kernel(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the CUDA kernel supports the model.

    A head must be a multiple of 16 bytes, at most 512, and at most 8 query heads may share a key/value head.
    """
    head_bytes = config.head_dim * torch.empty((), dtype=dtype).element_size()
    fits = dtype in _DTYPES and head_bytes % 16 == 0 and head_bytes <= 512
    fits = fits and config.num_attention_heads // config.num_key_value_heads <= 8
    return fits and _gate.is_gpu(device) and _gate.has_kernels(device)


class Step:
    """The sequence lengths of one decoding step of G groups with N samples each; they are the same in every layer.

    Args:
        prompt_lengths: [G] int64, each at least 1.
        lengths: [A] int64 with A = G N, tokens of each sample including the newest, from 1 to `width`.
        prompt_width: positions of the prompts' cache.
        width: positions of the samples' cache that are read where the kernel does not run.
    """

    def __init__(self, prompt_lengths: Tensor, lengths: Tensor, prompt_width: int, width: int, in_kernel: bool):
        self.prompt_lengths, self.lengths, self.in_kernel = prompt_lengths, lengths, in_kernel
        self.prompt_width, self.width = prompt_width, width
        self.samples_per_group = len(lengths) // len(prompt_lengths)

    @cached_property
    def varlen(self) -> tuple[Tensor, Tensor, Tensor]:
        """cu_seqlens of the queries and of the padded keys, int32 [G+1] each, and the number of valid keys, int32 [G]."""
        groups = torch.arange(len(self.prompt_lengths) + 1, dtype=torch.int32, device=self.lengths.device)
        return groups * self.samples_per_group, groups * self.prompt_width, self.prompt_lengths.to(torch.int32)

    @cached_property
    def masks(self) -> tuple[Tensor, Tensor]:
        """Additive masks, prompts [G, 1, 1, prompt_width] and samples [A, 1, 1, width]: 0 on valid keys, -inf on padding."""
        return _mask(self.prompt_lengths, self.prompt_width), _mask(self.lengths, self.width)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prompt: Cache, own: Cache) -> Tensor:
        """Write k and v of the newest tokens to the samples' cache, and return the attention of q to prompts and samples.

        Shapes: q and the result [A, Hq, D], k and v [A, Hkv, D], `prompt` [G, prompt_width, Hkv, D], `own` [A, limit, Hkv, D].
        """
        o, lse = self._to_prompts(q, prompt)
        return (self._to_own_in_kernel if self.in_kernel else self._to_own)(q, k, v, own, o, lse)

    def _to_prompts(self, q: Tensor, prompt: Cache) -> tuple[Tensor, Tensor]:
        """Return the attention to the prompts, [A, Hq, D], and its log-sum-exp, [A, Hq]."""
        if flash.kernel_for(q.device, q.dtype, q.shape[-1]) in (flash.TORCH_VARLEN, flash.FLASH_ATTN):
            cu_q, cu_k, counts = self.varlen
            # With a maximum query length of 1 the kernel reorders heads.
            sizes = (cu_q, cu_k, max(self.samples_per_group, 2), self.prompt_width)
            k, v = (x.flatten(0, 1) for x in prompt)
            o, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *sizes, 0.0, False, False, seqused_k=counts)
            return o, lse.t()
        # Treat the query heads that share a key/value head as additional queries of that head.
        q = _by_key_head(q, prompt[0].shape[2])  # [A, R, Hkv, D]
        o, lse = flash.attend(q.view(len(self.prompt_lengths), -1, *q.shape[2:]), *prompt, mask=self.masks[0])
        return _by_query_head(o.reshape(q.shape)), _by_query_head(lse.reshape(q.shape[:-1]))

    def _to_own(self, q: Tensor, k: Tensor, v: Tensor, own: Cache, prompt_o: Tensor, prompt_lse: Tensor) -> Tensor:
        rows = torch.arange(len(q), device=q.device)
        for cache, x in zip(own, (k, v), strict=True):
            cache[rows, self.lengths - 1] = x
        keys, values = (cache[:, : self.width] for cache in own)
        o, lse = flash.attend(_by_key_head(q, k.shape[1]), keys, values, mask=self.masks[1])
        return merge(prompt_o, prompt_lse, _by_query_head(o), _by_query_head(lse))[0]

    def _to_own_in_kernel(self, q: Tensor, k: Tensor, v: Tensor, own: Cache, prompt_o: Tensor, prompt_lse: Tensor) -> Tensor:
        (batch, heads, dim), kv_heads, limit = q.shape, k.shape[1], own[0].shape[1]
        q, k, v, prompt_o = (x.contiguous() for x in (q, k, v, prompt_o))
        out, call = torch.empty_like(q), Call(q.device)

        def at(name: str, x: Tensor, *shape: int) -> int:
            return call.address(name, x, q.dtype, shape)

        call.launch(
            "decode_attention",
            dtype=_DTYPES[q.dtype],
            num_rows=batch,
            limit=limit,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            q=at("q", q, batch, heads, dim),
            k=at("k", k, batch, kv_heads, dim),
            v=at("v", v, batch, kv_heads, dim),
            k_cache=at("k_cache", own[0], batch, limit, kv_heads, dim),
            v_cache=at("v_cache", own[1], batch, limit, kv_heads, dim),
            lengths=call.address("lengths", self.lengths, torch.int64, (batch,)),
            prompt_out=at("prompt_o", prompt_o, batch, heads, dim),
            prompt_lse=_float_address(call, prompt_lse, (batch, heads)),
            lse_row_stride=prompt_lse.stride(0),
            lse_head_stride=prompt_lse.stride(1),
            out=call.keep(out),
        )
        return out


def _float_address(call: Call, x: Tensor, shape: tuple[int, int]) -> int:
    """Return the address of a float32 tensor with any strides."""
    if x.dtype != torch.float32 or x.shape != shape or x.device != call.device:
        raise ValueError(f"prompt_lse must be float32 {shape} on {call.device}, got {x.dtype} {tuple(x.shape)} on {x.device}")
    return call.keep(x)


def _mask(lengths: Tensor, width: int) -> Tensor:
    padding = torch.arange(width, device=lengths.device) >= lengths[:, None]
    return torch.zeros(padding.shape, device=lengths.device).masked_fill(padding, float("-inf"))[:, None, None]


def _by_key_head(q: Tensor, kv_heads: int) -> Tensor:
    """Reshape [A, Hkv * R, ...] to [A, R, Hkv, ...]; R query heads share a key/value head."""
    return q.unflatten(1, (kv_heads, -1)).transpose(1, 2).contiguous()


def _by_query_head(x: Tensor) -> Tensor:
    """Reshape [A, R, Hkv, ...] to [A, Hkv * R, ...]."""
    return x.transpose(1, 2).flatten(1, 2)
