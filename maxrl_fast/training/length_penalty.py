from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LengthPenalty:
    """DAPO's length penalty (Yu et al. 2025, section 3.4, eq. 13), as in verl's reward manager:

        min(0, factor (limit - buffer - length) / buffer)

    It is 0 up to limit - buffer tokens and falls linearly to -factor at the limit, the length of
    the longest response.
    """

    limit: int
    buffer: int
    factor: float = 1.0

    def __call__(self, lengths: Tensor) -> Tensor:
        """Return the penalty (<= 0) of each length, float32 of the same shape."""
        return (self.factor / self.buffer * (self.limit - self.buffer - lengths).float()).clamp_max(
            0.0
        )
