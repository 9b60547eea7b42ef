"""Samples that begin alike, as a forest of segments that are computed once.

Sorted by their tokens, rows that begin alike are neighbours. In that order each row adds to the
stream what it does not share with the row before it, which is the forest in depth-first order.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


def ranges(starts: Integers, lengths: Integers) -> Integers:
    """Concatenate the ranges [start, start + length)."""
    shift = np.repeat(starts - lengths.cumsum() + lengths, lengths)
    return np.arange(len(shift)) + shift


@dataclass(frozen=True)
class Tree:
    lengths: Integers  # [M] tokens of each segment
    parents: Integers  # [M] the segment above; -1: none
    index: Integers  # [U] of the rows' tokens
    positions: Integers  # [U]
    chosen: Integers  # [T] where the chosen tokens of the rows are, by sequence


@dataclass(frozen=True)
class SortedRows:
    """S rows of at least one token each, packed."""

    tokens: NDArray[Any]  # of all rows
    lengths: Integers  # [S]

    @cached_property
    def starts(self) -> Integers:
        return self.lengths.cumsum() - self.lengths

    @cached_property
    def order(self) -> Integers:
        """[S] rows in the order of their tokens' bytes, a beginning of another row before it."""
        rows = [
            self.tokens[start : start + length].tobytes()
            for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        ]
        return np.array(sorted(range(len(rows)), key=rows.__getitem__), dtype=np.int64)

    @cached_property
    def ranks(self) -> Integers:
        """[S] where each row is in the order."""
        return self.order.argsort()

    @cached_property
    def _common(self) -> Integers:
        """[S] tokens with which a row in the order begins like the one before it."""
        if len(self.order) < 2:
            return np.zeros(len(self.order), dtype=np.int64)
        starts, lengths = self.starts[self.order], self.lengths[self.order]
        both = np.minimum(lengths[1:], lengths[:-1])
        differ = self.tokens[ranges(starts[1:], both)] != self.tokens[ranges(starts[:-1], both)]
        at = np.where(differ, ranges(np.zeros_like(both), both), np.repeat(both, both))
        return np.append(0, np.minimum.reduceat(at, both.cumsum() - both))

    def common(self, ranks: Integers) -> Integers:
        """Return the same among the rows of some ascending ranks; 0 for the first."""
        if len(ranks) < 2:
            return np.zeros(len(ranks), dtype=np.int64)
        return np.append(0, np.minimum.reduceat(self._common[: ranks[-1] + 1], ranks[:-1] + 1))

    def tree(
        self,
        sequences: Integers,
        positions: Integers,
        counts: Integers,
        prompts: Integers,
        merge_cost: float,
        least_gain: float = 0.0,
    ) -> Tree:
        """Return the forest of the rows [S'], and where `counts` [S'] tokens of each, those at the
        packed `positions` [T] in its row, are in it.

        Where more than whole rows and the first `prompts` [S] tokens of each saves no more than
        `least_gain` tokens, no more is shared; with 0, all that merge_cost allows.
        """
        by_rank = self.ranks[sequences].argsort()
        rows = sequences[by_rank]
        lengths, whole = self.lengths[rows], self.common(self.ranks[rows])
        of_prompt = np.where(whole < prompts[rows], 0, prompts[rows])
        common = np.where(whole < lengths, of_prompt, whole)
        if not least_gain or (whole - common).sum() > least_gain:
            common = shared(whole, lengths, merge_cost)
        added = lengths - common
        ends = added.cumsum()
        stream = np.arange(ends[-1] if len(ends) else 0)
        path = np.zeros(lengths.max(initial=0), dtype=np.int64)  # of the last row, in the stream
        above, chosen = np.full(len(rows), -1), np.empty_like(positions)
        bounds = np.append(0, counts.cumsum()).tolist()
        for i, sequence in enumerate(by_rank.tolist()):
            if common[i]:
                above[i] = path[common[i] - 1]
            path[common[i] : lengths[i]] = stream[ends[i] - added[i] : ends[i]]
            own = slice(bounds[sequence], bounds[sequence + 1])
            # All positions are in the row; the mode "raise" would copy first.
            path.take(positions[own], out=chosen[own], mode="clip")
        # A segment begins where a row does, and where a later row leaves the path.
        starts, above = (ends - added)[added > 0], above[added > 0]
        begins = np.unique(np.concatenate([starts, above[above >= 0] + 1]))
        parents = np.arange(len(begins)) - 1
        parents[begins.searchsorted(starts)] = begins.searchsorted(above, side="right") - 1
        return Tree(
            np.diff(np.append(begins, len(stream))),
            parents,
            ranges(self.starts[rows] + common, added),
            ranges(common, added),
            chosen,
        )


def shared(common: Integers, lengths: Integers, merge_cost: float) -> Integers:
    """Return how many tokens of each row come from the row before, of `common` ones.

    A segment with n rows below it is shared where (n - 1) x its length exceeds merge_cost x the
    tokens below it. Others become a part of each segment directly below them.
    """
    common = common.copy()
    if not merge_cost:
        return common
    open_segments: list[tuple[int, int]] = []  # where each ends in its rows, and its first row
    for i in range(1, len(common) + 1):
        depth, first = int(common[i]) if i < len(common) else 0, i - 1
        while open_segments and open_segments[-1][0] > depth:
            end, first = open_segments.pop()
            start = max(depth, open_segments[-1][0] if open_segments else 0)
            below = lengths[first:i].sum() - common[first + 1 : i].sum() - end
            if (i - first - 1) * (end - start) <= merge_cost * below:
                of_segment = common[first + 1 : i]
                of_segment[of_segment == end] = start
        if depth and not (open_segments and open_segments[-1][0] == depth):
            open_segments.append((depth, first))
    return common
