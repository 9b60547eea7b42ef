"""Attention of one decoding step: each newest token attends to its prompt and its response.

On a GPU the prompt part is one FlashAttention launch, with a group's samples in one sequence; the
response part and the merge are one launch of csrc/cuda/decode_attention.cu, or two for few samples
with long responses. Elsewhere both are flash.attend with masks."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from maxrl_fast.model import flash
from maxrl_fast.model.attention import PLAIN_ATTENTION, AttentionVariant, merge
from maxrl_fast.model.decoder import DecoderConfig
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.dispatch import DEVICE_DTYPES, KernelLaunch

Cache = tuple[Tensor, Tensor]  # keys and values of one layer

_BLOCKS = 256  # of eight warps, which fill a GPU
_KEYS_PER_SPLIT = 256  # at least, for one block


def has_kernel(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """The CUDA kernel needs heads in multiples of 16 bytes, at most 512, and at most 8 query heads
    per key/value head."""
    head_bytes = config.head_dim * torch.empty((), dtype=dtype).element_size()
    fits = dtype in DEVICE_DTYPES and head_bytes % 16 == 0 and head_bytes <= 512
    fits = fits and config.num_attention_heads // config.num_key_value_heads <= 8
    return fits and dispatch.is_gpu(device) and dispatch.has_kernels(device)


def num_splits(rows: int, kv_heads: int, limit: int) -> int:
    """Return how many blocks share a row's keys, so that few rows fill a GPU. Sizes alone decide,
    so every GPU sums in the same order."""
    return max(1, min(-(-_BLOCKS // (rows * kv_heads)), limit // _KEYS_PER_SPLIT))


@dataclass
class Step:
    """One decoding step of A rows; the sequence lengths are the same in every layer. Rows starts[g]
    to starts[g + 1] - 1 have prompt g, and those past the last start none: undefined attention."""

    prompt: Tensor  # [A] int64, each row's prompt
    starts: Tensor  # [G + 1] int32, ascending
    prompt_lengths: Tensor  # [G] int32, each at least 1
    cache_starts: Tensor  # [G + 1] int32, the first position of each prompt in the cache
    size: int  # the most rows that a prompt has
    lengths: Tensor  # [A] int64, tokens of each row including the newest
    width: int  # positions of the cache that are read where the kernel does not run
    in_kernel: bool

    @cached_property
    def tile(self) -> tuple[Tensor, Tensor]:
        """The row of each place of a tile [G, size], a line for each prompt, and the place of each
        row."""
        rows = torch.arange(len(self.lengths), device=self.lengths.device)
        places = torch.arange(self.size, device=rows.device)
        tile = (self.starts[:-1, None] + places).clamp_max(len(rows) - 1)
        place = (rows - self.starts[self.prompt]).clamp(0, self.size - 1)
        return tile, self.prompt * self.size + place

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prompt: Cache,
        own: Cache,
        variant: AttentionVariant = PLAIN_ATTENTION,
    ) -> Tensor:
        """Write the newest tokens' k and v [A, Hkv, D] to the cache, and return the attention of q
        [A, Hq, D]; their rows may have any stride. `prompt` [G, prompt_width, Hkv, D], `own` [A,
        limit, Hkv, D]."""
        o, lse = self._to_prompts(q, prompt, variant)
        if self.in_kernel and variant.is_plain:
            return self._to_own_in_kernel(q, k, v, own, o, lse)
        o, lse = merge(o, lse, *self._to_own(q, k, v, own, variant))
        if variant.sinks is not None:  # as a part of the keys with the value 0
            o = o * torch.sigmoid(lse - variant.sinks)[..., None].to(o.dtype)
        return o

    def _to_prompts(
        self, q: Tensor, prompt: Cache, variant: AttentionVariant
    ) -> tuple[Tensor, Tensor]:
        width = prompt[0].shape[1]
        kernel = flash.kernel_for(q.device, q.dtype, q.shape[-1])
        if kernel is not flash.REFERENCE and variant.is_plain:
            k, v = (x.flatten(0, 1) for x in prompt)
            sizes = self.starts, self.cache_starts, self.size, width
            return flash.attend_prompts(q, k, v, *sizes, self.prompt_lengths)
        tile, place = self.tile
        keys, lengths = torch.arange(width, device=q.device), self.prompt_lengths[:, None, None]
        mask = keys < lengths
        if variant.window:
            mask = mask & (keys >= lengths + self.lengths[tile][..., None] - variant.window)
        o, lse = flash.attend(q[tile], *prompt, mask, variant.softcap)  # [G, size, Hq, D]
        return o.flatten(0, 1)[place], lse.flatten(0, 1)[place]

    def _to_own(
        self, q: Tensor, k: Tensor, v: Tensor, own: Cache, variant: AttentionVariant
    ) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(q), device=q.device)
        for cache, x in zip(own, (k, v), strict=True):
            cache[rows, self.lengths - 1] = x
        keys, values = (cache[:, : self.width] for cache in own)
        places, lengths = torch.arange(self.width, device=q.device), self.lengths[:, None, None]
        mask = places < lengths
        if variant.window:
            mask = mask & (places >= lengths - variant.window)
        o, lse = flash.attend(q[:, None], keys, values, mask, variant.softcap)  # [A, 1, Hq, D]
        return o[:, 0], lse[:, 0]

    def _to_own_in_kernel(
        self, q: Tensor, k: Tensor, v: Tensor, own: Cache, prompt_o: Tensor, prompt_lse: Tensor
    ) -> Tensor:
        (batch, heads, dim), kv_heads, limit = q.shape, k.shape[1], own[0].shape[1]
        call, out = KernelLaunch(q.device), torch.empty(q.shape, dtype=q.dtype, device=q.device)
        splits = num_splits(batch, kv_heads, limit)
        partial_shape = batch, heads, splits, dim + 2

        def rows(name: str, x: Tensor, heads: int) -> dict[str, int]:
            if x.stride(0) * x.element_size() % 16:
                raise ValueError(
                    f"rows of {name} must be a multiple of 16 bytes apart, got {x.dtype} with "
                    f"strides {x.stride()}"
                )
            address = call.address(name, x, q.dtype, (batch, heads, dim), True)
            return {name: address, f"{name}_stride": x.stride(0)}

        call.launch(
            "decode_attention",
            dtype=q.dtype,
            num_rows=batch,
            limit=limit,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            **rows("q", q, heads),
            **rows("k", k, kv_heads),
            **rows("v", v, kv_heads),
            **call.addresses(q.dtype, batch, limit, kv_heads, dim, k_cache=own[0], v_cache=own[1]),
            lengths=call.address("lengths", self.lengths, torch.int64, (batch,)),
            **call.addresses(q.dtype, *q.shape, prompt_out=prompt_o.contiguous()),
            prompt_lse=prompt_lse,  # [A, Hq] float32 with any strides
            lse_row_stride=prompt_lse.stride(0),
            lse_head_stride=prompt_lse.stride(1),
            num_splits=splits,
            partial=None if splits == 1 else torch.empty(partial_shape, device=q.device),
            out=out,
        )
        return out
