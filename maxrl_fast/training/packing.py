"""Packs rollouts into micro-batches in which tokens that several of them begin with appear once.
Indices are computed on the host, which reads the tokens once per update, and go to the device in
one asynchronous copy."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from maxrl_fast.model.attention import Forest
from maxrl_fast.records import Prompts, Rollouts, cumulative, gather_sequences, ranges
from maxrl_fast.runtime.device import to_device, to_host
from maxrl_fast.training.prefix_tree import Integers, SortedRows


@dataclass(frozen=True)
class MicroBatch:
    """The packed tokens that the model reads, a forest of what several rows begin with, and the
    targets of its predictions. What an environment inserted is read and is not a target."""

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
    """Packs micro-batches of a step's rollouts, which have `advantages` [S]."""

    prompts: Prompts
    rollouts: Rollouts
    advantages: Tensor
    shares_all: bool = True  # what samples begin with; False: prompts and whole rows
    teacher: "Packer | None" = None  # of the same rollouts, to the teacher's prompts

    @property
    def num_rollouts(self) -> int:
        return len(self.rollouts) // len(self.prompts)

    @cached_property
    def _on_host(self) -> list[Tensor]:
        """cu_seqlens of prompts and of responses, advantages, all tokens, and how many were
        inserted before each; read once."""
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
    def _read_at(self) -> Tensor:
        """[T] the position in its row that predicts each sampled token: the one before it."""
        slots = torch.arange(len(self.rollouts.tokens)) + self._on_host[4][1:]
        firsts = self._prompt_lengths - 1 - self._whole_cu_seqlens[:-1]
        return slots + firsts.repeat_interleave(self.lengths)

    @cached_property
    def rows(self) -> SortedRows:
        """Each rollout's prompt, and its response without the last token."""
        prompt_cu, response_cu = self._on_host[0], self._whole_cu_seqlens
        starts = prompt_cu[:-1].repeat_interleave(self.num_rollouts)
        starts = torch.stack([starts, prompt_cu[-1] + response_cu[:-1]], 1)
        sizes = torch.stack([self._prompt_lengths, (response_cu.diff() - 1).clamp_min(0)], 1)
        return SortedRows(*(x.numpy() for x in (self._on_host[3], starts, sizes)), self.shares_all)

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
        lengths, of_host = self.lengths[sequences], sequences
        targets = ranges(self._on_host[1][:-1][sequences], lengths)  # among the sampled tokens
        of_rows = sequences.numpy(), self._read_at[targets].numpy(), lengths.numpy()
        tree = self.rows.tree(*of_rows)
        predicted_from = torch.from_numpy(tree.chosen)  # [T]
        predicts = torch.zeros(len(tree.index), dtype=torch.bool)
        predicts[predicted_from] = True
        device, target_rows = self.rollouts.tokens.device, (predicts.cumsum(0) - 1)[predicted_from]
        by_row = torch.from_numpy(target_rows.numpy().argsort(kind="stable"))
        index, positions, rows, target_rows, *of_row, cu, target_index, sequences = to_device(
            device,
            *(torch.from_numpy(tree.index), torch.from_numpy(tree.positions)),
            *(predicts.nonzero()[:, 0], target_rows, by_row),
            *(cumulative(target_rows.bincount()), cumulative(lengths), targets, sequences),
        )
        rollouts = self.rollouts
        optional = {
            name: None if (x := getattr(rollouts, name)) is None else x[target_index]
            for name in ("ref_logprobs", "importance_weights", "sampler_weights")
        }
        return MicroBatch(
            tokens=self._tokens[index],
            positions=positions,
            forest=Forest(torch.from_numpy(tree.lengths), torch.from_numpy(tree.parents), device),
            rows=rows,
            target_rows=target_rows,
            by_row=of_row,
            targets=rollouts.tokens[target_index],
            cu_seqlens=cu,
            advantages=self.advantages[sequences],
            old_logprobs=rollouts.logprobs[target_index],
            **optional,
            target_index=target_index,
            teacher=None if self.teacher is None else self.teacher.pack(of_host),
        )

    @cached_property
    def _tokens(self) -> Tensor:
        return torch.cat([self.prompts.tokens, self.rollouts.all_tokens])

    def positions(self, sequences: Tensor) -> Tensor:
        positions, _ = gather_sequences(self._on_host[1], sequences)
        return to_device(self.rollouts.tokens.device, positions)[0]

    def _groups(self, sequences: Tensor) -> tuple[Integers, Integers, Integers]:
        """Return sequences by group, sorted by their tokens; how many tokens each adds to its
        group's tree; and where the groups begin and end."""
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
        """Return the chosen sequence [1] with the fewest tokens, those of its prompt included."""
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
