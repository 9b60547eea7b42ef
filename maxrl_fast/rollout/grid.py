"""The batch of the PyTorch decoder: a grid of slots with their KV cache, on the device."""

import torch
from torch import Tensor

from maxrl_fast.model.attention import SharedPromptLayout, shared_prompt_attention
from maxrl_fast.model.tiling import tile
from maxrl_fast.records import Prompts
from maxrl_fast.rollout import Sampling, decode_sample
from maxrl_fast.rollout.decode_attention import Step
from maxrl_fast.rollout.decode_model import DecodeModel
from maxrl_fast.rollout.random import uniforms
from maxrl_fast.rollout.sampling import sample


class Grid:
    """KV cache and state of `num_slots` groups: prompts of up to `prompt_length` tokens, `group_size` samples of up to `limit`.

    Row `slot * group_size + i` of the batch is sample i of the group in that slot.
    """

    STATE = ("sample", "keys", "last", "length", "done", "tokens", "logprobs")

    def __init__(
        self,
        model: DecodeModel,
        num_slots: int,
        group_size: int,
        prompt_length: int,
        limit: int,
        dtype: torch.dtype,
        in_kernel: bool,
    ):
        c, self.model, self.dtype, self.in_kernel = model.config, model, dtype, in_kernel
        self.num_slots, self.group_size, self.limit = num_slots, group_size, limit
        batch, device = num_slots * group_size, model.device

        def caches(*shape: int) -> list[tuple[Tensor, Tensor]]:  # zeros: masked keys and values must be finite
            shape = (*shape, c.num_key_value_heads, c.head_dim)
            return [
                (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
                for _ in range(c.num_hidden_layers)
            ]

        def integers(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        self.prompts, self.own = caches(num_slots, prompt_length), caches(batch, limit)
        self.prompt_lengths = integers(num_slots, value=1)
        self.sample = integers(batch, value=-1)  # the sample's index in the job; -1: none, or its result is stored
        self.keys, self.last, self.length = integers(batch), integers(batch), integers(batch, value=1)
        self.done = torch.ones(batch, dtype=torch.bool, device=device)
        self.tokens = integers(batch, limit)
        self.logprobs = torch.zeros(batch, limit, device=device)
        self.all_rows = torch.arange(batch, device=device)
        self.stops = torch.zeros(c.vocab_size, dtype=torch.bool, device=device)
        self.graphs: dict[tuple[Sampling, int], torch.cuda.CUDAGraph | None] = {}
        # The graphs write only to this grid and never run concurrently, so they can share one memory pool. They are captured on
        # a stream of this device: PyTorch's default for captures is a stream of the device of the first capture.
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def bytes(self) -> int:
        """Size of the KV cache."""
        return sum(x.numel() * x.element_size() for pair in (*self.prompts, *self.own) for x in pair)

    def reset(self, stops: Tensor) -> None:
        """Remove all samples; stops [V] bool: the tokens that end a response."""
        self.sample.fill_(-1)
        self.done.fill_(True)
        self.length.fill_(1)
        self.stops.copy_(stops)

    def steps(self, count: int, sampling: Sampling, width: int) -> None:
        """Run `count` steps, after which no sample may have more than `width` tokens."""
        if self.in_kernel:
            width = self.limit  # the kernel reads each sample's own length, so one graph serves every width
        for _ in range(count):
            if self.last.device.type != "cuda":
                self.step(sampling, width)
            elif (sampling, width) not in self.graphs:  # the first step of a shape warms up, the second is captured
                self.step(sampling, width)
                self.graphs[sampling, width] = None
            else:
                graph = self.graphs[sampling, width]
                if graph is None:
                    graph = self.graphs[sampling, width] = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                        self.step(sampling, width)
                graph.replay()

    def step(self, sampling: Sampling, width: int) -> None:
        """Append one token to every sample that has not ended."""
        at = self.length - 1  # index of the newest token
        lengths = self.prompt_lengths[:, None].expand(self.num_slots, self.group_size).flatten()
        step = Step(self.prompt_lengths, self.length, self.prompts[0][0].shape[1], width, self.in_kernel)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return step.attend(q, k, v, self.prompts[layer], self.own[layer])

        hidden = self.model(self.last, lengths + at, attention)
        logits = self.model.logits(hidden)
        if decode_sample.has_kernel(sampling, logits.device):
            state = (self.last, self.length, self.done, self.tokens, self.logprobs)
            decode_sample.sample_and_append(logits, sampling, self.keys, self.stops, *state)
        else:
            token, log_p = sample(logits, uniforms(self.keys, self.length)[:, None], sampling)
            self.append(self.all_rows, token[:, 0], log_p[:, 0], self.length)

    def append(self, rows: Tensor, token: Tensor, log_p: Tensor, at: Tensor) -> None:
        """Store sampled tokens and log-probs at column `at` of these rows, unless the sample has ended."""
        done = self.done[rows]
        at = at.clamp_max(self.limit - 1)
        for state, values in ((self.tokens, token), (self.logprobs, log_p)):
            state[rows, at] = torch.where(done, state[rows, at], values)
        self.last[rows] = torch.where(done, self.last[rows], token)
        self.length[rows] = torch.where(done, self.length[rows], at + 1)
        self.done[rows] = done | self.stops[token] | (at + 1 == self.limit)

    def admit(self, slots: Tensor, prompts: Prompts, samples: Tensor, keys: Tensor, sampling: Sampling) -> None:
        """Prefill slots [g] with prompts [g], and sample the first token of samples [g, group_size] (-1: none)."""
        lengths = prompts.lengths
        none = torch.zeros(0, dtype=torch.int64)
        layout = SharedPromptLayout.build(lengths.cpu(), none, none, lengths.device)
        tiling = tile(lengths)

        def prefill(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for cache, x in zip(self.prompts[layer], (k, v), strict=True):
                cache[slots, : tiling.width] = tiling.pad(x)
            return shared_prompt_attention(q, k, v, layout)

        starts = prompts.cu_seqlens[:-1].repeat_interleave(lengths)
        positions = torch.arange(len(prompts.tokens), device=lengths.device) - starts
        hidden = self.model(prompts.tokens, positions, prefill, prompts.cu_seqlens[1:] - 1)
        rows = (slots[:, None] * self.group_size + torch.arange(self.group_size, device=slots.device)).flatten()
        samples = samples.flatten()
        self.prompt_lengths[slots] = lengths
        self.sample[rows], self.keys[rows], self.done[rows] = samples, keys[samples.clamp_min(0)], samples < 0
        self.length[rows] = 1  # also in rows without a sample: an attention mask needs at least one key
        first = torch.zeros_like(rows)
        u = uniforms(self.keys[rows], first).view(-1, self.group_size)  # all samples of a prompt share its logits
        token, log_p = sample(self.model.logits(hidden), u, sampling)
        self.append(rows, token.flatten(), log_p.flatten(), first)

    def compact_from(self, other: "Grid", slots: Tensor, rows: Tensor) -> None:
        """Copy slots [g] with batch rows [g, r] of another grid into this grid's first slots, and empty all other slots."""
        g, r = rows.shape
        to, rows = self.all_rows.view(self.num_slots, self.group_size)[:g, :r].flatten(), rows.flatten()
        self.reset(other.stops)
        for name in self.STATE:
            getattr(self, name)[to] = getattr(other, name)[rows]
        self.prompt_lengths[:g] = other.prompt_lengths[slots]
        for layer, (k_prompt, v_prompt) in enumerate(self.prompts):
            (k_from, v_from), (k_own, v_own) = other.prompts[layer], self.own[layer]
            k_prompt[:g], v_prompt[:g] = k_from[slots], v_from[slots]
            k_own[to], v_own[to] = (x[rows] for x in other.own[layer])
