"""Attention of one decoding step: each newest token attends to its prompt and its response.

On a GPU the prompt part is one FlashAttention launch, with all samples of a group in one sequence;
the response part and the merge are one launch of csrc/cuda/decode_attention.cu, or two for few
samples with long responses. Elsewhere both parts are flash.attend with masks.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from maxrl_fast.model import flash
from maxrl_fast.model.attention import merge
from maxrl_fast.model.decoder import DecoderConfig
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.dispatch import DEVICE_DTYPES, KernelLaunch

Cache = tuple[Tensor, Tensor]  # keys and values of one layer

_BLOCKS = 256  # of eight warps, which fill a GPU
_KEYS_PER_SPLIT = 256  # at least, for one block


def has_kernel(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the CUDA kernel supports the model: heads in multiples of 16 bytes, at most 512,
    and at most 8 query heads per key/value head."""
    head_bytes = config.head_dim * torch.empty((), dtype=dtype).element_size()
    fits = dtype in DEVICE_DTYPES and head_bytes % 16 == 0 and head_bytes <= 512
    fits = fits and config.num_attention_heads // config.num_key_value_heads <= 8
    return fits and dispatch.is_gpu(device) and dispatch.has_kernels(device)


def num_splits(rows: int, kv_heads: int, limit: int) -> int:
    """Return how many blocks share a row's keys, so that few rows fill a GPU.

    It depends on sizes alone, so every GPU sums in the same order.
    """
    return max(1, min(-(-_BLOCKS // (rows * kv_heads)), limit // _KEYS_PER_SPLIT))


@dataclass(frozen=True)
class Groups:
    """The prompts of a batch's rows: rows starts[g] to starts[g + 1] - 1 have prompt g.

    Rows past the last start have no prompt, and their attention is undefined.
    """

    prompt: Tensor  # [A] int64, each row's prompt
    starts: Tensor  # [G + 1] int32, ascending
    prompt_lengths: Tensor  # [G] int32, each at least 1
    cache_starts: Tensor  # [G + 1] int32, the first position of each prompt in the cache
    size: int  # the most rows that a prompt has


class Step:
    """One decoding step of A rows; the sequence lengths are the same in every layer.

    lengths: [A] int64, tokens of each row including the newest. width: positions of the cache that
    are read where the kernel does not run.
    """

    def __init__(self, groups: Groups, lengths: Tensor, width: int, in_kernel: bool):
        self.groups, self.lengths, self.width, self.in_kernel = groups, lengths, width, in_kernel

    @cached_property
    def tile(self) -> tuple[Tensor, Tensor]:
        """The row of each place of a tile [G, size], a line for each prompt, and the place of
        each row [A]."""
        groups, rows = self.groups, len(self.lengths)
        places = torch.arange(groups.size, device=self.lengths.device)
        tile = (groups.starts[:-1, None] + places).clamp_max(rows - 1)
        place = torch.arange(rows, device=self.lengths.device) - groups.starts[groups.prompt]
        return tile, groups.prompt * groups.size + place.clamp(0, groups.size - 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prompt: Cache, own: Cache) -> Tensor:
        """Write the newest tokens' k and v to the cache, and return the attention of q.

        q and the result [A, Hq, D], k and v [A, Hkv, D], `prompt` [G, prompt_width, Hkv, D], `own`
        [A, limit, Hkv, D]. Rows of q, k and v may have any stride.
        """
        o, lse = self._to_prompts(q, prompt)
        return (self._to_own_in_kernel if self.in_kernel else self._to_own)(q, k, v, own, o, lse)

    def _to_prompts(self, q: Tensor, prompt: Cache) -> tuple[Tensor, Tensor]:
        """Return the attention to the prompts [A, Hq, D] and its log-sum-exp [A, Hq]."""
        groups, width = self.groups, prompt[0].shape[1]
        kernel = flash.kernel_for(q.device, q.dtype, q.shape[-1])
        if kernel is not flash.REFERENCE:
            k, v = (x.flatten(0, 1) for x in prompt)
            sizes = groups.starts, groups.cache_starts, groups.size, width
            return flash.attend_prompts(q, k, v, *sizes, groups.prompt_lengths)
        tile, place = self.tile
        mask = torch.arange(width, device=q.device) < groups.prompt_lengths[:, None, None]
        o, lse = flash.attend(q[tile], *prompt, mask)  # [G, size, Hq, D]
        return o.flatten(0, 1)[place], lse.flatten(0, 1)[place]

    def _to_own(
        self, q: Tensor, k: Tensor, v: Tensor, own: Cache, prompt_o: Tensor, prompt_lse: Tensor
    ) -> Tensor:
        rows = torch.arange(len(q), device=q.device)
        for cache, x in zip(own, (k, v), strict=True):
            cache[rows, self.lengths - 1] = x
        keys, values = (cache[:, : self.width] for cache in own)
        mask = torch.arange(self.width, device=q.device) < self.lengths[:, None, None]
        o, lse = flash.attend(q[:, None], keys, values, mask)  # [A, 1, Hq, D]
        return merge(prompt_o, prompt_lse, o[:, 0], lse[:, 0])[0]

    def _to_own_in_kernel(
        self, q: Tensor, k: Tensor, v: Tensor, own: Cache, prompt_o: Tensor, prompt_lse: Tensor
    ) -> Tensor:
        (batch, heads, dim), kv_heads, limit = q.shape, k.shape[1], own[0].shape[1]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        call, prompt_o = KernelLaunch(q.device), prompt_o.contiguous()
        # [A, Hq] with any strides
        fits = prompt_lse.dtype == torch.float32 and prompt_lse.device == q.device
        if not fits or prompt_lse.shape != (batch, heads):
            raise ValueError(
                f"prompt_lse must be float32 {(batch, heads)} on {q.device}, got "
                f"{prompt_lse.dtype} {tuple(prompt_lse.shape)} on {prompt_lse.device}"
            )
        splits = num_splits(batch, kv_heads, limit)
        partial_shape = batch, heads, splits, dim + 2
        partial = None if splits == 1 else torch.empty(partial_shape, device=q.device)

        call.launch(
            "decode_attention",
            dtype=q.dtype,
            num_rows=batch,
            limit=limit,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            q=_rows_address(call, "q", q, q.dtype, (batch, heads, dim)),
            k=_rows_address(call, "k", k, q.dtype, (batch, kv_heads, dim)),
            v=_rows_address(call, "v", v, q.dtype, (batch, kv_heads, dim)),
            q_stride=q.stride(0),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            **call.addresses(q.dtype, batch, limit, kv_heads, dim, k_cache=own[0], v_cache=own[1]),
            lengths=call.address("lengths", self.lengths, torch.int64, (batch,)),
            prompt_out=call.address("prompt_o", prompt_o, q.dtype, (batch, heads, dim)),
            prompt_lse=prompt_lse,
            lse_row_stride=prompt_lse.stride(0),
            lse_head_stride=prompt_lse.stride(1),
            num_splits=splits,
            partial=partial,
            out=out,
        )
        return out


def _rows_address(
    call: KernelLaunch, name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, int, int]
) -> int:
    """Rows must be contiguous, a multiple of 16 bytes apart."""
    if x.stride(0) * x.element_size() % 16:
        raise ValueError(
            f"rows of {name} must be a multiple of 16 bytes apart, got {x.dtype} with strides "
            f"{x.stride()}"
        )
    return call.address(name, x, dtype, shape, True)
