"""DAPO's soft overlong punishment: responses that come close to the length limit lose reward, in training alone."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LengthPenalty:
    """The length-aware penalty of DAPO (Yu et al. 2025, section 3.4, eq. 13), as verl's reward manager computes it:

        min(0, factor (limit - buffer - length) / buffer)

    0 up to limit - buffer tokens, then falling linearly to -factor at the limit, which no response exceeds.

    Args:
        limit: the longest response, in tokens.
        buffer: tokens, from 1 to `limit`.
        factor: the penalty at the limit, in reward.
    """

    limit: int
    buffer: int
    factor: float = 1.0

    def __call__(self, lengths: Tensor) -> Tensor:
        """Return the penalties of responses of these lengths, float32 of any shape, none above 0."""
        return (self.factor / self.buffer * (self.limit - self.buffer - lengths).float()).clamp_max(0.0)
