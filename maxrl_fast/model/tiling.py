"""Padding of packed sequences into tiles, for attention kernels that need rows of equal length."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from maxrl_fast.records import padded_slots

SMALL_PADDING = 512  # positions; padding so many costs less than the kernel calls for another tile


@dataclass(frozen=True)
class Tiling:
    """The mapping from packed tokens, or some of them, to a tile [rows, width, ...] padded on the
    right."""

    # [T'] int64, indices of this tile's packed tokens, ascending; None: all tokens
    tokens: Tensor | None
    slots: Tensor  # [T'] int64, their positions in the flattened tile, ascending
    rows: int
    width: int

    def pad(self, x: Tensor) -> Tensor:
        """Return a tile [rows, width, ...] of packed tokens [T, ...], with zeros in the padding."""
        x = x if self.tokens is None else x.index_select(0, self.tokens)
        if len(self.slots) < self.rows * self.width:  # otherwise there is no padding
            x = x.new_zeros(self.rows * self.width, *x.shape[1:]).index_copy(0, self.slots, x)
        return x.reshape(self.rows, self.width, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        return x if len(self.slots) == len(x) else x.index_select(0, self.slots)

    def unpad_into(self, packed: Tensor, x: Tensor) -> None:
        if self.tokens is None:
            packed.copy_(self.unpad(x))
        else:
            packed.index_copy_(0, self.tokens, self.unpad(x))


def tile(
    lengths: Tensor, chosen: Tensor | None = None, device: torch.device | None = None
) -> Tiling:
    """Return the tiling of the chosen sequences [B] bool (None: all); lengths [B] on the host."""
    device, tokens = lengths.device if device is None else device, None
    own = lengths if chosen is None else lengths[chosen]  # [B']
    if chosen is not None and int(own.sum()) < int(lengths.sum()):
        tokens = chosen.repeat_interleave(lengths).nonzero()[:, 0].to(device)
    width = int(own.max())
    return Tiling(tokens, padded_slots(own, width).to(device), len(own), width)


def length_buckets(lengths: Tensor) -> list[Tensor]:
    """Group sequences by length: one mask [B] bool per tile. Lengths between two powers of two
    share a tile; shorter ones join it if that adds little padding. Sequences of length 0 are in no
    tile."""
    bucket = torch.frexp(lengths.double()).exponent  # [B], 2**(bucket - 1) <= length < 2**bucket
    buckets: list[Tensor] = []
    for b in reversed(bucket[lengths > 0].unique().tolist()):
        chosen = bucket == b
        longest = int(lengths[chosen].max())
        wider = int(lengths[buckets[-1]].max()) if buckets else math.inf
        if int(chosen.sum()) * (wider - longest) <= SMALL_PADDING:
            buckets[-1] |= chosen
        else:
            buckets.append(chosen)
    return buckets


def padding_mask(lengths: Tensor) -> Tensor | None:
    """Return an additive mask [B, 1, 1, longest] with -inf on padding; None without padding."""
    width = int(lengths.max())
    if int(lengths.min()) == width:
        return None
    return mask_beyond(lengths, width)


def mask_beyond(lengths: Tensor, width: int) -> Tensor:
    """Return an additive mask [B, 1, 1, width]: 0 up to each length, -inf after it."""
    padding = torch.arange(width, device=lengths.device) >= lengths[:, None]  # [B, width]
    mask = torch.zeros(padding.shape, device=lengths.device)
    return mask.masked_fill(padding, float("-inf"))[:, None, None]


def causal_mask(q_lengths: Tensor, k_lengths: Tensor, window: int) -> Tensor:
    """Return an additive mask [B, 1, longest q, longest k]: the last query is at the last key, and
    each query attends to the last `window` keys up to its own (0: all)."""
    q, k = (torch.arange(int(x.max()), device=x.device) for x in (q_lengths, k_lengths))
    # [B, q, 1], the key at which each query is
    at = q[:, None] + (k_lengths - q_lengths)[:, None, None]
    is_seen = (k <= at) & (k < k_lengths[:, None, None])
    if window:
        is_seen &= k > at - window
    # padding needs a key, so that its numbers are finite
    is_seen |= (q[:, None] >= q_lengths[:, None, None]) & (k == 0)
    return torch.zeros(is_seen.shape, device=k.device).masked_fill(~is_seen, float("-inf"))[:, None]
