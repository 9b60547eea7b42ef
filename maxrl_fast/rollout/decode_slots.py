"""The batch of the PyTorch decoder on a device: sampling from logits, as csrc/cpu/sample.h and
csrc/cuda/decode_sample.cu do, attention of a step, slots with a KV cache, CUDA graphs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from threading import current_thread, main_thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maxrl_fast.model.attention import (
    PLAIN_ATTENTION,
    REFERENCE,
    AttentionVariant,
    Forest,
    attend,
    attend_prompts,
    kernel_for,
    merge,
    tree_attention,
)
from maxrl_fast.model.decoder import Decoder, DecoderConfig
from maxrl_fast.model.policy_model import PolicyModel, PolicySizes
from maxrl_fast.model.recurrence import Run, States, over_forest
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.dispatch import DEVICE_DTYPES, KernelLaunch
from maxrl_fast.records import Prompts
from maxrl_fast.rollout import Sampling, uniforms

# rows that are filtered at a time on a GPU, and the bytes for each of their logits, with the sort's
ROWS, LOGIT_BYTES = 128, 48


def sample(logits: Tensor, u: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Sample tokens by inverting the CDF of each row of logits [A, V] float32 in vocabulary order,
    for numbers u [A, n] in [0, 1); does not wait for the device. Returns tokens [A, n] int64 and
    their log-probs under the whole distribution at the temperature; 0 at temperature 0."""
    if sampling.temperature == 0:
        token = logits.argmax(-1, keepdim=True).expand_as(u)
        log_p = torch.log_softmax(logits, -1).gather(-1, token)
        # logits that are not finite must show
        return token, torch.where(log_p.isfinite(), 0.0, log_p)
    logits = logits if sampling.temperature == 1 else logits / sampling.temperature
    log_p = torch.log_softmax(logits, -1)
    kept = filtered_logprobs(log_p, sampling) if sampling.filters_tokens else log_p
    cdf = kept.exp().cumsum(-1)  # [A, V]
    token = torch.searchsorted(cdf, u * cdf[:, -1:], right=True).clamp_max(logits.shape[-1] - 1)
    return token, log_p.gather(-1, token)


def filtered_logprobs(log_p: Tensor, sampling: Sampling) -> Tensor:
    """Apply top-k, top-p and min-p to log-probs [A, V]; excluded tokens get -inf."""
    ordered, order = log_p.sort(dim=-1, descending=True, stable=True)  # [A, V]
    p = ordered.exp()
    rank = torch.arange(p.shape[-1], device=p.device)  # [V]
    kept = rank < sampling.top_k if sampling.top_k else rank >= 0
    p = p * kept
    before = p.cumsum(-1) - p  # [A, V], the probability of more probable tokens
    kept = kept & ((before < sampling.top_p * p.sum(-1, keepdim=True)) | (rank == 0))
    kept = kept & (p >= sampling.min_p * p[:, :1])
    mask = torch.zeros_like(kept).scatter(-1, order, kept)
    return torch.log_softmax(log_p.masked_fill(~mask, float("-inf")), -1)


def samples_in_kernel(sampling: Sampling, dtype: torch.dtype, device: torch.device) -> bool:
    """The kernel has no top-k, top-p or min-p."""
    return (
        not sampling.filters_tokens
        and dtype in DEVICE_DTYPES
        and dispatch.is_gpu(device)
        and dispatch.has_kernels(device)
    )


def sample_and_append(
    logits: Tensor,
    sampling: Sampling,
    keys: Tensor,
    stops: Tensor,
    last: Tensor,
    length: Tensor,
    done: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    rows: Tensor | None = None,
) -> None:
    """`sample` one token per row in a kernel, and append it to rows that are not done. logits: [A,
    V] float32, or [g, V] with `rows` [g n] int64, of which each n share logits. keys [A] int64 and
    length select the random numbers. stops: [V] bool. last, length, done: [A], and tokens, logprobs
    [A, limit] at column `length` are updated in place."""
    (count, size), (batch, limit), call = logits.shape, tokens.shape, KernelLaunch(logits.device)
    num_rows = batch if rows is None else len(rows)
    if count == 0 or num_rows % count:
        raise ValueError(
            f"the number of rows must be a multiple of the number of logits, got {num_rows} and "
            f"{count}"
        )
    call.launch(
        "decode_sample",
        num_rows=num_rows,
        vocab_size=size,
        limit=limit,
        logits=call.address("logits", logits, torch.float32, (count, size)),
        samples_per_logits=num_rows // count,
        rows=call.address("rows", rows, torch.int64, (num_rows,)),
        temperature=sampling.temperature,
        **call.addresses(torch.int64, batch, keys=keys, last=last, length=length),
        stops=call.address("stops", stops, torch.bool, (size,)),
        done=call.address("done", done, torch.bool, (batch,)),
        tokens=call.address("tokens", tokens, torch.int64, (batch, limit)),
        logprobs=call.address("logprobs", logprobs, torch.float32, (batch, limit)),
    )


