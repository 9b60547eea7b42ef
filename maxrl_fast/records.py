"""The records that the stages of a step exchange.

Shapes everywhere: G prompts (groups), N rollouts per prompt, S = G N sequences, T packed response
tokens, V vocabulary, H hidden. A packed tensor holds sequences end to end; sequence s is
`[cu_seqlens[s], cu_seqlens[s + 1])`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def pack(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Concatenate token lists; return tokens [T] and cu_seqlens [S+1], both int64."""
    tokens = torch.tensor(
        [token for sequence in sequences for token in sequence], dtype=torch.int64
    )
    return tokens, cumulative(
        torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)
    )


def unpack(tokens: Tensor, lengths: Tensor) -> list[list[int]]:
    """Return packed sequences [T] of these lengths [S] as token lists."""
    return [part.tolist() for part in tokens.cpu().split(lengths.tolist())]


def cumulative(lengths: Tensor) -> Tensor:
    """Return cu_seqlens [S+1] of lengths [S], both int64."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenate the ranges [start, start + length): int64 [sum of lengths]."""
    shift = torch.repeat_interleave(starts - cumulative(lengths)[:-1], lengths)
    return torch.arange(len(shift), device=shift.device) + shift


def sequence_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum packed values [T] over sequences of these lengths [S]; returns [S]."""
    # Not index_add, which adds in a varying order on a GPU.
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)


def gather_sequences(cu_seqlens: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed positions [T'] of the chosen sequences, concatenated, and their
    cu_seqlens.
    """
    lengths = cu_seqlens.diff()[sequences]
    return ranges(cu_seqlens[:-1][sequences], lengths), cumulative(lengths)


def padded_slots(lengths: Tensor, width: int) -> Tensor:
    """Return each packed token's index in a flattened, right-padded [S, width]: int64 [T]."""
    sequence = torch.repeat_interleave(lengths)
    starts = torch.repeat_interleave(cumulative(lengths)[:-1], lengths)
    return sequence * width + torch.arange(sequence.numel(), device=lengths.device) - starts


@dataclass(frozen=True)
class Prompts:
    """G prompts."""

    tokens: Tensor  # [sum of prompt lengths] int64, packed
    cu_seqlens: Tensor  # [G+1] int64
    ids: Tensor  # [G] int64, each prompt's index in its task
    columns: tuple[dict[str, Any], ...] | None = None  # [G], dataset columns for reward functions

    def __len__(self) -> int:
        return self.ids.numel()

    @property
    def lengths(self) -> Tensor:  # [G]
        return self.cu_seqlens.diff()

    @classmethod
    def none(cls, device: torch.device) -> "Prompts":
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(nothing, cumulative(nothing), nothing)

    def take(self, start: int, count: int) -> "Prompts":
        """Return prompts `start` to `start + count - 1`, or fewer at the end."""
        cu_seqlens = self.cu_seqlens[start : start + count + 1]
        tokens, ids = self.tokens[cu_seqlens[0] : cu_seqlens[-1]], self.ids[start : start + count]
        return Prompts(
            tokens,
            cu_seqlens - cu_seqlens[0],
            ids,
            self.columns and self.columns[start : start + count],
        )

    def select(self, indices: Tensor) -> "Prompts":
        """Return the prompts at int64 indices."""
        slots, cu_seqlens = gather_sequences(self.cu_seqlens, indices)
        columns = self.columns and tuple(self.columns[i] for i in indices.tolist())
        return Prompts(self.tokens[slots], cu_seqlens, self.ids[indices], columns)

    @classmethod
    def concatenate(cls, parts: Sequence["Prompts"]) -> "Prompts":
        columns = [part.columns for part in parts if part.columns is not None]
        return cls(
            tokens=torch.cat([part.tokens for part in parts]),
            cu_seqlens=cumulative(torch.cat([part.lengths for part in parts])),
            ids=torch.cat([part.ids for part in parts]),
            columns=tuple(line for lines in columns for line in lines) if columns else None,
        )

    def to(self, device: torch.device) -> "Prompts":
        return Prompts(
            self.tokens.to(device), self.cu_seqlens.to(device), self.ids.to(device), self.columns
        )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if len(known) == len(parts) else None


