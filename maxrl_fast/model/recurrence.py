"""Layers with a state (gated delta rule, Mamba, short convolutions) over a forest of prefixes.

Such a layer of transformers reads and writes its states through a cache: the last columns before
its convolution, and the state of its recurrence. `States` is a cache for one call, whose tensors
autograd follows. So the segments of one depth run in one batch, and hand the states at their ends
to the segments below: what several samples begin with is computed once, and no state reaches
another sample.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from maxrl_fast.runtime.device import to_device


class States:
    """transformers' cache of one layer: states [n, ...] before a call, and then after it.

    Attributes:
        conv_states, recurrent_states: by the index that a layer with several gives them.
    """

    record_past = True  # a single token is convolved with what was before it, not in place

    def __init__(self, conv: dict[int, Tensor], recurrent: dict[int, Tensor], mask: Tensor | None):
        self.conv_states, self.recurrent_states, self._mask = conv, recurrent, mask

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
        """Return the columns [n, C, L] after those kept before, whose last ones are kept."""
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
        conv = {k: x[index] for k, x in self.conv_states.items()}
        return States(conv, {k: x[index] for k, x in self.recurrent_states.items()}, mask)

    def zeros(self, num_rows: int) -> "States":
        conv, recurrent = (
            {k: x.new_zeros(num_rows, *x.shape[1:]) for k, x in own.items()}
            for own in (self.conv_states, self.recurrent_states)
        )
        return States(conv, recurrent, None)

    def store(self, index: Tensor, other: "States", chosen: Tensor | None = None) -> None:
        """Copy the rows of another to the rows `index` [n], or those of them that are `chosen`."""
        for own, new in (
            (self.conv_states, other.conv_states),
            (self.recurrent_states, other.recurrent_states),
        ):
            for k, x in new.items():
                keep = None if chosen is None else chosen.view(-1, *[1] * (x.dim() - 1))
                own[k][index] = x if keep is None else torch.where(keep, x, own[k][index])

    @classmethod
    def joined(cls, parts: list["States"]) -> "States":
        """Return the rows of all parts, one after another."""
        conv, recurrent = (
            {k: torch.cat([x[k] for x in own]) for k in (own[0] if own else ())}
            for own in ([x.conv_states for x in parts], [x.recurrent_states for x in parts])
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


def levels_of(
    of_segments: Tensor, above: Tensor, device: torch.device, shortest: int = 64
) -> Levels:
    """Divide a forest's segments into batches; lengths and parents [M] as of Forest.

    Roots are padded before their tokens, where a state of zeros stays zero; segments that end a
    sample after them. A segment between has its state only at the end of a batch, so those of a
    batch have one length; with fewer than `shortest` tokens, at least 2, it is read again by each
    segment below it, which costs less (a chunk of transformers' rules has 64 tokens).

    Prompts abc and de; responses uvw and uvx to abc, yz to de, in the stream abcuvwxdeyz:

        shortest 2:   depth 0   a b c    depth 1   u v   y z    depth 2   w .
                                . d e                                     x .
        shortest 64:  depth 0   a b c    depth 1   u v                    uv is read three times,
                                . d e              u v w                  and its output is taken
                                                   u v x                  from the first
                                                   y z .
    """
    lengths, parents = of_segments.tolist(), above.tolist()
    own = torch.arange(sum(lengths)).split(lengths)
    inner, depths, order = {*parents}, list[list[Batch]](), list[Tensor]()
    # of each segment: what it reads, the segment with the state before that, and its depth
    reads, origins, depth = list[Tensor](), list[int](), list[int]()
    keeps = list[bool]()
    for i, p in enumerate(parents):
        reads.append(own[i] if p < 0 or keeps[p] else torch.cat([reads[p], own[i]]))
        origins.append(p if p < 0 or keeps[p] else origins[p])
        depth.append(0 if p < 0 else depth[origins[i]] + 1)
        keeps.append(p < 0 or (i in inner and len(reads[i]) >= shortest))
    rows = dict[int, int]()
    for level in range(max(depth, default=-1) + 1):
        groups, before, rows = dict[int, list[int]](), rows, {}
        for i in (i for i, x in enumerate(depth) if x == level):
            groups.setdefault(len(reads[i]) if level and keeps[i] else 0, []).append(i)
        batches = list[Batch]()
        for group in groups.values():
            # a single token would change the state in place
            width = max(2, *(len(reads[i]) for i in group))
            index, wanted = torch.zeros(2, len(group), width, dtype=torch.int64).unbind()
            for k, i in enumerate(group):
                start = width - len(reads[i]) if level == 0 else 0
                end = start + len(reads[i])
                index[k, start:end], wanted[k, end - lengths[i] : end] = reads[i], 1
            at, starts = wanted.flatten().nonzero()[:, 0], [width - lengths[i] for i in group]
            order.append(index.flatten()[at])
            rows |= {i: len(rows) + k for k, i in enumerate(group) if keeps[i]}
            states = torch.tensor([before.get(origins[i], 0) for i in group])
            mask = torch.arange(width) >= torch.tensor(starts)[:, None]
            read, own_at, above_at, is_token = to_device(device, index, at, states, mask)
            left = is_token if level == 0 else None
            batches.append(Batch(read, own_at, above_at, left, keeps[group[0]]))
        depths.append(batches)
    inverse = torch.cat(order).argsort() if order else torch.arange(0)
    return Levels(depths, inverse.to(device))


def over_forest(run: Run, hidden: Tensor, levels: Levels) -> tuple[Tensor, States]:
    """Return a layer's output [U, H] for the stream [U, H] of a forest, and its states after each
    root, in their order."""
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
