"""Packs rollouts into micro-batches in which tokens that several of them begin with appear once, as
a forest of segments (docs/prefix_trees.md). Indices are computed on the host, which reads the
tokens once per update, and go to the device in one asynchronous copy."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maxrl_fast.model.attention import Forest
from maxrl_fast.records import Prompts, Rollouts, cumulative, gather_sequences
from maxrl_fast.runtime.device import to_device, to_host

Integers = NDArray[np.int64]


def host_ranges(starts: Integers, lengths: Integers) -> Integers:
    """As `ranges`, in half of its time."""
    numbers = np.repeat(starts + lengths - lengths.cumsum(), lengths)
    numbers += np.arange(len(numbers))
    return numbers


def beginnings(sequences: list[bytes]) -> tuple[Integers, Integers]:
    """Return how many int64 numbers sequences [n] have, and how many each shares with the one
    before it."""
    lengths = np.array([len(x) // 8 for x in sequences], dtype=np.int64)
    numbers, starts = np.frombuffer(b"".join(sequences), np.int64), lengths.cumsum() - lengths
    both = np.minimum(lengths[1:], lengths[:-1])
    differ = numbers[host_ranges(starts[1:], both)] != numbers[host_ranges(starts[:-1], both)]
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
        if not self.shares_all:
            return self._by_equality()
        data, bounds = self.tokens.tobytes(), np.stack([self.starts, self.starts + self.sizes], 2)
        of_prompt, of_response = (8 * bounds).swapaxes(0, 1).tolist()
        prompts = {a: data[a:b] for a, b in dict(of_prompt).items()}
        shortest, heads = list[bytes](), dict[int, bytes]()
        for a in sorted(prompts, key=prompts.__getitem__):
            if not prompts[a].startswith((*shortest[-1:],)):
                shortest.append(prompts[a])
            heads[a] = len(shortest).to_bytes(8, "big") + prompts[a][len(shortest[-1]) :]
        pairs = zip(of_prompt, of_response, strict=True)
        keys = [heads[a] + data[c:d] for (a, _), (c, d) in pairs]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        sizes, common = beginnings([keys[row] for row in order])
        is_first = common == 0  # with its shortest prompt
        common += self.lengths[order] - sizes
        common[is_first] = beginnings(shortest)[1]
        return np.array(order, dtype=np.int64), common

    def _by_equality(self) -> tuple[Integers, Integers]:
        """As `_sorted`, where equal rows follow the first of them: their tokens are not sorted."""
        narrow = self.tokens.astype(np.min_scalar_type(self.tokens.max(initial=0)))
        data, first = narrow.tobytes(), dict[Any, int]()
        bounds = narrow.itemsize * np.array([self.starts, self.starts + self.sizes])

        def parts(which: int, rows: Integers | slice) -> list[bytes]:
            return [data[a:b] for a, b in zip(*bounds[:, rows, which].tolist(), strict=True)]

        _, some, of_row = np.unique(self.starts[:, 0], return_index=True, return_inverse=True)
        firsts = map(first.setdefault, parts(0, some), some.tolist())
        prompts = np.fromiter(firsts, np.int64)[of_row]
        keys = zip(prompts.tolist(), parts(1, slice(None)), strict=True)
        firsts = map(first.setdefault, keys, range(len(prompts)))
        of_rows = np.stack([np.fromiter(firsts, np.int64), prompts])  # [2, S]
        order = np.lexsort(of_rows)
        is_equal = np.diff(of_rows[:, order], prepend=-1) == 0  # to the row before, and its prompt
        common = np.where(is_equal[1], self.sizes[order, 0], 0)
        return order, np.where(is_equal.all(0), self.lengths[order], common)

    @cached_property
    def ranks(self) -> Integers:
        return self._sorted[0].argsort()

    def common(self, rows: Integers) -> Integers:
        """Return with how many tokens each row begins like the one before it."""
        between = np.repeat(self.ranks[rows] + 1, 2)[1:-1]
        least = np.minimum.reduceat(np.append(self._sorted[1], 0), between)[::2]
        return np.append(0, least)[: len(rows)]

    def tree(
        self, sequences: Integers, counts: Integers, slots: Integers, shifts: Integers
    ) -> Tree:
        """Return the forest of the rows [S'], and where `counts` [S'] tokens of each are in it,
        which its row has at `slots` [T], all ascending, + its shift [S']."""
        ranks = self.ranks[sequences]
        by_rank = ranks.argsort()
        ranks[by_rank] = np.arange(len(ranks))  # of the chosen rows
        rows = sequences[by_rank]
        lengths, prompts, common = self.lengths[rows], self.sizes[rows, 0], self.common(rows)
        added = lengths - common
        starts = added.cumsum() - added
        offsets = starts - common
        chosen = slots + np.repeat(shifts + offsets[ranks], counts)
        # the first tokens of a row may be those of another one
        begins = counts.cumsum() - counts
        shared = np.clip(slots.searchsorted(common[ranks] - shifts) - begins, 0, counts)
        slots_of_shared = host_ranges(begins, shared)
        positions = slots[slots_of_shared] + np.repeat(shifts, shared)
        above, adds = find(common, np.repeat(ranks, shared), positions)
        chosen[slots_of_shared] = offsets[adds] + positions
        # A segment begins where a row does, and where a later row leaves the path.
        leaves = np.where(common, (starts - common)[above] + common, 0)[added > 0]
        starts = starts[added > 0]
        is_first = np.zeros(added.sum(), dtype=bool)
        is_first[starts] = is_first[leaves] = True
        begins = np.flatnonzero(is_first)
        parents = np.arange(len(begins)) - 1
        parents[begins.searchsorted(starts)] = begins.searchsorted(leaves) - 1
        of_prompt = np.maximum(prompts - common, 0)
        parts = np.stack([of_prompt, added - of_prompt], 1).ravel()
        return Tree(
            np.diff(begins, append=len(is_first)),
            parents,
            host_ranges((self.starts + self.sizes)[rows].ravel() - parts, parts),
            host_ranges(common, added),
            chosen,
        )


def find(common: Integers, rows: Integers, positions: Integers) -> tuple[Integers, Integers]:
    """Return which row adds the last token that each row shares, itself if it shares none; and the
    tokens [T] at `positions` of `rows`, which share them."""
    above, left = np.arange(len(common)) - (common > 0), np.flatnonzero(common)
    while len(left := left[common[above[left]] >= common[left]]):
        above[left] = above[above[left]]
    steps = [above]  # 1, 2, 4, ... rows up
    while common[steps[-1]].any():
        steps.append(steps[-1][steps[-1]])
    for step in reversed(steps):
        rows = np.where(positions < common[step[rows]], step[rows], rows)
    return above, above[rows]


@dataclass(frozen=True)
class MicroBatch:
    """The packed tokens that the model reads, and the targets of its predictions. What an
    environment inserted is read and is not a target."""

    tokens: Tensor  # [U] int64
    positions: Tensor  # [U] int64
    forest: Forest
    rows: Tensor  # [R] int64, positions that predict a target
    target_rows: Tensor  # [T] int64, which of `rows` predicts each target
    by_row: list[Tensor]  # int64 [T] and [R+1], of target_rows: see choose_rows
    targets: Tensor  # [T] int64
    cu_seqlens: Tensor  # [S+1] int64, of the targets
    advantages: Tensor  # [S] float32
    old_logprobs: Tensor  # [T] float32
    ref_logprobs: Tensor | None  # [T] float32
    importance_weights: Tensor | None  # [T] float32, a factor of each token's advantage
    sampler_weights: Tensor | None  # [T] float32, the part of these that is --correction's
    target_index: Tensor  # [T] int64, index of each target among the rollouts' tokens
    teacher: "MicroBatch | None" = None  # the same targets after the teacher's prompts

    def by_token(self, per_sequence: Tensor) -> Tensor:
        size = len(self.targets)
        return per_sequence.repeat_interleave(self.cu_seqlens.diff(), output_size=size)


@dataclass(frozen=True)
class Packer:
    prompts: Prompts
    rollouts: Rollouts
    advantages: Tensor  # [S]
    shares_all: bool = True  # what samples begin with; False: prompts and whole rows
    teacher: "Packer | None" = None  # of the same rollouts, to the teacher's prompts

    @property
    def num_rollouts(self) -> int:
        return len(self.rollouts) // len(self.prompts)

    @cached_property
    def _on_host(self) -> list[Tensor]:
        """cu_seqlens of prompts and of responses, advantages, all tokens, and how many were
        inserted before each."""
        rollouts, inserted = self.rollouts, self.rollouts.inserted
        none = torch.zeros(len(rollouts.tokens) + 1, dtype=torch.int64)
        counts = [] if inserted is None else [inserted.cu_seqlens]
        cu_seqlens = self.prompts.cu_seqlens, rollouts.cu_seqlens
        return [*to_host(*cu_seqlens, self.advantages, self._tokens, *counts), none]

    @property
    def lengths(self) -> Tensor:
        return self._on_host[1].diff()

    @property
    def host_advantages(self) -> Tensor:
        return self._on_host[2]

    @cached_property
    def _prompt_lengths(self) -> Tensor:  # [S]
        return self._on_host[0].diff().repeat_interleave(self.num_rollouts)

    @cached_property
    def _whole_cu_seqlens(self) -> Tensor:  # [S+1] of responses with what was inserted
        return self._on_host[1] + self._on_host[4][self._on_host[1]]

    @cached_property
    def rows(self) -> SortedRows:
        """Each rollout's prompt, and its response without the last token."""
        prompt_cu, response_cu = self._on_host[0], self._whole_cu_seqlens
        starts = prompt_cu[:-1].repeat_interleave(self.num_rollouts)
        starts = torch.stack([starts, prompt_cu[-1] + response_cu[:-1]], 1)
        sizes = torch.stack([self._prompt_lengths, (response_cu.diff() - 1).clamp_min(0)], 1)
        tokens = self._on_host[3].numpy()
        return SortedRows(tokens, starts.numpy(), sizes.numpy(), self.shares_all)

    def pack(self, sequences: Tensor) -> MicroBatch:
        """Pack the chosen rollouts into a micro-batch; `sequences` [S] are ascending, on the host.
        Prompts abc and de; responses uvw and x to abc, yz and yyz to de:

            index         0  1  2  3  4 | 5  6  7  8
            tokens        a  b  c  u  v | d  e  y  y     w, x and both z predict nothing
            segments      0  0  0  1  1 | 2  2  2  3     each row ends one; 1 is below 0, 3 below 2
            positions     0  1  2  3  4 | 0  1  2  3     a token's in its row
            targets       u  v  w  x  y  z  y  y  z      packed by response, cu_seqlens 0 3 4 6 9
            read at       2  3  4  2  6  7  6  7  8      the index that predicts each target
            rows          2  3  4  6  7  8               those positions, each once
            target_rows   0  1  2  0  3  4  3  4  5      rows[target_rows] is "read at"
        """
        lengths, chosen = self.lengths[sequences], sequences.numpy()
        targets = host_ranges(self._on_host[1].numpy()[chosen], lengths.numpy())
        # a token is read at the position before its own
        shifts = (self._prompt_lengths - 1 - self._whole_cu_seqlens[:-1])[sequences]
        slots, rollouts = targets, self.rollouts
        if rollouts.inserted is not None:
            slots = targets + self._on_host[4].numpy()[targets + 1]
        tree = self.rows.tree(chosen, lengths.numpy(), slots, shifts.numpy())
        sizes = np.bincount(tree.chosen, minlength=len(tree.index))  # of the targets of each token
        rows = np.flatnonzero(sizes > 0)
        numbers = np.empty_like(sizes)
        numbers[rows] = np.arange(len(rows))
        by_row = tree.chosen.argsort(kind="stable")
        on_host = tree.index, tree.positions, rows, numbers[tree.chosen], by_row, targets
        bounds = cumulative(torch.from_numpy(sizes[rows])), cumulative(lengths)
        device = rollouts.tokens.device
        index, positions, at, target_rows, order, target_index, starts, cu, of_chosen = to_device(
            device, *map(torch.from_numpy, on_host), *bounds, sequences
        )
        optional = {
            name: None
            if (x := getattr(rollouts, name)) is None
            else x.index_select(0, target_index)
            for name in ("ref_logprobs", "importance_weights", "sampler_weights")
        }
        return MicroBatch(
            tokens=self._tokens.index_select(0, index),
            positions=positions,
            forest=Forest(torch.from_numpy(tree.lengths), torch.from_numpy(tree.parents), device),
            rows=at,
            target_rows=target_rows,
            by_row=[order, starts],
            targets=rollouts.tokens.index_select(0, target_index),
            cu_seqlens=cu,
            advantages=self.advantages[of_chosen],
            old_logprobs=rollouts.logprobs.index_select(0, target_index),
            **optional,
            target_index=target_index,
            teacher=None if self.teacher is None else self.teacher.pack(sequences),
        )

    @cached_property
    def _tokens(self) -> Tensor:
        return torch.cat([self.prompts.tokens, self.rollouts.all_tokens])

    def positions(self, sequences: Tensor) -> Tensor:
        positions, _ = gather_sequences(self._on_host[1], sequences)
        return to_device(self.rollouts.tokens.device, positions)[0]

    def _groups(self, sequences: Tensor) -> tuple[Integers, Integers, Integers]:
        """Return sequences by group, sorted by tokens; how many tokens each adds to its group's
        tree; and where the groups begin and end."""
        chosen, group = sequences.numpy(), sequences.numpy() // self.num_rollouts
        rows = chosen[(group * len(self.rollouts) + self.rows.ranks[chosen]).argsort()]
        firsts, common = np.flatnonzero(np.diff(group, prepend=-1)), self.rows.common(rows)
        common[firsts] = 0
        return rows, self.rows.lengths[rows] - common, np.append(firsts, len(rows))

    def split(self, sequences: Tensor, token_budget: int) -> list[Tensor]:
        """Split ascending sequences into micro-batches of at most `token_budget` tokens, or of one
        longer row: between groups, and within a group that has more tokens. What samples of a group
        begin with counts once, although `pack` repeats some."""
        rows, added, bounds = self._groups(sequences)
        ends, starts, room = added.cumsum(), list[int](), -1  # room: where the last part may end
        for start, stop in pairwise(bounds.tolist()):
            while start < stop and ends[stop - 1] > room:
                starts.append(start)
                room = ends[start] + token_budget - self.rows.lengths[rows[start]]
                start = max(start + 1, int(ends.searchsorted(room, side="right")))
        return [torch.from_numpy(np.sort(part)) for part in np.split(rows, starts)[1:]]

    def shortest(self, sequences: Tensor) -> Tensor:
        """Return the sequence [1] with the fewest tokens, those of its prompt included."""
        tokens = (self._prompt_lengths + self._whole_cu_seqlens.diff())[sequences]
        return sequences[tokens.argmin()].view(1)

    def share(self, sequences: Tensor, num_ranks: int) -> list[Tensor]:
        """Divide sequences among the ranks by whole groups of about equal numbers of tokens."""
        if num_ranks == 1:
            return [sequences]
        rows, added, bounds = self._groups(sequences)
        of_groups = torch.from_numpy(rows).split(np.diff(bounds).tolist())
        sizes = np.add.reduceat(added, bounds[:-1]).tolist()
        loads, shares = [0] * num_ranks, [[sequences[:0]] for _ in range(num_ranks)]
        for tokens, own in sorted(zip(sizes, of_groups, strict=True), key=lambda group: -group[0]):
            rank = loads.index(min(loads))
            loads[rank] += tokens
            shares[rank].append(own)
        return [torch.cat(share).sort().values for share in shares]