@dataclass(frozen=True)
class Inserted:
    """What environments wrote between a policy's tokens. Nothing is learned from it."""

    tokens: Tensor  # [E] int64, packed
    cu_seqlens: Tensor  # [I+1] int64, of the insertions; each has at least one token
    before: Tensor  # [I] int64, ascending: the sampled token, among the T, that each stands before

    @classmethod
    def of_counts(cls, tokens: Tensor, counts: Tensor) -> "Inserted":
        """Return insertions [E], of which counts [T] stand before each sampled token."""
        before = counts.nonzero()[:, 0]
        return cls(tokens, cumulative(counts[before]), before)

    def counts(self, num_tokens: int) -> Tensor:
        """Return how many inserted tokens stand before each of T sampled ones: int64 [T]."""
        counts = self.tokens.new_zeros(num_tokens)
        return counts.index_copy_(0, self.before, self.cu_seqlens.diff())

    def slots(self, num_tokens: int) -> Tensor:
        """Return where each of T sampled tokens is among all T + E of the episodes: int64 [T]."""
        counts = self.counts(num_tokens)
        return torch.arange(num_tokens, device=counts.device) + counts.cumsum(0)

    def within(self, tokens: Tensor) -> Tensor:
        """Return sampled tokens [T] with the insertions between them: [T + E]."""
        slots = self.slots(len(tokens))
        whole = tokens.new_empty(len(tokens) + len(self.tokens))
        is_inserted = torch.ones_like(whole, dtype=torch.bool).index_fill_(0, slots, False)
        return whole.masked_scatter_(is_inserted, self.tokens).index_copy_(0, slots, tokens)

    def to(self, device: torch.device) -> "Inserted":
        return Inserted(self.tokens.to(device), self.cu_seqlens.to(device), self.before.to(device))


