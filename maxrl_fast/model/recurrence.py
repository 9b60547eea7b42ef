"""Layers with a state (gated delta rule, Mamba, short convolutions) over a forest of prefixes.

Such a layer of transformers keeps its states in a cache: the last columns before its convolution,
and the state of its recurrence. `States` is a cache for one call, whose tensors autograd follows:
the prompts run in one batch and hand their states to the responses, which run in another."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

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

    def store(self, index: Tensor, other: "States", chosen: Tensor | None = None) -> None:
        """Copy the rows of another to the rows `index` [n], or those of them that are `chosen`."""
        for own, new in zip(self._parts, other._parts, strict=True):
            for k, x in new.items():
                keep = None if chosen is None else chosen.view(-1, *[1] * (x.dim() - 1))
                own[k][index] = x if keep is None else torch.where(keep, x, own[k][index])


# a layer's forward pass of hidden states [n, L, H] with states before them; mask [n, L]: False
# where there is no token
Run = Callable[[Tensor, States, Tensor | None], Tensor]
# called with a key of the layer, its Run, and the hidden states [U, H] of a packed stream
Recurrence = Callable[[tuple[int, int], Run, Tensor], Tensor]


class Batch(NamedTuple):
    """Segments side by side."""

    reads: Tensor  # [n, L] int64, tokens of the stream; 0 where there is none
    own: Tensor  # int64, where the segments' own tokens are in [n L]
    roots: Tensor  # [n] int64, rows of the states that they continue
    mask: Tensor | None  # [n, L] bool; None: what follows the tokens changes nothing before it


class Levels(NamedTuple):
    batches: list[Batch]  # the roots, and the other segments
    inverse: Tensor  # [U] int64, where each token of the stream is among the batches' own tokens


def levels_of(lengths: Tensor, parents: Tensor, device: torch.device) -> Levels:
    """Divide a forest's segments into batches; lengths and parents [M] as of Forest.

    Roots are padded before their tokens, where a state of zeros stays zero; other segments after
    them. These continue a root's state, and read what is between again, as a state is known only at
    the end of a batch. Prompts abc and de; responses uvw and uvx to abc, yz to de, in the stream
    abcuvwxdeyz:

        roots   a b c    others   u v .
                . d e             u v w    uv is read three times, and its output is taken
                                  u v x    from the first
                                  y z ."""
    reads, own = list[Tensor](), torch.arange(int(lengths.sum())).split(lengths.tolist())
    for tokens, p in zip(own, parents.tolist(), strict=True):
        reads.append(torch.cat([reads[p], tokens]) if p >= 0 and parents[p] >= 0 else tokens)
    roots = (parents < 0).cumsum(0) - 1  # [M], as the order is depth-first
    batches, order, starts = list[Batch](), list[Tensor](), lengths.cumsum(0) - lengths
    for chosen, side in ((parents < 0, "left"), (parents >= 0, "right")):
        if len(rows := chosen.nonzero()[:, 0]):
            padded = pad_sequence([reads[i] for i in rows], True, -1, side)
            if padded.shape[1] == 1:  # a single token would change the state in place
                padded = F.pad(padded, (1, 0) if side == "left" else (0, 1), value=-1)
            is_own = padded >= starts[rows, None]
            at = is_own.flatten().nonzero()[:, 0]
            order.append(padded.flatten()[at])
            read, own_tokens, above = to_device(device, padded.clamp_min(0), at, roots[rows])
            mask = is_own.to(device) if side == "left" else None
            batches.append(Batch(read, own_tokens, above, mask))
    inverse = torch.cat(order).argsort() if order else torch.arange(0)
    return Levels(batches, inverse.to(device))


def over_forest(run: Run, hidden: Tensor, levels: Levels) -> tuple[Tensor, States]:
    """Return a layer's output for the stream [U, H] of a forest, and its states after each root."""
    done, states = list[Tensor](), [States({}, {}, None)]
    for batch in levels.batches:
        states.append(states[-1].rows(batch.roots, batch.mask))
        out = run(hidden[batch.reads], states[-1], batch.mask)
        done.append(out.flatten(0, 1)[batch.own])
    return torch.cat(done)[levels.inverse], states[1]
