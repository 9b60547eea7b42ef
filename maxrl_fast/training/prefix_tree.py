"""Samples that begin alike, as a forest of segments that are computed once (docs/prefix_trees.md).
In the order of their tokens each row adds to the stream what it does not share with the row before
it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maxrl_fast import records

Integers = NDArray[np.int64]


def ranges(starts: Integers, lengths: Integers) -> Integers:
    return records.ranges(torch.from_numpy(starts), torch.from_numpy(lengths)).numpy()


def beginnings(sequences: list[bytes]) -> tuple[Integers, Integers]:
    """Return how many int64 numbers sequences [n] have, and how many each shares with the one
    before it."""
    lengths = np.array([len(x) // 8 for x in sequences], dtype=np.int64)
    numbers, starts = np.frombuffer(b"".join(sequences), np.int64), lengths.cumsum() - lengths
    both = np.minimum(lengths[1:], lengths[:-1])
    differ = numbers[ranges(starts[1:], both)] != numbers[ranges(starts[:-1], both)]
    at, begins = np.append(np.flatnonzero(differ), len(differ)), both.cumsum() - both
    common = np.minimum(at[at.searchsorted(begins)] - begins, both)
    return lengths, np.append(0, common)[: len(lengths)]


@dataclass(frozen=True)
class Tree:
    lengths: Integers  # [M] tokens of each segment
    parents: Integers  # [M] the segment above; -1: none
    index: Integers  # [U] of the rows' tokens
    positions: Integers  # [U]
    chosen: Integers  # [T] where the chosen tokens of the rows are, by sequence


@dataclass(frozen=True)
class SortedRows:
    """S rows: each a prompt of at least one token and a part of a response to it."""

    tokens: Integers  # of all prompts and responses
    starts: Integers  # [S, 2] where the prompt and the response of each row begin
    sizes: Integers  # [S, 2] their tokens in the row
    shares_all: bool  # all that rows begin with; False: equal prompts and equal rows only

    @cached_property
    def lengths(self) -> Integers:  # [S]
        return self.sizes.sum(1)

    @cached_property
    def _sorted(self) -> tuple[Integers, Integers]:
        """[S] rows in the order of their tokens' bytes, and with how many tokens each begins like
        the one before it. Samples of a prompt are compared only after it: a row's key is the number
        of the shortest prompt that begins it, and what follows."""
        data, bounds = self.tokens.tobytes(), np.stack([self.starts, self.starts + self.sizes], 2)
        of_prompt, of_response = (8 * bounds).swapaxes(0, 1).tolist()
        prompts = {a: data[a:b] for a, b in dict(of_prompt).items()}
        pairs = zip(of_prompt, of_response, strict=True)
        if not self.shares_all:
            return self._by_equality(prompts, [(a, data[c:d]) for (a, _), (c, d) in pairs])
        shortest, heads = list[bytes](), dict[int, bytes]()
        for a in sorted(prompts, key=prompts.__getitem__):
            if not prompts[a].startswith((*shortest[-1:],)):
                shortest.append(prompts[a])
            heads[a] = len(shortest).to_bytes(8, "big") + prompts[a][len(shortest[-1]) :]
        keys = [heads[a] + data[c:d] for (a, _), (c, d) in pairs]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        sizes, common = beginnings([keys[row] for row in order])
        is_first = common == 0  # with its shortest prompt
        common += self.lengths[order] - sizes
        common[is_first] = beginnings(shortest)[1]
        return np.array(order, dtype=np.int64), common

    def _by_equality(
        self, prompts: dict[int, bytes], rows: list[tuple[int, bytes]]
    ) -> tuple[Integers, Integers]:
        """As `_sorted`, of rows whose prompt begins at the byte and whose response has the bytes:
        equal ones follow the first of them, which takes no sort of their tokens."""
        first: dict[Any, int] = {}
        number = {a: first.setdefault(prompt, a) for a, prompt in prompts.items()}
        equal = [first.setdefault((number[a], x), i) for i, (a, x) in enumerate(rows)]
        of_rows = np.array([equal, [number[a] for a, _ in rows]])  # [2, S]
        order = np.lexsort(of_rows)
        is_equal = np.diff(of_rows[:, order], prepend=-1) == 0  # to the row before, and its prompt
        common = np.where(is_equal[1], self.sizes[order, 0], 0)
        return order, np.where(is_equal.all(0), self.lengths[order], common)

    @cached_property
    def ranks(self) -> Integers:
        return self._sorted[0].argsort()

    def common(self, rows: Integers) -> Integers:
        """Return with how many tokens each row begins like the one before it, of a lower rank."""
        between = np.repeat(self.ranks[rows] + 1, 2)[1:-1]
        least = np.minimum.reduceat(np.append(self._sorted[1], 0), between)[::2]
        return np.append(0, least)[: len(rows)]

    def tree(
        self,
        sequences: Integers,
        positions: Integers,
        counts: Integers,
    ) -> Tree:
        """Return the forest of the rows [S'], and where `counts` [S'] tokens of each, those at the
        packed `positions` [T] in its row, are in it."""
        by_rank = self.ranks[sequences].argsort()
        rows = sequences[by_rank]
        lengths, prompts, common = self.lengths[rows], self.sizes[rows, 0], self.common(rows)
        added = lengths - common
        starts = added.cumsum() - added
        above, adds = find(common, np.repeat(by_rank.argsort(), counts), positions)
        chosen = (starts - common)[adds] + positions
        # A segment begins where a row does, and where a later row leaves the path.
        leaves = np.where(common, (starts - common)[above] + common, 0)[added > 0]
        starts = starts[added > 0]
        begins = np.unique(np.append(starts, leaves))
        parents = np.arange(len(begins)) - 1
        parents[begins.searchsorted(starts)] = begins.searchsorted(leaves) - 1
        of_prompt = np.maximum(prompts - common, 0)
        parts = np.stack([of_prompt, added - of_prompt], 1).ravel()
        return Tree(
            np.diff(np.append(begins, added.sum())),
            parents,
            ranges((self.starts + self.sizes)[rows].ravel() - parts, parts),
            ranges(common, added),
            chosen,
        )


def find(common: Integers, rows: Integers, positions: Integers) -> tuple[Integers, Integers]:
    """Return which row adds the last token that each row shares, itself if it shares none; and
    which adds the tokens [T] at `positions` of `rows`."""
    above, left = np.arange(len(common)) - (common > 0), np.flatnonzero(common)
    while len(left := left[common[above[left]] >= common[left]]):
        above[left] = above[above[left]]
    steps = [above]  # 1, 2, 4, ... rows up
    while common[steps[-1]].any():
        steps.append(steps[-1][steps[-1]])
    shared = np.flatnonzero(positions < common[rows])
    adds, positions = rows[shared], positions[shared]
    for step in reversed(steps):
        adds = np.where(positions < common[step[adds]], step[adds], adds)
    rows[shared] = above[adds]
    return above, rows
