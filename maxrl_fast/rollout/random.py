"""Counter-based random numbers: a sample's numbers do not depend on the rest of the batch."""

import torch
from torch import Tensor


def _signed(x: int) -> int:
    return (x & (2**64 - 1)) - (2**64 if x & 2**63 else 0)


_INCREMENT = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014), a bijection of int64; products wrap."""

    def logical_shift(x: Tensor, bits: int) -> Tensor:
        return (x >> bits) & (2 ** (64 - bits) - 1)

    x = (x ^ logical_shift(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ logical_shift(x, 27)) * _MULTIPLIERS[1]
    return x ^ logical_shift(x, 31)


def sample_keys(seed: int, step: int, prompt_ids: Tensor, sample_ids: Tensor) -> Tensor:
    key = torch.zeros_like(prompt_ids)
    for coordinate in (seed, step, prompt_ids, sample_ids):
        key = _mix((key ^ coordinate) + _INCREMENT)
    return key


def uniforms(keys: Tensor, positions: Tensor | int) -> Tensor:
    """Return one float32 number in [0, 1) with 24 random bits per key, for the tokens at
    `positions`."""
    offset = (positions + 1) * _INCREMENT
    bits = _mix(keys + (_signed(offset) if isinstance(offset, int) else offset))
    return ((bits >> 40) & (2**24 - 1)).float() * 2.0**-24