@dataclass(frozen=True)
class Rollouts:
    """N responses to each of G prompts, grouped by prompt: sequence s answers prompt s // N."""

    tokens: Tensor  # [T] int64, packed, the stop token included
    cu_seqlens: Tensor  # [S+1] int64
    # [T] float32, under the full distribution at the sampling temperature, before top-k, top-p and
    # min-p
    logprobs: Tensor
    truncated: Tensor  # [S] bool, ended by the length limit instead of a stop token
    importance_weights: Tensor | None = None  # [T] float32, a factor of each token's advantage
    inserted: Inserted | None = None  # by environments; None: one turn
    ref_logprobs: Tensor | None = None  # [T] float32, of the reference policy, if there is one

    def __len__(self) -> int:
        """S, without reading from the device."""
        return self.cu_seqlens.numel() - 1

    @classmethod
    def given(cls, responses: Sequence[Sequence[int]]) -> "Rollouts":
        """Return responses that no policy sampled, such as demonstrations, with log-probs 0 and
        none truncated.
        """
        tokens, cu_seqlens = pack(responses)
        return cls(
            tokens,
            cu_seqlens,
            torch.zeros(len(tokens)),
            torch.zeros(len(responses), dtype=torch.bool),
        )

    @classmethod
    def from_padded(
        cls,
        tokens: Tensor,
        logprobs: Tensor,
        lengths: Tensor,
        truncated: Tensor,
        given: Tensor | None = None,
    ) -> "Rollouts":
        """Pack right-padded tokens and log-probs [S, width]; lengths and truncated are [S].

        given: [S, width] bool, the tokens that environments wrote, which become `inserted`; no row
        begins or ends with one. Lengths count them.
        """
        slots = padded_slots(lengths, tokens.shape[1])
        tokens, logprobs = tokens.flatten()[slots], logprobs.flatten()[slots]
        if given is None or not (is_given := given.flatten()[slots]).any():
            return cls(tokens, cumulative(lengths), logprobs, truncated)
        #     tokens    7 2 4 4 5 | 8 2 6 9      4 4 and 6 are given
        #     is_given  . . x x . | . . x .
        #     starts    . . x . . | . . x .      before 2 and 5 sampled tokens: 7 2 5, 8 2 9
        is_sampled = ~is_given
        starts = is_given & torch.nn.functional.pad(is_sampled[:-1], (1, 0))
        num_sampled = cumulative(is_sampled.long())  # [T + E + 1], before each token
        num_given = cumulative(is_given.long())
        bounds = torch.cat([num_given[:-1][starts], num_given[-1:]])  # [I+1]
        return cls(
            tokens[is_sampled],
            num_sampled[cumulative(lengths)],
            logprobs[is_sampled],
            truncated,
            inserted=Inserted(tokens[is_given], bounds, num_sampled[:-1][starts]),
        )

    @classmethod
    def concatenate(cls, parts: Sequence["Rollouts"]) -> "Rollouts":
        inserted = [part.inserted.tokens for part in parts if part.inserted is not None]
        return cls(
            tokens=torch.cat([part.tokens for part in parts]),
            cu_seqlens=cumulative(torch.cat([part.lengths for part in parts])),
            logprobs=torch.cat([part.logprobs for part in parts]),
            truncated=torch.cat([part.truncated for part in parts]),
            importance_weights=_joined([part.importance_weights for part in parts]),
            inserted=Inserted.of_counts(
                torch.cat(inserted), torch.cat([part.num_inserted for part in parts])
            )
            if inserted
            else None,
            ref_logprobs=_joined([part.ref_logprobs for part in parts]),
        )

    def select(self, sequences: Tensor) -> "Rollouts":
        """Return the sequences at int64 indices."""
        slots, cu_seqlens = gather_sequences(self.cu_seqlens, sequences)
        inserted = None
        if self.inserted is not None:
            counts = self.num_inserted
            index, _ = gather_sequences(cumulative(counts), slots)
            inserted = Inserted.of_counts(self.inserted.tokens[index], counts[slots])
        return Rollouts(
            tokens=self.tokens[slots],
            cu_seqlens=cu_seqlens,
            logprobs=self.logprobs[slots],
            truncated=self.truncated[sequences],
            importance_weights=None
            if self.importance_weights is None
            else self.importance_weights[slots],
            inserted=inserted,
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs[slots],
        )

    @property
    def lengths(self) -> Tensor:  # [S]
        return self.cu_seqlens.diff()

    @property
    def num_inserted(self) -> Tensor:  # [T] int64, inserted tokens before each sampled one
        if self.inserted is None:
            return torch.zeros_like(self.tokens)
        return self.inserted.counts(len(self.tokens))

    @property
    def all_tokens(self) -> Tensor:  # [T + E], with what was inserted
        return self.tokens if self.inserted is None else self.inserted.within(self.tokens)

    def turns(self) -> list[list[list[int]]]:
        """Return each response as token lists: a turn, what was inserted after it, a turn, ..."""
        if self.inserted is None:
            return [[tokens] for tokens in unpack(self.tokens, self.lengths)]
        tokens, cu_seqlens = self.tokens.tolist(), self.cu_seqlens.tolist()
        insertions = unpack(self.inserted.tokens, self.inserted.cu_seqlens.diff())
        left = deque(zip(self.inserted.before.tolist(), insertions, strict=True))
        responses = []
        for start, stop in pairwise(cu_seqlens):
            parts = []
            while left and left[0][0] < stop:
                before, insertion = left.popleft()
                parts += [tokens[start:before], insertion]
                start = before
            responses.append([*parts, tokens[start:stop]])
        return responses

    @property
    def mean_logprobs(self) -> Tensor:  # [S], over the tokens of each response
        return sequence_sums(self.logprobs, self.lengths) / self.lengths.clamp_min(1)

    def to(self, device: torch.device) -> "Rollouts":
        return replace(
            self, **{name: x.to(device) for name, x in vars(self).items() if x is not None}
        )

    def padded_tokens(self, fill: int) -> Tensor:
        """Return tokens [S, longest], right-padded with `fill`."""
        lengths = self.lengths
        width = int(lengths.max()) if lengths.numel() else 0
        padded = self.tokens.new_full((lengths.numel() * width,), fill)
        padded[padded_slots(lengths, width)] = self.tokens
        return padded.view(-1, width)


@dataclass(frozen=True)
class Samples:
    prompts: Prompts  # G
    rollouts: Rollouts  # S = G N
    # [G], what the reference policy reads instead; None: the same
    teacher_prompts: Prompts | None = field(default=None, kw_only=True)

    @property
    def num_rollouts(self) -> int:
        return len(self.rollouts) // len(self.prompts)

    @property
    def sequences(self) -> Tensor:
        """0 to S - 1, int64 [S], on the host, where micro-batches are built."""
        return torch.arange(len(self.rollouts))
