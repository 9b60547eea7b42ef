"""Decoding in plain PyTorch, on any device and in any dtype; on a GPU every step is a replayed CUDA graph.

Samples lie in a grid: a place for each of G groups, N rows in each, so that a group's rows read their prompt's keys in one
product. A group that has ended leaves its place to the next prompt; when none waits, the grid shrinks. Which rows have ended
is known on the device alone, and asked for once in BURST steps.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from maxrl_fast.model.attention import SharedPromptLayout, shared_prompt_attention
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.tiling import tile
from maxrl_fast.records import Prompts, Rollouts, cumulative
from maxrl_fast.rollout import RolloutStatistics, Sampling, decode_sample
from maxrl_fast.rollout.decode_attention import Step, has_kernel
from maxrl_fast.rollout.random import uniforms
from maxrl_fast.rollout.sampling import sample

BURST = 8  # steps between two looks at what has ended


def _rounded(n: int) -> int:
    """Up to a power of two, or three quarters of one: few shapes, so few graphs."""
    power = 1 << max(n - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and n <= power * 3 // 4 else power


class _Grid:
    """Keys, values and state of `groups` prompts of up to `prompt_length` tokens, `rows` samples each of up to `limit`."""

    STATE = ("sample", "keys", "last", "length", "done", "tokens", "logprobs")

    def __init__(
        self, model: Decoder, groups: int, rows: int, prompt_length: int, limit: int, dtype: torch.dtype, in_kernel: bool
    ):
        c, self.model, self.dtype, self.in_kernel = model.config, model, dtype, in_kernel
        self.groups, self.rows, self.limit = groups, rows, limit
        size, device = groups * rows, model.lm_head.weight.device

        def caches(*shape: int) -> list[tuple[Tensor, Tensor]]:  # zeros, since what is masked must still be numbers
            shape = (*shape, c.num_key_value_heads, c.head_dim)
            return [
                (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
                for _ in range(c.num_hidden_layers)
            ]

        def whole_numbers(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        self.prompts, self.own = caches(groups, prompt_length), caches(size, limit)
        self.prompt_lengths = whole_numbers(groups, value=1)
        self.sample = whole_numbers(size, value=-1)  # of the job; -1: none, or handed in
        self.keys, self.last, self.length = whole_numbers(size), whole_numbers(size), whole_numbers(size, value=1)
        self.done = torch.ones(size, dtype=torch.bool, device=device)
        self.tokens = whole_numbers(size, limit)
        self.logprobs = torch.zeros(size, limit, device=device)
        self.every = torch.arange(size, device=device)
        self.stops = torch.zeros(c.vocab_size, dtype=torch.bool, device=device)
        self.graphs: dict[tuple[Sampling, int], torch.cuda.CUDAGraph | None] = {}
        # Graphs write to this grid alone, and run one after another: they may share their working memory.
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for pair in (*self.prompts, *self.own) for x in pair)

    def reset(self, stops: Tensor) -> None:
        """Forget all samples; stops [V] bool: tokens that end a response."""
        self.sample.fill_(-1)
        self.done.fill_(True)
        self.length.fill_(1)
        self.stops.copy_(stops)

    def steps(self, count: int, sampling: Sampling, width: int) -> None:
        """`count` steps, in which no row may come to more than `width` tokens."""
        if self.in_kernel:
            width = self.limit  # it reads what there is, whatever the width: one graph serves all
        for _ in range(count):
            if self.last.device.type != "cuda":
                self.step(sampling, width)
            elif (sampling, width) not in self.graphs:  # the first step of a kind chooses kernels, the second is captured
                self.step(sampling, width)
                self.graphs[sampling, width] = None
            else:
                graph = self.graphs[sampling, width]
                if graph is None:
                    graph = self.graphs[sampling, width] = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=self.pool):
                        self.step(sampling, width)
                graph.replay()

    def step(self, sampling: Sampling, width: int) -> None:
        """One token more for every row; those that have ended change nothing of theirs."""
        at = self.length - 1  # of the newest token
        lengths = self.prompt_lengths[:, None].expand(self.groups, self.rows).flatten()
        step = Step(self.prompt_lengths, self.length, self.prompts[0][0].shape[1], width, self.in_kernel)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return step.attend(q, k, v, self.prompts[layer], self.own[layer])

        hidden = self.model(self.last, lengths + at, attention, self.every, self.dtype)
        logits = self.model.logits(hidden)
        if decode_sample.has_kernel(sampling, logits.device):
            state = (self.last, self.length, self.done, self.tokens, self.logprobs)
            decode_sample.sample_and_take(logits, sampling, self.keys, self.stops, *state)
        else:
            self.take(self.every, sample(logits, uniforms(self.keys, self.length), sampling), self.length)

    def take(self, rows: Tensor, sampled: tuple[Tensor, Tensor], at: Tensor) -> None:
        """Write down what was sampled as token number `at` of these rows, where they have not ended."""
        done = self.done[rows]
        at = at.clamp_max(self.limit - 1)
        for name, values in zip(("tokens", "logprobs"), sampled, strict=True):
            kept: Tensor = getattr(self, name)
            kept[rows, at] = torch.where(done, kept[rows, at], values)
        token = sampled[0]
        self.last[rows] = torch.where(done, self.last[rows], token)
        self.length[rows] = torch.where(done, self.length[rows], at + 1)
        self.done[rows] = done | self.stops[token] | (at + 1 == self.limit)

    def begin(self, places: Tensor, prompts: Prompts, samples: Tensor, keys: Tensor, sampling: Sampling) -> None:
        """Compute prompts [g] into these places [g], and the first token of their samples [g, rows] (-1: none)."""
        lengths = prompts.lengths
        none = torch.zeros(0, dtype=torch.int64)
        layout = SharedPromptLayout.build(lengths.cpu(), none, none, lengths.device)
        tiling = tile(lengths)

        def prefill(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for cache, x in zip(self.prompts[layer], (k, v), strict=True):
                cache[places, : tiling.width] = tiling.pad(x)
            return shared_prompt_attention(q, k, v, layout)

        starts = prompts.cu_seqlens[:-1].repeat_interleave(lengths)
        positions = torch.arange(len(prompts.tokens), device=lengths.device) - starts
        hidden = self.model(prompts.tokens, positions, prefill, prompts.cu_seqlens[1:] - 1, self.dtype)
        rows = (places[:, None] * self.rows + torch.arange(self.rows, device=places.device)).flatten()
        samples = samples.flatten()
        self.prompt_lengths[places] = lengths
        self.sample[rows], self.keys[rows], self.done[rows] = samples, keys[samples.clamp_min(0)], samples < 0
        self.length[rows] = 1  # also of rows without a sample, whose keys are masked by it
        first = torch.zeros_like(rows)
        logits = self.model.logits(hidden).repeat_interleave(self.rows, 0)
        self.take(rows, sample(logits, uniforms(self.keys[rows], first), sampling), first)

    def copy_from(self, other: "_Grid", groups: Tensor, rows: Tensor) -> None:
        """Take over groups [g] and rows [g, r], by their numbers in another grid, into the first places; the rest is empty."""
        g, r = rows.shape
        to, rows = self.every.view(self.groups, self.rows)[:g, :r].flatten(), rows.flatten()
        self.reset(other.stops)
        for name in self.STATE:
            getattr(self, name)[to] = getattr(other, name)[rows]
        self.prompt_lengths[:g] = other.prompt_lengths[groups]
        for layer, (k_prompt, v_prompt) in enumerate(self.prompts):
            (k_from, v_from), (k_own, v_own) = other.prompts[layer], self.own[layer]
            k_prompt[:g], v_prompt[:g] = k_from[groups], v_from[groups]
            k_own[to], v_own[to] = (x[rows] for x in other.own[layer])


class DeviceDecoder:
    """A copy of the policy in the compute dtype, and its grids, kept from call to call up to `kept_bytes`."""

    def __init__(self, model: Decoder, dtype: torch.dtype, kept_bytes: int = 0, compiled: bool = False):
        self.dtype, self.device, self.kept_bytes = dtype, model.lm_head.weight.device, kept_bytes
        self.model = Decoder.empty(model.config, self.device, dtype).requires_grad_(False)
        if compiled:
            self.model.compile_layers()
        self.in_kernel = has_kernel(model.config, dtype, self.device)  # attention
        self._grids: dict[tuple[int, ...], _Grid] = {}

    def cache_bytes(self, length: int) -> int:
        """Memory of the keys and values of a prompt or response of this length."""
        c = self.model.config
        element = torch.empty((), dtype=self.dtype).element_size()
        return 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * element * length

    def load_weights(self, model: Decoder) -> None:
        """Take over the policy's weights, rounded to the compute dtype once instead of at every token."""
        own = dict(self.model.weights())
        for name, weight in model.weights():
            own[name].copy_(weight)

    @torch.no_grad()
    def generate(
        self, prompts: Prompts, num_samples: int, sampling: Sampling, keys: Tensor, places: int, rows: int
    ) -> tuple[Rollouts, RolloutStatistics]:
        """Responses to checked prompts in a grid of at most `places` groups of `rows`; keys [S] int64 of the random numbers."""
        job = _Job(prompts, num_samples, sampling, keys, rows, self._grid)
        return job.run(min(places, len(job.groups)), self.model.config.vocab_size)

    def _grid(self, groups: int, rows: int, prompt_length: int, limit: int) -> _Grid:
        shape = (groups, rows, prompt_length, limit)
        grid = self._grids.pop(shape, None) or _Grid(self.model, *shape, self.dtype, self.in_kernel)
        while self._grids and grid.bytes + sum(kept.bytes for kept in self._grids.values()) > self.kept_bytes:
            self._grids.pop(next(iter(self._grids)))  # not used for the longest
        self._grids[shape] = grid
        return grid


