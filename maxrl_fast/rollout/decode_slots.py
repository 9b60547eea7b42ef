"""The batch of the PyTorch decoder on a device: slots with their KV cache, and its CUDA graphs."""

from collections.abc import Callable
from threading import current_thread, main_thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maxrl_fast.model.attention import PLAIN_ATTENTION, AttentionVariant, Forest, tree_attention
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.policy_model import PolicyModel, PolicySizes
from maxrl_fast.model.recurrence import Run, States, over_forest
from maxrl_fast.records import Prompts
from maxrl_fast.rollout import Sampling
from maxrl_fast.rollout import sampling as sampler
from maxrl_fast.rollout.decode_attention import Cache, Step
from maxrl_fast.rollout.random import uniforms
from maxrl_fast.rollout.sampling import ROWS, sample

NUM_BATCH_SIZES = 6  # numbers of rows that are decoded at a time, each half of the one before


class Shape(NamedTuple):
    slots: int  # prompts
    rows: int  # samples
    group_size: int  # samples of a prompt
    prompt_width: int  # tokens of a prompt
    limit: int  # tokens of a response

    def holds(self, other: "Shape") -> bool:
        return self.limit == other.limit and all(
            mine >= theirs for mine, theirs in zip(self, other, strict=True)
        )

    def joined(self, other: "Shape") -> "Shape":
        return Shape(*(max(pair) for pair in zip(self, other, strict=True)))

    @property
    def batch_sizes(self) -> list[int]:
        """Descending, and few, as each has a CUDA graph."""
        sizes = [self.rows]
        while len(sizes) < NUM_BATCH_SIZES and sizes[-1] > 1:
            sizes.append((sizes[-1] + 1) // 2)
        return sizes

    def cache_bytes(self, config: PolicySizes, dtype: torch.dtype) -> int:
        """A step's tensors are included, which the CUDA graphs keep."""
        element = torch.empty((), dtype=dtype).element_size()
        token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        heads = config.num_attention_heads + config.num_key_value_heads
        step = 4 * config.hidden_size + 3 * config.intermediate_size
        step += 4 * heads * config.head_dim
        tokens = self.slots * self.prompt_width + self.rows * self.limit
        logits = max(element, 4) * config.vocab_size
        return element * (tokens * token + self.rows * step) + self.rows * logits


def uses_graphs(device: torch.device) -> bool:
    """Tests replace this function."""
    return device.type == "cuda"


def captured(
    step: Callable[[], None], stream: torch.cuda.Stream | None, pool: Any
) -> torch.cuda.CUDAGraph:
    """Run a step, which loads its kernels, then capture it. Tests replace this function."""
    assert stream is not None
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        step()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Waits for the device first. By default, some calls of other threads, such as the allocation
    # of pinned memory, would fail during a capture, and the capture with them.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph


class DecodeSlots:
    """KV cache and state of the groups that are decoded together, allocated once for many jobs.

    A group, a prompt and up to `group_size` of its samples, has a slot, whose keys and values never
    move. Row `slot * group_size + i` is its sample i, until `compact` moves the active rows into
    the first `rows` rows. A step computes only these."""

    # of a row: its sample's number in the job, -1: none, or its result is stored; its key of
    # random numbers; its slot; its prompt's length - 1; the newest token; the number of tokens; the
    # end of what an environment wrote, which is read from `tokens` in place of sampling, and never
    # reaches the limit
    INTEGERS = ("sample", "keys", "prompt", "shift", "last", "length", "given_end")
    STATE = (*INTEGERS, "done", "tokens", "logprobs")
    sample: Tensor
    keys: Tensor
    prompt: Tensor
    shift: Tensor
    last: Tensor
    length: Tensor
    given_end: Tensor

    def __init__(
        self,
        model: PolicyModel,
        shape: Shape,
        dtype: torch.dtype,
        in_kernel: bool,
        stream: torch.cuda.Stream | None = None,
    ):
        """Graphs captured on one stream must be dropped together: they share its cuBLAS
        workspace."""
        self.model, self.shape, self.dtype, self.in_kernel = model, shape, dtype, in_kernel
        self.bytes, self.device = shape.cache_bytes(model.config, dtype), model.device
        self.num_slots, self.group_size, self.rows = shape.slots, shape.group_size, shape.rows
        # of each layer, made with its first tokens: keys and values of prompts and of samples
        self.caches: dict[int, tuple[Cache, Cache]] = {}
        # of each layer with a state, of all rows
        self.states: dict[tuple[int, int], States] = {}
        with torch.device(self.device):
            slots = torch.arange(shape.slots + 1)
            self.starts, self.cache_starts = slots.int(), (slots * shape.prompt_width).int()
            self.prompt_lengths = torch.ones(shape.slots, dtype=torch.int32)
            for name in self.INTEGERS:
                setattr(self, name, torch.zeros(shape.rows, dtype=torch.int64))
            self.done = torch.ones(shape.rows, dtype=torch.bool)
            self.tokens = torch.zeros(shape.rows, shape.limit, dtype=torch.int64)
            self.logprobs = torch.zeros(shape.rows, shape.limit)
            self.all_rows = torch.arange(shape.rows)
            self.stops = torch.zeros(model.config.vocab_size, dtype=torch.bool)
        self.graphs: dict[tuple[Sampling, int], torch.cuda.CUDAGraph] = {}
        # The graphs write only to these slots and never run concurrently, so they share one memory
        # pool.
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.stream = stream

    def begin(self, num_slots: int, group_size: int, sampling: Sampling) -> None:
        """Remove all samples, and prepare a job of so many groups of so many samples."""
        self.num_slots, self.group_size, rows = num_slots, group_size, num_slots * group_size
        self.rows = self.fitting(rows)
        self.prompt.copy_((self.all_rows // group_size).clamp_max(self.shape.slots - 1))
        starts = torch.arange(len(self.starts), device=self.device) * group_size
        self.starts.copy_(starts.clamp_max(rows))
        self.sample.fill_(-1)
        self.given_end.fill_(0)
        self.done.fill_(True)
        self.length.fill_(1)  # also in rows without a sample: attention needs at least one key
        self.stops.fill_(False)
        self.stops[list(sampling.stop_ids)] = True

    @property
    def has_graphs(self) -> bool:
        return isinstance(self.model, Decoder) and uses_graphs(self.device)

    def cache(self, layer: int, k: Tensor, v: Tensor) -> tuple[Cache, Cache]:
        if layer not in self.caches:
            s = self.shape
            sizes = (s.slots, s.prompt_width), (s.rows, s.limit)
            # zeros: masked keys and values must be finite
            prompts, own = (tuple(x.new_zeros(*n, *x.shape[1:]) for x in (k, v)) for n in sizes)
            self.caches[layer] = (prompts[0], prompts[1]), (own[0], own[1])
        return self.caches[layer]

    def fitting(self, rows: int) -> int:
        return min(size for size in self.shape.batch_sizes if size >= rows)

    def steps(self, count: int, sampling: Sampling, width: int) -> None:
        """No sample may have more than `width` tokens after them. A batch size's graph is captured
        at its first step: few calls use all sizes, and a freed cache loses its graphs."""
        for _ in range(count):
            if (graph := self.graphs.get((sampling, self.rows))) is not None:
                graph.replay()
            elif not self.has_graphs or current_thread() is not main_thread():
                # a capture waits for the whole device, which may train meanwhile (--ahead)
                self.step(sampling, self.shape.limit if self.has_graphs else width)
            else:  # which runs the step too
                self.graphs[sampling, self.rows] = captured(
                    lambda: self.step(sampling, self.shape.limit), self.stream, self.pool
                )

    def step(self, sampling: Sampling, width: int) -> None:
        rows = slice(self.rows)
        length = self.length[rows]  # [rows]
        # a graph serves every job
        size = (self.shape if self.has_graphs else self).group_size
        groups = self.prompt[rows], self.starts, self.prompt_lengths, self.cache_starts, size
        step = Step(*groups, length, width, self.in_kernel)

        def attention(
            layer: int, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant = PLAIN_ATTENTION
        ) -> Tensor:
            prompt, (k_own, v_own) = self.cache(layer, k, v)
            return step.attend(q, k, v, prompt, (k_own[rows], v_own[rows]), variant)

        def recurrence(layer: tuple[int, int], run: Run, hidden: Tensor) -> Tensor:
            after = self.states[layer].rows(self.all_rows[rows])
            out = run(hidden[:, None], after, None)[:, 0]
            # a sample that waits for a reply keeps the state before its newest token
            self.states[layer].store(self.all_rows[rows], after, ~self.done[rows])
            return out

        stream = self.last[rows], self.shift[rows] + length
        hidden = self.model(*stream, attention, None, self.dtype, recurrence)
        logits = self.model.logits(hidden)
        if sampling.max_turns == 1:
            self._sample(logits, sampling)
            return
        at = self.all_rows[rows], length.clamp_max(self.shape.limit - 1)  # [rows], copies
        given, is_given = self.tokens[at], at[1] < self.given_end[rows]
        self._sample(logits, sampling)  # what is sampled in place of given tokens is discarded
        self.last[rows] = torch.where(is_given, given, self.last[rows])
        self.tokens[at] = torch.where(is_given, given, self.tokens[at])
        self.done[rows] &= ~is_given

    def _sample(self, logits: Tensor, sampling: Sampling, rows: Tensor | None = None) -> None:
        """Append a token to the first rows, or to these [g n], of which each n share logits."""
        end = self.rows if rows is None else None
        if sampler.has_kernel(sampling, logits.dtype, logits.device):
            of_batch = self.keys, self.last, self.length, self.done, self.tokens, self.logprobs
            keys, last, length, done, tokens, logprobs = (x[:end] for x in of_batch)
            inputs = logits, sampling, keys, self.stops
            sampler.sample_and_append(*inputs, last, length, done, tokens, logprobs, rows)
            return
        rows = self.all_rows[:end] if rows is None else rows
        u = uniforms(self.keys[rows], self.length[rows]).view(len(logits), -1)  # [g, n]
        parts = zip(logits.split(ROWS), u.split(ROWS), strict=True)
        results = zip(*(sample(x.float(), y, sampling) for x, y in parts), strict=True)
        token, log_p = (torch.cat(x).flatten() for x in results)
        done, length = self.done[rows], self.length[rows]
        at = length.clamp_max(self.shape.limit - 1)  # [rows]
        for state, values in ((self.tokens, token), (self.logprobs, log_p)):
            state[rows, at] = torch.where(done, state[rows, at], values)
        self.last[rows] = torch.where(done, self.last[rows], token)
        self.length[rows] = torch.where(done, length, at + 1)
        self.done[rows] = done | self.stops[token] | (at + 1 == self.shape.limit)

    def admit(
        self, slots: Tensor, prompts: Prompts, samples: Tensor, keys: Tensor, sampling: Sampling
    ) -> None:
        """Prefill slots [g], and sample first tokens of samples [g, group_size] (-1: none)."""
        lengths = prompts.lengths
        forest = Forest.roots(lengths)
        offsets = torch.arange(int(lengths.max()), device=self.device)
        # [g, longest]; what is beyond a prompt's end is masked
        tile = (prompts.cu_seqlens[:-1, None] + offsets).clamp_max(len(prompts.tokens) - 1)

        def prefill(
            layer: int, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant = PLAIN_ATTENTION
        ) -> Tensor:
            for cache, x in zip(self.cache(layer, k, v)[0], (k, v), strict=True):
                cache[slots, : len(offsets)] = x[tile]
            return tree_attention(q, k, v, forest, variant)

        def recurrence(layer: tuple[int, int], run: Run, hidden: Tensor) -> Tensor:
            out, states = over_forest(run, hidden, forest.padded)
            own = states.rows(torch.arange(len(slots), device=self.device).repeat_interleave(n))
            if layer not in self.states:
                self.states[layer] = own.zeros(self.shape.rows)
            self.states[layer].store(rows, own)
            return out

        starts = prompts.cu_seqlens[:-1].repeat_interleave(lengths)
        positions = torch.arange(len(prompts.tokens), device=self.device) - starts
        n, ends, samples = self.group_size, prompts.cu_seqlens[1:] - 1, samples.flatten()
        rows = (slots[:, None] * n + self.all_rows[:n]).flatten()  # [g * group_size]
        hidden = self.model(prompts.tokens, positions, prefill, ends, self.dtype, recurrence)
        self.prompt_lengths[slots] = lengths.int()
        self.shift[rows] = lengths.repeat_interleave(n) - 1
        self.sample[rows], self.done[rows] = samples, samples < 0
        self.keys[rows] = keys[samples.clamp_min(0)]
        self.given_end[rows] = 0
        self.length[rows] = (samples < 0).long()
        logits = self.model.logits(hidden)  # all samples of a prompt share them
        self._sample(logits, sampling, rows)

    def feed(self, row: int, start: int, tokens: list[int]) -> None:
        """Let a row that is done, with `start` tokens, read these before it samples again."""
        end = start + len(tokens)
        self.tokens[row, start:end] = torch.tensor(tokens, device=self.device)
        self.given_end[row] = end
        self.done[row] = False

    def forget(self, rows: Tensor) -> None:
        """The results of these rows are stored; their attention reads one key from now on."""
        self.sample.index_fill_(0, rows, -1)
        self.given_end.index_fill_(0, rows, 0)
        self.length.index_fill_(0, rows, 1)

    def compact(self, active: Tensor, longest: int) -> None:
        """Move the active rows, [rows] bool on the host, into the smallest batch size that holds
        them. longest: the most tokens of one; only so many positions of the cache are moved."""
        rows = self.fitting(int(active.sum()))
        if rows == self.rows:
            return
        # Active rows and others that fit, in their order: the rows of a prompt stay together.
        chosen = active.long().argsort(descending=True, stable=True)[:rows]  # [rows]
        kept = chosen.sort().values.to(self.device)
        for name in self.STATE:
            state = getattr(self, name)
            state[:rows] = state[kept]
        for _, own in self.caches.values():
            for cache in own:
                cache[:rows, :longest] = cache[kept, :longest]
        for states in self.states.values():
            states.store(self.all_rows[:rows], states.rows(kept))
        self.starts.copy_(torch.searchsorted(kept.int(), self.starts))
        self.rows = rows
