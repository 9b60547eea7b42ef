"""The records that the stages of a step exchange. Shapes everywhere: G prompts (groups), N rollouts
per prompt, S = G N sequences, T packed response tokens, V vocabulary, H hidden. A packed tensor
holds sequences end to end; sequence s is `[cu_seqlens[s], cu_seqlens[s + 1])`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, pairwise
from types import NoneType
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from typing_extensions import Self  # torch needs it too

from maxrl_fast.algorithms.tokens import sequence_sums as sequence_sums
from maxrl_fast.runtime.device import to_device


def pack(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    tokens = torch.tensor([*chain(*sequences)], dtype=torch.int64)
    return tokens, cumulative(torch.tensor([*map(len, sequences)], dtype=torch.int64))


def unpack(tokens: Tensor, lengths: Tensor) -> list[list[int]]:
    return [part.tolist() for part in tokens.cpu().split(lengths.tolist())]


def cumulative(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenate the ranges [start, start + length)."""
    shift = torch.repeat_interleave(starts - cumulative(lengths)[:-1], lengths)
    return torch.arange(len(shift), device=shift.device) + shift


def gather_sequences(cu_seqlens: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed positions [T'] of the chosen sequences, and their cu_seqlens."""
    lengths = cu_seqlens.diff()[sequences]
    return ranges(cu_seqlens[:-1][sequences], lengths), cumulative(lengths)


def padded_slots(lengths: Tensor, width: int) -> Tensor:
    """Return each packed token's index in a flattened, right-padded [S, width]: [T]."""
    is_token = torch.arange(width, device=lengths.device) < lengths[:, None]
    return is_token.flatten().nonzero()[:, 0]


# What the first dimension of a field counts. BOUNDS: where each item's tokens begin and end.
PROMPT, SEQUENCE, TOKEN, INSERTED, BOUNDS = "prompt", "sequence", "token", "inserted", "bounds"
TEACHER = "teacher"


@cache
def _fields(record: type) -> dict[str, tuple[str, torch.dtype | None, bool]]:
    """Return each field's index space, its dtype, and whether it may be None."""
    fields = {}
    for name, hint in get_type_hints(record, include_extras=True).items():
        if get_origin(hint) is Annotated:
            space, dtype = (*hint.__metadata__, None)[:2]
            fields[name] = space, dtype, NoneType in get_args(hint.__origin__)
    return fields


@dataclass(frozen=True)
class Ragged(ABC):
    """A record whose fields say what their first dimension counts, as Annotated[Tensor, SEQUENCE,
    dtype]: tensors, tuples, records or None. Others belong to the whole record."""

    @abstractmethod
    def positions(self, items: Tensor) -> dict[str, Tensor]:
        """Return the indices of what belongs to the items, by index space."""

    def select(self, items: Tensor) -> Self:
        """Return the items (prompts or sequences) at int64 indices, in this order."""
        at, chosen = self.positions(items), dict[str, Any]()
        for name, (space, *_) in _fields(type(self)).items():
            value = getattr(self, name)
            if space == BOUNDS:
                chosen[name] = cumulative(value.diff()[items])
            elif isinstance(value, Ragged):
                chosen[name] = value.select(at[space])
            elif isinstance(value, tuple):
                chosen[name] = tuple(value[i] for i in at[space].tolist())
            elif value is not None:
                chosen[name] = value[at[space]]
        return replace(self, **chosen)

    @classmethod
    def concatenate(
        cls, parts: Sequence[Self], across: Callable[[Tensor], Tensor] | None = None
    ) -> Self:
        """Concatenate the fields that all parts have; others are the first part's. across: of a
        tensor with those of other ranks; tuples are then left out."""
        fields, joined = _fields(cls), dict[str, Any]()
        columns = {name: [getattr(part, name) for part in parts] for name in fields}
        has_all = torch.tensor([[all(x is not None for x in own) for own in columns.values()]])
        has_all = (across(has_all) if across else has_all).all(0)
        for (name, values), is_known in zip(columns.items(), has_all.tolist(), strict=True):
            if not is_known or (across and isinstance(values[0], tuple)):
                joined[name] = None
            elif isinstance(values[0], Ragged):
                joined[name] = type(values[0]).concatenate(values, across)
            elif isinstance(values[0], tuple):
                joined[name] = tuple(chain(*values))
            else:
                is_bounds = fields[name][0] == BOUNDS
                whole = torch.cat([x.diff() for x in values] if is_bounds else values)
                whole = across(whole) if across else whole
                joined[name] = cumulative(whole) if is_bounds else whole
        return replace(parts[0], **joined)

    def tensors(self) -> Iterator[Tensor]:
        for x in vars(self).values():
            yield from (
                [x] if isinstance(x, Tensor) else x.tensors() if isinstance(x, Ragged) else ()
            )

    def to(self, device: torch.device) -> Self:
        values = ((name, getattr(self, name)) for name in _fields(type(self)))
        return replace(
            self, **{n: x.to(device) for n, x in values if isinstance(x, Tensor | Ragged)}
        )


@dataclass(frozen=True)
class Packed(Ragged):
    """Items with the tokens of each, end to end; SPACES: what the items and the tokens are."""

    SPACES: ClassVar[tuple[str, str]]

    tokens: Tensor
    cu_seqlens: Tensor

    def __len__(self) -> int:  # without reading from the device
        return self.cu_seqlens.numel() - 1

    @property
    def lengths(self) -> Tensor:
        return self.cu_seqlens.diff()

    def by_token(self, of_items: Tensor) -> Tensor:
        """Repeat each item's number for each of its tokens."""
        return of_items.repeat_interleave(self.lengths, output_size=len(self.tokens))

    def at(self, items: Tensor) -> list[Tensor]:
        """Return the positions of the tokens of items, their cu_seqlens, and the items, all on the
        device."""
        items = items.cpu()
        return to_device(self.tokens.device, *gather_sequences(self.cu_seqlens.cpu(), items), items)

    def positions(self, items: Tensor) -> dict[str, Tensor]:
        slots, _ = gather_sequences(self.cu_seqlens, items)
        return dict(zip(self.SPACES, (items, slots), strict=True))

    def find_wrong(self, num_items: int, device: torch.device) -> str:
        """Return what is wrong with a field; "" if nothing is."""
        sizes = {self.SPACES[0]: num_items, BOUNDS: num_items + 1}
        for name, (space, dtype, is_optional) in _fields(type(self)).items():
            value = getattr(self, name)
            if value is None and is_optional:
                continue
            if isinstance(value, Packed):
                if wrong := value.find_wrong(sizes[space], device):
                    return f"{name}.{wrong}"
                continue
            if not isinstance(value, Tensor):
                return f"{name} of {type(value).__name__}, wanted a tensor"
            if value.dtype != dtype or value.ndim != 1 or value.device.type != device.type:
                return (
                    f"{name} {value.dtype} {[*value.shape]} on {value.device.type}, wanted {dtype} "
                    f"of one dimension on {device.type}"
                )
            if len(value) != sizes.setdefault(space, len(value)):
                return f"{name} of {len(value)} values, wanted {sizes[space]}"
        if not num_items:
            return ""
        bounds = torch.stack([*self.cu_seqlens[[0, -1]], self.lengths.amin()])
        first, end, shortest = bounds.tolist()
        if (first, end) != (0, len(self.tokens)):
            return f"cu_seqlens from {first} to {end}, wanted 0 to the {len(self.tokens)} tokens"
        return "cu_seqlens that does not ascend" if shortest < 0 else ""


@dataclass(frozen=True)
class Prompts(Packed):
    SPACES = PROMPT, TOKEN

    tokens: Annotated[Tensor, TOKEN, torch.int64]  # [sum of prompt lengths], packed
    cu_seqlens: Annotated[Tensor, BOUNDS, torch.int64]  # [G+1]
    ids: Annotated[Tensor, PROMPT, torch.int64]  # [G], each prompt's index in its task
    # [G], dataset columns for reward functions
    columns: Annotated[tuple[dict[str, Any], ...] | None, PROMPT] = None

    @classmethod
    def none(cls, device: torch.device) -> "Prompts":
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(nothing, cumulative(nothing), nothing)

    def take(self, start: int, count: int) -> "Prompts":
        """Return `count` prompts from `start` on, or fewer at the end."""
        return self.select(torch.arange(len(self), device=self.ids.device)[start : start + count])


@dataclass(frozen=True)
class Inserted(Packed):
    """What environments wrote, from which nothing is learned. Item t is what stands before the
    sampled token t, mostly nothing:

        sampled     7 2 5 | 8 2 9
        inserted       ^44      ^6       4 4 before 5, and 6 before 9
        cu_seqlens  0 0 0 2 2 2 3"""

    SPACES = TOKEN, INSERTED

    tokens: Annotated[Tensor, INSERTED, torch.int64]  # [E], packed
    cu_seqlens: Annotated[Tensor, BOUNDS, torch.int64]  # [T+1]


@dataclass(frozen=True)
class Rollouts(Packed):
    """N responses to each of G prompts, grouped by prompt: sequence s answers prompt s // N."""

    SPACES = SEQUENCE, TOKEN

    tokens: Annotated[Tensor, TOKEN, torch.int64]  # [T], packed, the stop token included
    cu_seqlens: Annotated[Tensor, BOUNDS, torch.int64]  # [S+1]
    # [T], under the full distribution at the sampling temperature, before top-k, top-p and min-p
    logprobs: Annotated[Tensor, TOKEN, torch.float32]
    # [S], ended by the length limit instead of a stop token
    truncated: Annotated[Tensor, SEQUENCE, torch.bool]
    # [T], a factor of each token's advantage
    importance_weights: Annotated[Tensor | None, TOKEN, torch.float32] = None
    # [T], the part of these that corrects for the sampler, without an objective's own factors
    sampler_weights: Annotated[Tensor | None, TOKEN, torch.float32] = None
    inserted: Annotated[Inserted | None, TOKEN] = None  # by environments; None: one turn
    # [T], of the reference policy, if there is one
    ref_logprobs: Annotated[Tensor | None, TOKEN, torch.float32] = None

    @classmethod
    def given(cls, responses: Sequence[Sequence[int]]) -> "Rollouts":
        """Return responses that no policy sampled, such as demonstrations, with log-probs 0."""
        tokens, cu_seqlens = pack(responses)
        truncated = torch.zeros(len(responses), dtype=torch.bool)
        return cls(tokens, cu_seqlens, torch.zeros(len(tokens)), truncated)

    @classmethod
    def from_padded(
        cls,
        tokens: Tensor,
        logprobs: Tensor,
        lengths: Tensor,
        truncated: Tensor,
        given: Tensor | None = None,
    ) -> "Rollouts":
        """Pack right-padded tokens and log-probs [S, width] of these lengths [S].

        given: [S, width] bool, the tokens that environments wrote, which become `inserted`; no row
        begins or ends with one. Lengths count them."""
        slots = padded_slots(lengths, tokens.shape[1])
        tokens, logprobs = tokens.flatten()[slots], logprobs.flatten()[slots]
        if given is None or not (is_given := given.flatten()[slots]).any():
            return cls(tokens, cumulative(lengths), logprobs, truncated)
        #     tokens       7 2 4 4 5 | 8 2 6 9      4 4 and 6 are given
        #     is_given     . . x x . | . . x .
        #     num_sampled  0 1 2 2 2   3 4 5 5 6    [T + E + 1], before each token
        #     num_given    0 0 0 1 2   2 2 2 3 3    0 0 2 2 2 3 before each sampled one
        is_sampled = ~is_given
        num_sampled, num_given = cumulative(is_sampled.long()), cumulative(is_given.long())
        bounds = torch.nn.functional.pad(num_given[:-1][is_sampled], (1, 0))  # [T+1]
        inserted = Inserted(tokens[is_given], bounds)
        tokens, cu_seqlens = tokens[is_sampled], num_sampled[cumulative(lengths)]
        return cls(tokens, cu_seqlens, logprobs[is_sampled], truncated, inserted=inserted)

    @classmethod
    def concatenate(
        cls, parts: Sequence[Self], across: Callable[[Tensor], Tensor] | None = None
    ) -> Self:
        """As `Ragged`; a part of one turn has no insertions beside episodes."""
        has_turns = torch.tensor([part.inserted is not None for part in parts])
        if (across(has_turns) if across else has_turns).any():
            nothing = (Inserted(x.tokens[:0], cumulative(0 * x.tokens)) for x in parts)
            pairs = zip(parts, nothing, strict=True)
            parts = [x if x.inserted else replace(x, inserted=none) for x, none in pairs]
        return super().concatenate(parts, across)

    @property
    def all_tokens(self) -> Tensor:  # [T + E], with what was inserted
        if (inserted := self.inserted) is None:
            return self.tokens
        slots = torch.arange(len(self.tokens), device=self.tokens.device) + inserted.cu_seqlens[1:]
        whole = self.tokens.new_empty(len(self.tokens) + len(inserted.tokens))
        is_inserted = torch.ones_like(whole, dtype=torch.bool).index_fill_(0, slots, False)
        return whole.masked_scatter_(is_inserted, inserted.tokens).index_copy_(
            0, slots, self.tokens
        )

    def turns(self) -> list[list[list[int]]]:
        """Return each response as token lists: a turn, what was inserted after it, a turn, ..."""
        responses = unpack(self.tokens, self.lengths)
        if self.inserted is None:
            return [[tokens] for tokens in responses]
        counts, found = self.inserted.lengths.cpu(), list[list[list[int]]]()
        insertions = iter(unpack(self.inserted.tokens, counts[counts > 0]))
        before = counts.split(self.lengths.tolist())
        for tokens, own in zip(responses, before, strict=True):
            ends = [*own.nonzero()[:, 0].tolist(), len(tokens)]
            found.append([tokens[: ends[0]]])
            for start, end in pairwise(ends):
                found[-1] += [next(insertions), tokens[start:end]]
        return found

    def padded_tokens(self, fill: int) -> Tensor:
        width = int(self.lengths.max()) if len(self) else 0
        padded = self.tokens.new_full((len(self), width), fill)
        padded.view(-1)[padded_slots(self.lengths, width)] = self.tokens
        return padded


@dataclass(frozen=True)
class Samples(Ragged):
    """G prompts with N responses to each."""

    prompts: Annotated[Prompts, PROMPT]  # G
    rollouts: Annotated[Rollouts, SEQUENCE]  # S = G N
    # what the reference policy reads instead, [G] or of each rollout [S]; None: the same
    teacher_prompts: Annotated[Prompts | None, TEACHER] = field(default=None, kw_only=True)
    # [S], 0: the rollout has no divergence from the teacher; None: all 1
    teacher_weights: Annotated[Tensor | None, SEQUENCE] = field(default=None, kw_only=True)

    def positions(self, items: Tensor) -> dict[str, Tensor]:
        rollouts = torch.arange(self.num_rollouts, device=items.device)
        sequences = (items[:, None] * self.num_rollouts + rollouts).flatten()
        is_of_prompt = self.teacher_weights is None
        teacher = items if is_of_prompt else sequences
        return {PROMPT: items, SEQUENCE: sequences, TEACHER: teacher}

    def weighted(self, factors: Tensor) -> Self:
        if self.rollouts.importance_weights is not None:
            factors = factors * self.rollouts.importance_weights
        return replace(self, rollouts=replace(self.rollouts, importance_weights=factors))

    @property
    def num_rollouts(self) -> int:
        return len(self.rollouts) // len(self.prompts)

    @property
    def sequences(self) -> Tensor:  # [S] int64, on the host, where micro-batches are built
        return torch.arange(len(self.rollouts))