Cache = tuple[Tensor, Tensor]  # keys and values of one layer

_BLOCKS = 256  # of eight warps, which fill a GPU
_KEYS_PER_SPLIT = 256  # at least, for one block


def has_kernel(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """The CUDA kernel needs heads in multiples of 16 bytes, at most 512, and at most 8 query heads
    per key/value head."""
    head_bytes = config.head_dim * dtype.itemsize
    fits = dtype in DEVICE_DTYPES and head_bytes % 16 == 0 and head_bytes <= 512
    fits = fits and config.num_attention_heads // config.num_key_value_heads <= 8
    return fits and dispatch.is_gpu(device) and dispatch.has_kernels(device)


def num_splits(rows: int, kv_heads: int, limit: int) -> int:
    """Return how many blocks share a row's keys, so that few rows fill a GPU. Sizes alone decide,
    so every GPU sums in the same order."""
    return max(1, min(-(-_BLOCKS // (rows * kv_heads)), limit // _KEYS_PER_SPLIT))


@dataclass
class Step:
    """The attention of one decoding step of A rows: each newest token attends to its prompt and its
    response. Rows starts[g] to starts[g + 1] - 1 have prompt g, and those past the last start none:
    undefined attention. On a GPU the prompt part is one FlashAttention launch, the rest one or two
    of csrc/cuda/decode_attention.cu; elsewhere both are `attend` with masks."""

    prompt: Tensor  # [A] int64, each row's prompt
    starts: Tensor  # [G + 1] int32, ascending
    prompt_lengths: Tensor  # [G] int32, each at least 1
    cache_starts: Tensor  # [G + 1] int32, the first position of each prompt in the cache
    size: int  # the most rows that a prompt has
    lengths: Tensor  # [A] int64, tokens of each row including the newest
    width: int  # positions of the cache that are read where the kernel does not run
    in_kernel: bool

    @cached_property
    def tile(self) -> tuple[Tensor, Tensor]:
        """The row of each place of a tile [G, size], a line for each prompt, and the place of each
        row."""
        rows = torch.arange(len(self.lengths), device=self.lengths.device)
        places = torch.arange(self.size, device=rows.device)
        tile = (self.starts[:-1, None] + places).clamp_max(len(rows) - 1)
        place = (rows - self.starts[self.prompt]).clamp(0, self.size - 1)
        return tile, self.prompt * self.size + place

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prompt: Cache,
        own: Cache,
        variant: AttentionVariant = PLAIN_ATTENTION,
    ) -> Tensor:
        """Write the newest tokens' k and v [A, Hkv, D] to the cache, and return the attention of q
        [A, Hq, D]; their rows may have any stride. `prompt` [G, prompt_width, Hkv, D], `own` [A,
        limit, Hkv, D]."""
        o, lse = self._to_prompts(q, prompt, variant)
        if self.in_kernel and variant.is_plain:
            return self._to_own_in_kernel(q, k, v, own, o, lse)
        o, lse = merge(o, lse, *self._to_own(q, k, v, own, variant))
        if variant.sinks is not None:  # as a part of the keys with the value 0
            o = o * torch.sigmoid(lse - variant.sinks)[..., None].to(o.dtype)
        return o

    def _to_prompts(
        self, q: Tensor, prompt: Cache, variant: AttentionVariant
    ) -> tuple[Tensor, Tensor]:
        width = prompt[0].shape[1]
        kernel = kernel_for(q.device, q.dtype, q.shape[-1])
        if kernel is not REFERENCE and variant.is_plain:
            k, v = (x.flatten(0, 1) for x in prompt)
            sizes = self.starts, self.cache_starts, self.size, width
            return attend_prompts(q, k, v, *sizes, self.prompt_lengths)
        tile, place = self.tile
        keys, lengths = torch.arange(width, device=q.device), self.prompt_lengths[:, None, None]
        mask = keys < lengths
        if variant.window:
            mask = mask & (keys >= lengths + self.lengths[tile][..., None] - variant.window)
        o, lse = attend(q[tile], *prompt, mask, variant.softcap)  # [G, size, Hq, D]
        return o.flatten(0, 1)[place], lse.flatten(0, 1)[place]

    def _to_own(
        self, q: Tensor, k: Tensor, v: Tensor, own: Cache, variant: AttentionVariant
    ) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(q), device=q.device)
        for cache, x in zip(own, (k, v), strict=True):
            cache[rows, self.lengths - 1] = x
        keys, values = (cache[:, : self.width] for cache in own)
        places, lengths = torch.arange(self.width, device=q.device), self.lengths[:, None, None]
        mask = places < lengths
        if variant.window:
            mask = mask & (places >= lengths - variant.window)
        o, lse = attend(q[:, None], keys, values, mask, variant.softcap)  # [A, 1, Hq, D]
        return o[:, 0], lse[:, 0]

    def _to_own_in_kernel(
        self, q: Tensor, k: Tensor, v: Tensor, own: Cache, prompt_o: Tensor, prompt_lse: Tensor
    ) -> Tensor:
        (batch, heads, dim), kv_heads, limit = q.shape, k.shape[1], own[0].shape[1]
        call, out = KernelLaunch(q.device), torch.empty(q.shape, dtype=q.dtype, device=q.device)
        splits = num_splits(batch, kv_heads, limit)
        partial_shape, rows = (batch, heads, splits, dim + 2), {"q": q, "k": k, "v": v}

        call.launch(
            "decode_attention",
            dtype=q.dtype,
            num_rows=batch,
            limit=limit,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            **{
                n: call.address(n, x, q.dtype, (batch, x.shape[1], dim), True)
                for n, x in rows.items()
            },
            **{f"{n}_stride": x.stride(0) for n, x in rows.items()},
            **call.addresses(q.dtype, batch, limit, kv_heads, dim, k_cache=own[0], v_cache=own[1]),
            lengths=self.lengths,
            prompt_out=prompt_o.contiguous(),
            prompt_lse=prompt_lse,  # [A, Hq] float32 with any strides
            lse_row_stride=prompt_lse.stride(0),
            lse_head_stride=prompt_lse.stride(1),
            num_splits=splits,
            partial=None if splits == 1 else torch.empty(partial_shape, device=q.device),
            out=out,
        )
        return out


NUM_BATCH_SIZES = 6  # numbers of rows that are decoded at a time, each half of the one before


class Shape(NamedTuple):
    slots: int  # prompts
    rows: int  # samples
    group_size: int  # samples of a prompt
    prompt_width: int  # tokens of a prompt
    limit: int  # tokens of a response

    def holds(self, other: "Shape") -> bool:
        return self.limit == other.limit and self.joined(other) == self

    def joined(self, other: "Shape") -> "Shape":
        return Shape(*map(max, self, other))

    @property
    def batch_sizes(self) -> list[int]:
        """Descending, and few, as each has a CUDA graph."""
        sizes = [self.rows]
        while len(sizes) < NUM_BATCH_SIZES and sizes[-1] > 1:
            sizes.append((sizes[-1] + 1) // 2)
        return sizes

    def cache_bytes(self, config: PolicySizes, dtype: torch.dtype) -> int:
        """A step's tensors are included, which the CUDA graphs keep."""
        element = dtype.itemsize
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
            # of a row: its sample's number in the job, -1: none, or its result is stored; its key
            # of random numbers; its slot; its prompt's length - 1; the newest token; the number of
            # tokens; the end of what an environment wrote, which is read from `tokens` in place of
            # sampling, and never reaches the limit
            self.integers = torch.zeros(7, shape.rows, dtype=torch.int64)
            self.sample, self.keys, self.prompt, self.shift, *others = self.integers
            self.last, self.length, self.given_end = others
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

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, *variant: Any) -> Tensor:
            prompt, (k_own, v_own) = self.cache(layer, k, v)
            return step.attend(q, k, v, prompt, (k_own[rows], v_own[rows]), *variant)

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
        if samples_in_kernel(sampling, logits.dtype, logits.device):
            of_batch = self.keys, self.last, self.length, self.done, self.tokens, self.logprobs
            keys, last, length, done, tokens, logprobs = (x[:end] for x in of_batch)
            inputs = logits, sampling, keys, self.stops
            sample_and_append(*inputs, last, length, done, tokens, logprobs, rows)
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

        def prefill(layer: int, q: Tensor, k: Tensor, v: Tensor, *variant: Any) -> Tensor:
            for cache, x in zip(self.cache(layer, k, v)[0], (k, v), strict=True):
                cache[slots, : len(offsets)] = x[tile]
            return tree_attention(q, k, v, forest, *variant)

        def recurrence(layer: tuple[int, int], run: Run, hidden: Tensor) -> Tensor:
            out, states = over_forest(run, hidden, forest.padded)
            own = states.rows(torch.arange(len(slots), device=self.device).repeat_interleave(n))
            if layer not in self.states:  # of rows without a sample: of any
                self.states[layer] = own.rows(torch.zeros_like(self.all_rows))
            self.states[layer].store(rows, own)
            return out

        starts = prompts.by_token(prompts.cu_seqlens[:-1])
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
        self.integers[:, :rows] = self.integers[:, kept]
        for state in (self.done, self.tokens, self.logprobs):
            state[:rows] = state[kept]
        for _, own in self.caches.values():
            for cache in own:
                cache[:rows, :longest] = cache[kept, :longest]
        for states in self.states.values():
            states.store(self.all_rows[:rows], states.rows(kept))
        self.starts.copy_(torch.searchsorted(kept.int(), self.starts))
        self.rows = rows
