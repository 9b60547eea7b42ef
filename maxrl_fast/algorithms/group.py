"""What an estimator is given: rewards of groups, padded to one width, and sums over valid ones."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP, BATCH = 1, (0, 1)  # the dimensions of [G, N] that a mean or a standard deviation is over


@dataclass
class Group:
    """Rewards of G groups of up to N rollouts.

    Sums over ranks take a group's rewards in ascending order, r_(1) <= ... <= r_(n), and their gaps
    d_j = r_(j+1) - r_(j); these are exactly 0 between equal rewards, whose order has no effect."""

    rewards: Tensor  # [G, N] float64, 0 where not valid
    valid: Tensor  # [G, N] bool, False for padding and for rollouts that are left out
    dtype: torch.dtype = torch.float64  # of the advantages that are wanted

    @cached_property
    def n(self) -> Tensor:  # [G, 1] float64, how many are valid
        return self.valid.sum(1, keepdim=True).double()

    @classmethod
    def of_sizes(cls, sizes: Tensor, width: int) -> "Group":
        """Return groups of `sizes` [G], up to `width`, without rewards."""
        valid = torch.arange(width, device=sizes.device) < sizes[:, None]
        return cls(torch.zeros_like(valid, dtype=torch.float64), valid)

    def largest(self, x: Tensor) -> Tensor:  # [G, 1]
        return torch.where(self.valid, x, -torch.inf).amax(GROUP, keepdim=True)

    def smallest(self, x: Tensor, over: Any = GROUP) -> Tensor:  # [G, 1]; [1, 1] over the batch
        return torch.where(self.valid, x, torch.inf).amin(over, keepdim=True)

    def centre(self, x: Tensor, lengths: Tensor | None = None, over: Any = GROUP) -> Tensor:
        """Return x - its mean, weighted by lengths if given: exactly 0 if all x are equal."""
        weights = self._weights(lengths, over)
        distance = torch.where(self.valid, x - self.smallest(x, over), 0.0)
        total = weights.sum(over, keepdim=True).clamp_min(1)
        return distance - (weights * distance).sum(over, keepdim=True) / total

    def mean(self, x: Tensor) -> Tensor:
        return torch.where(self.valid, x, 0.0).sum(GROUP, keepdim=True) / self.n.clamp_min(1)

    def std(
        self, x: Tensor, ddof: float, lengths: Tensor | None = None, over: Any = GROUP
    ) -> Tensor:
        """Return the standard deviation; infinite for `ddof` values or fewer, so that x / std is
        0."""
        weights = self._weights(lengths, over)
        freedom = weights.sum(over, keepdim=True) - ddof
        squares = (weights * self.centre(x, lengths, over).square()).sum(over, keepdim=True)
        variance = squares / freedom.clamp_min(1)
        variance = variance + 0 * variance  # NaN, where a square overflows: x / std would be 0
        return torch.where(freedom > 0, variance.sqrt(), torch.inf)

    def _weights(self, lengths: Tensor | None, over: Any) -> Tensor:
        ones = self.valid.double()
        weights = ones if lengths is None else ones * lengths
        # if all lengths are 0
        return torch.where(weights.sum(over, keepdim=True) > 0, weights, ones)

    def rank(self, x: Tensor) -> Tensor:
        ascending = torch.where(self.valid, x, torch.inf).sort(1).values
        return torch.searchsorted(ascending, x.contiguous()).double()

    @cached_property
    def order(self) -> Tensor:  # [G, N], rewards ascending, then what is not valid
        return torch.where(self.valid, self.rewards, torch.inf).argsort(dim=1, stable=True)

    @property
    def j(self) -> Tensor:  # [N-1] = 1, 2, ...
        return self._one_to(self.rewards.shape[1] - 1)

    @property
    def gaps(self) -> Tensor:  # [G, N-1], d_j, 0 from the group's n on
        return torch.where(self.j < self.n, self.rewards.gather(1, self.order).diff(dim=1), 0.0)

    def below(self, terms: Tensor) -> Tensor:
        """Return for rollout i the sum of the terms [G, N-1] of the gaps j < i."""
        return self._unsort(pad(terms.cumsum(1), (1, 0)))

    def above(self, terms: Tensor) -> Tensor:
        """Return for rollout i the sum of the terms [G, N-1] of the gaps j >= i."""
        return self._unsort(pad(terms.flip(1).cumsum(1).flip(1), (0, 1)))

    def rank_transform(self, table: Tensor) -> Tensor:
        """Return sum_{j >= 0} offset_j d_j + sum_{1 <= j < i} slope_j d_j, where d_0 = r_(1), for
        tables [G, 2, N] of offsets and slopes (estimators/max_at_k.py)."""
        offset, slope = table.unbind(1)  # [G, N]
        lowest = self.rewards.gather(1, self.order[:, :1])
        gaps = torch.cat([lowest, self.gaps], 1)  # [G, N]
        base = (offset * gaps).sum(1, keepdim=True)
        return base + self._unsort((slope * gaps).cumsum(1))

    def within(self, size: float | Tensor, of: Tensor) -> Tensor:
        """Return C(j, size) / C(of, size) for j = 0..N, [G, N+1], by recurrence."""
        j = self._one_to(self.rewards.shape[1])
        factors = torch.where(j <= of, (j - size).clamp_min(0) / j, 1.0)
        return pad(factors.flip(1).cumprod(1).flip(1), (0, 1), value=1.0)

    def _one_to(self, last: int) -> Tensor:
        return torch.arange(1, last + 1, device=self.rewards.device, dtype=torch.float64)

    def _unsort(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x).scatter(1, self.order, x)


def ratio(x: Tensor, y: Tensor) -> Tensor:
    """Return x / y, 0 where y is 0."""
    return torch.where(y == 0, 0.0, x / y)
