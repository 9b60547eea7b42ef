"""Layers with a state (gated delta rule, Mamba, short convolutions) over a forest of prefixes.

Such a layer of transformers keeps its states in a cache: the last columns before its convolution,
and the state of its recurrence. `States` is a cache for one call, whose tensors autograd follows.
So the segments of one depth run in one batch, and hand their states to the segments below: what
several samples begin with is computed once, and no state reaches another sample."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from maxrl_fast.runtime.device import to_device


class States:
    """transformers' cache of one layer: states [n, ...] before a call, and then after it, by the
    index that a layer with several gives them."""

    record_past = True  # a single token is convolved with what was before it, not in place

    def __init__(self, conv: dict[int, Tensor], recurrent: dict[int, Tensor], mask: Tensor | None):
        self.conv_states, self.recurrent_states, self._mask = conv, recurrent, mask
        self._parts = conv, recurrent

    @property
    def layers(self) -> "States":  # transformers before 5.20 reads the states of layers[i]
        return self

    def __getitem__(self, layer_idx: int) -> "States":
        return self

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv_states.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent_states.get(state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = 0) -> bool:
        return bool(self.conv_states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return self.record_past

    def update_conv_state(
        self, new: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **_: Any
    ) -> Tensor:
        """Return the columns [n, C, L] after those kept before; the last ones are kept."""
        if self._mask is not None:
            new = new * self._mask[:, None].to(new.dtype)
        before = self.conv_states.get(state_idx)
        whole = new if before is None else torch.cat([before, new], -1)
        self.conv_states[state_idx] = F.pad(whole, (conv_kernel_size, 0))[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(
        self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.recurrent_states[state_idx] = state
        return state

    def rows(self, index: Tensor, mask: Tensor | None = None) -> "States":
        conv, recurrent = ({k: x[index] for k, x in own.items()} for own in self._parts)
        return States(conv, recurrent, mask)

    def zeros(self, num_rows: int) -> "States":
        conv, recurrent = (
            {k: x.new_zeros(num_rows, *x.shape[1:]) for k, x in own.items()} for own in self._parts
        )
        return States(conv, recurrent, None)

    def store(self, index: Tensor, other: "States", chosen: Tensor | None = None) -> None:
        """Copy the rows of another to the rows `index` [n], or those of them that are `chosen`."""
        for own, new in zip(self._parts, other._parts, strict=True):
            for k, x in new.items():
                keep = None if chosen is None else chosen.view(-1, *[1] * (x.dim() - 1))
                own[k][index] = x if keep is None else torch.where(keep, x, own[k][index])

    @classmethod
    def joined(cls, several: list["States"]) -> "States":
        """Return the rows of all, one after another."""
        if not several:
            return cls({}, {}, None)
        conv, recurrent = (
            {k: torch.cat([x[k] for x in own]) for k in own[0]}
            for own in zip(*(x._parts for x in several), strict=True)
        )
        return cls(conv, recurrent, None)


# a layer's forward pass of hidden states [n, L, H] with states before them; mask [n, L]: False
# where there is no token
Run = Callable[[Tensor, States, Tensor | None], Tensor]
# called with a key of the layer, its Run, and the hidden states [U, H] of a packed stream
Recurrence = Callable[[tuple[int, int], Run, Tensor], Tensor]


class Batch(NamedTuple):
    """Segments of one depth, side by side."""

    reads: Tensor  # [n, L] int64, tokens of the stream; 0 where there is none
    tokens: Tensor  # int64, where the segments' own tokens are in [n L]
    parents: Tensor  # [n] int64, rows of the states after the depth above
    mask: Tensor | None  # [n, L] bool; None: what follows the tokens changes nothing before it
    keeps_states: bool


@dataclass(frozen=True)
class Levels:
    depths: list[list[Batch]]
    inverse: Tensor  # [U] int64, where each token of the stream is among the batches' tokens


class _Segment(NamedTuple):
    reads: Tensor  # tokens of the stream, of which the last `length` are its own
    length: int
    origin: int  # the segment whose state it continues; -1: none
    depth: int
    keeps: bool  # its state, for segments below


def levels_of(lengths: Tensor, parents: Tensor, device: torch.device, shortest: int = 64) -> Levels:
    """Divide a forest's segments into batches; lengths and parents [M] as of Forest.

    Roots are padded before their tokens, where a state of zeros stays zero; segments that end a
    sample after them. A segment between has its state only at the end of a batch, so those of a
    batch have one length; with fewer than `shortest` tokens it is read again by each segment below
    it, which costs less (a chunk of transformers' rules has 64). Prompts abc and de; responses uvw
    and uvx to abc, yz to de, in the stream abcuvwxdeyz:

        shortest 2:   depth 0   a b c    depth 1   u v   y z    depth 2   w .
                                . d e                                     x .
        shortest 64:  depth 0   a b c    depth 1   u v                    uv is read three times,
                                . d e              u v w                  and its output is taken
                                                   u v x                  from the first
                                                   y z ."""
    inner, segments = {*parents.tolist()}, list[_Segment]()
    own = torch.arange(int(lengths.sum())).split(lengths.tolist())
    for i, (tokens, p) in enumerate(zip(own, parents.tolist(), strict=True)):
        if p < 0 or segments[p].keeps:
            reads, origin = tokens, p
        else:
            reads, origin = torch.cat([segments[p].reads, tokens]), segments[p].origin
        depth = 0 if p < 0 else segments[origin].depth + 1
        keeps = p < 0 or (i in inner and len(reads) >= shortest)
        segments.append(_Segment(reads, len(tokens), origin, depth, keeps))
    rows, order, depths = dict[int, int](), list[Tensor](), list[list[Batch]]()
    for level in range(max((x.depth for x in segments), default=-1) + 1):
        groups, before, rows, batches = dict[int, list[int]](), rows, {}, list[Batch]()
        for i, x in enumerate(segments):
            if x.depth == level:
                groups.setdefault(len(x.reads) if level and x.keeps else 0, []).append(i)
        for group in groups.values():
            chosen = [segments[i] for i in group]
            batch, tokens = _batch(chosen, [before.get(x.origin, 0) for x in chosen], device)
            batches.append(batch)
            order.append(tokens)
            rows |= {i: len(rows) + k for k, i in enumerate(group) if segments[i].keeps}
        depths.append(batches)
    inverse = torch.cat(order).argsort() if order else torch.arange(0)
    return Levels(depths, inverse.to(device))


def _batch(chosen: list[_Segment], above: list[int], device: torch.device) -> tuple[Batch, Tensor]:
    """Return a batch of segments of one depth, whose states before are in rows `above`, and the
    tokens of the stream whose outputs are taken from it."""
    is_root = chosen[0].depth == 0
    # a single token would change the state in place
    width = max(2, *(len(x.reads) for x in chosen))
    index, wanted = torch.zeros(2, len(chosen), width, dtype=torch.int64).unbind()
    for k, x in enumerate(chosen):
        start = width - len(x.reads) if is_root else 0
        end = start + len(x.reads)
        index[k, start:end], wanted[k, end - x.length : end] = x.reads, 1
    at = wanted.flatten().nonzero()[:, 0]
    read, own, states = to_device(device, index, at, torch.tensor(above))
    mask = wanted.to(device, torch.bool) if is_root else None
    return Batch(read, own, states, mask, chosen[0].keeps), index.flatten()[at]


def over_forest(run: Run, hidden: Tensor, levels: Levels) -> tuple[Tensor, States]:
    """Return a layer's output for the stream [U, H] of a forest, and its states after each root."""
    done = list[Tensor]()
    states = roots = States({}, {}, None)
    for depth in levels.depths:
        after = list[States]()
        for batch in depth:
            own = states.rows(batch.parents, batch.mask)
            out = run(hidden[batch.reads], own, batch.mask)
            done.append(out.flatten(0, 1)[batch.tokens])
            if batch.keeps_states:
                after.append(own)
        states = States.joined(after)
        roots = states if depth is levels.depths[0] else roots
    return torch.cat(done)[levels.inverse], roots