class _Job:
    """One call of generate: what waits, what is at work, what is done."""

    def __init__(
        self,
        prompts: Prompts,
        num_samples: int,
        sampling: Sampling,
        keys: Tensor,
        rows: int,
        grid: Callable[[int, int, int, int], _Grid],
    ):
        self.prompts, self.sampling, self.keys, self.rows, self.grid_of = prompts, sampling, keys, rows, grid
        shape, device = (len(keys), sampling.max_new_tokens), keys.device
        self.results = {
            "tokens": torch.zeros(shape, dtype=torch.int64, device=device),
            "logprobs": torch.zeros(shape, device=device),
            "length": torch.zeros(len(keys), dtype=torch.int64, device=device),
        }
        # A group: a prompt and `rows` of its samples, the last ones of a prompt padded with -1.
        samples = torch.arange(len(keys), device=device).view(len(prompts), num_samples)
        padding = -num_samples % rows
        self.groups = torch.nn.functional.pad(samples, (0, padding), value=-1).view(-1, rows)  # [groups, rows]
        self.groups_of_prompt = (num_samples + padding) // rows
        self.prompt_length = _rounded(int(prompts.lengths.max()))
        self.next_group = self.steps = self.cache_bytes = 0
        self.prefill_seconds = 0.0

    def run(self, places: int, vocab_size: int) -> tuple[Rollouts, RolloutStatistics]:
        start, limit = time.perf_counter(), self.sampling.max_new_tokens
        grid = self.grid_of(places, self.rows, self.prompt_length, limit)
        stops = torch.zeros(vocab_size, dtype=torch.bool)
        stops[list(self.sampling.stop_ids)] = True
        grid.reset(stops.to(self.keys.device))
        alive, lengths = self._hand_in(grid)
        while True:
            empty, waiting = (~alive.any(1)).nonzero()[:, 0], len(self.groups) - self.next_group
            # A quarter of the places at least: small batches cost more for each token.
            if waiting and len(empty) >= min(waiting, (grid.groups + 3) // 4):
                self._begin(grid, empty[:waiting])
            elif not alive.any():
                break
            else:
                lengths = lengths[alive]
                count = min(BURST, limit - int(lengths.min()))
                grid = grid if waiting else self._shrunk(grid, alive)
                grid.steps(count, self.sampling, min(limit, _rounded(int(lengths.max()) + count)))
                self.steps += count
            self.cache_bytes = max(self.cache_bytes, grid.bytes)
            alive, lengths = self._hand_in(grid)
        tokens, logprobs, lengths = self.results.values()
        last = tokens.gather(1, lengths[:, None] - 1)[:, 0]
        rollouts = Rollouts.from_padded(tokens, logprobs, lengths, ~grid.stops[last])
        return rollouts, RolloutStatistics(
            prefill_seconds=self.prefill_seconds,
            decode_seconds=time.perf_counter() - start - self.prefill_seconds,
            decode_steps=self.steps,
            prompt_tokens=len(self.prompts.tokens),
            response_tokens=len(rollouts.tokens),
            cache_bytes=self.cache_bytes,
        )

    def _begin(self, grid: _Grid, places: Tensor) -> None:
        """Waiting groups take these places; a prompt with several groups is computed for each of them."""
        start = time.perf_counter()
        groups = torch.arange(self.next_group, self.next_group + len(places))
        lengths = self.prompts.lengths.cpu()
        chosen = groups // self.groups_of_prompt
        starts = self.prompts.cu_seqlens.cpu()[chosen]
        cu_seqlens = cumulative(lengths[chosen])
        index = torch.arange(int(cu_seqlens[-1])) + (starts - cu_seqlens[:-1]).repeat_interleave(lengths[chosen])
        device = self.keys.device
        prompts = Prompts(self.prompts.tokens[index.to(device)], cu_seqlens.to(device), self.prompts.ids[chosen.to(device)])
        grid.begin(places.to(device), prompts, self.groups[groups.to(device)], self.keys, self.sampling)
        self.next_group += len(places)
        self.prefill_seconds += time.perf_counter() - start

    def _hand_in(self, grid: _Grid) -> tuple[Tensor, Tensor]:
        """Keep the results of rows that have ended since the last time.

        Returns which rows are still at work, and their lengths, [groups, rows] on the host: the one wait for the device.
        """
        state = torch.stack([grid.done.long(), grid.sample, grid.length]).cpu()
        done, samples, lengths = state.view(3, grid.groups, grid.rows)
        ended = ((done == 1) & (samples >= 0)).flatten().nonzero()[:, 0]
        if len(ended):
            rows, samples = (x.to(self.keys.device) for x in (ended, samples.flatten()[ended]))
            for name, result in self.results.items():
                result[samples] = getattr(grid, name)[rows]
            grid.sample[rows] = -1
        return done == 0, lengths

    def _shrunk(self, grid: _Grid, alive: Tensor) -> _Grid:
        """A smaller grid with what is still at work, where that is worth the move."""
        groups = alive.any(1).nonzero()[:, 0]
        most = int(alive.sum(1).max())
        size = min(grid.groups, _rounded(len(groups))), min(grid.rows, _rounded(most))
        if 4 * size[0] * size[1] > 3 * grid.groups * grid.rows:
            return grid
        smaller = self.grid_of(*size, self.prompt_length, self.sampling.max_new_tokens)
        rows = alive[groups].long().argsort(dim=1, descending=True, stable=True)[:, :most]  # those at work first
        device = self.keys.device
        smaller.copy_from(grid, groups.to(device), (groups[:, None] * grid.rows + rows).to(device))
        return smaller
