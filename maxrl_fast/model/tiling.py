"""Packed sequences as padded tiles, for attention kernels that want every row equally long."""

from dataclasses import dataclass

import torch
from torch import Tensor

from maxrl_fast.records import padded_slots

SMALL_PADDING = 512  # slots, which cost less than the calls for another tile


@dataclass(frozen=True)
class Tiling:
    """Where packed tokens lie in a tile [rows, width, ...] padded on the right. Not every token need be in it."""

    tokens: Tensor | None  # [T'] int64, the packed tokens of this tile, ascending; None: all of them
    slots: Tensor  # [T'] int64, their places in the flattened tile, ascending
    rows: int
    width: int

    def pad(self, x: Tensor) -> Tensor:
        """Packed [T, ...] -> [rows, width, ...], zeros in the padding."""
        x = x if self.tokens is None else x.index_select(0, self.tokens)
        if len(self.slots) < self.rows * self.width:  # otherwise the slots, ascending, are every one
            x = x.new_zeros(self.rows * self.width, *x.shape[1:]).index_copy(0, self.slots, x)
        return x.reshape(self.rows, self.width, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """[rows, width, ...] -> this tile's tokens, packed [T', ...]."""
        x = x.flatten(0, 1)
        return x if len(self.slots) == len(x) else x.index_select(0, self.slots)

    def unpad_into(self, packed: Tensor, x: Tensor) -> None:
        """Write this tile's tokens to their places in a packed tensor [T, ...]."""
        if self.tokens is None:
            packed.copy_(self.unpad(x))
        else:
            packed.index_copy_(0, self.tokens, self.unpad(x))


def tile(lengths: Tensor, chosen: Tensor | None = None, device: torch.device | None = None) -> Tiling:
    """The chosen sequences [B] (bool; None: all) of a packed stream, a row each, from all lengths [B] on the host."""
    device = lengths.device if device is None else device
    if chosen is None or bool(chosen.all()):
        width = int(lengths.max())
        return Tiling(None, padded_slots(lengths, width).to(device), len(lengths), width)
    own = lengths[chosen]
    width = int(own.max())
    tokens = chosen.repeat_interleave(lengths).nonzero()[:, 0]
    every = len(tokens) == int(lengths.sum())
    return Tiling(None if every else tokens.to(device), padded_slots(own, width).to(device), len(own), width)


def length_buckets(lengths: Tensor) -> list[Tensor]:
    """Which sequences [B] (bool) go into a tile together, so that one long response does not pad all others.

    Lengths between two powers of two share a tile, and a tile takes in shorter ones where that pads by few slots; sequences of
    length 0 are in none.
    """
    bucket = torch.frexp(lengths.double()).exponent  # 2**(bucket - 1) <= length < 2**bucket
    buckets: list[Tensor] = []
    for b in reversed(bucket[lengths > 0].unique().tolist()):
        chosen = bucket == b
        if buckets and int(chosen.sum()) * int(lengths[buckets[-1]].max() - lengths[chosen].max()) <= SMALL_PADDING:
            buckets[-1] |= chosen
        else:
            buckets.append(chosen)
    return buckets


def padding_mask(lengths: Tensor) -> Tensor | None:
    """[B, 1, 1, longest] float32 to add to scores, -inf on padding; None when there is no padding."""
    width = int(lengths.max())
    if int(lengths.min()) == width:
        return None
    padding = torch.arange(width, device=lengths.device) >= lengths[:, None]
    return torch.zeros(padding.shape, device=lengths.device).masked_fill(padding, float("-inf"))[:, None, None, :]
