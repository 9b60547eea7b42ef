"""Decoding in plain PyTorch, on any device and in any dtype; on a GPU every step is a replayed CUDA graph.

The batch is a grid of slots. A slot holds one group: a prompt and up to `group_size` of its samples, so that one matrix
multiplication scores a prompt's keys for all of them. When a group has finished, its slot admits the next one; when none is
waiting, the grid is compacted. The device alone knows which samples have finished, and the host asks once every BURST steps.
"""

import contextlib
import time
from collections.abc import Callable

import torch
from torch import Tensor

from maxrl_fast.model.decoder import Decoder
from maxrl_fast.records import Prompts, Rollouts, cumulative
from maxrl_fast.rollout import RolloutStatistics, Sampling
from maxrl_fast.rollout.decode_attention import has_kernel
from maxrl_fast.rollout.decode_model import DecodeModel
from maxrl_fast.rollout.grid import Grid

BURST = 8  # steps between two synchronisations with the device


def _rounded(n: int) -> int:
    """Round up to a power of two or three quarters of one, so that there are few shapes and few CUDA graphs."""
    power = 1 << max(n - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and n <= power * 3 // 4 else power


class DeviceDecoder:
    """A copy of the policy in the compute dtype, and its grids, which are reused between calls up to `kept_bytes`."""

    def __init__(self, model: Decoder, dtype: torch.dtype, kept_bytes: int = 0, compiled: bool = False):
        self.dtype, self.device, self.kept_bytes = dtype, model.lm_head.weight.device, kept_bytes
        self.model = DecodeModel(model.config, self.device, dtype, compiled)
        self.in_kernel = has_kernel(model.config, dtype, self.device)  # whether attention runs in the CUDA kernel
        self._grids: dict[tuple[int, ...], Grid] = {}

    def cache_bytes(self, length: int) -> int:
        """Return the KV-cache bytes of a prompt or response of this length."""
        c = self.model.config
        element = torch.empty((), dtype=self.dtype).element_size()
        return 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * element * length

    def load_weights(self, model: Decoder) -> None:
        """Copy the policy's weights, rounded to the compute dtype once instead of at every token."""
        own = dict(self.model.weights())
        for name, weight in model.weights():
            own[name].copy_(weight)

    @torch.no_grad()
    def generate(
        self, prompts: Prompts, num_samples: int, sampling: Sampling, keys: Tensor, num_slots: int, group_size: int
    ) -> tuple[Rollouts, RolloutStatistics]:
        """Sample responses to checked prompts, in a grid of at most num_slots groups of group_size samples.

        keys [S] int64 select the random numbers.
        """
        # Graphs are captured and replayed on the current device.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            job = _Job(prompts, num_samples, sampling, keys, group_size, self._grid)
            return job.run(min(num_slots, len(job.groups)), self.model.config.vocab_size)

    def _grid(self, num_slots: int, group_size: int, prompt_length: int, limit: int) -> Grid:
        """Return a grid of this shape, an old one if there is one."""
        shape = (num_slots, group_size, prompt_length, limit)
        grid = self._grids.pop(shape, None) or Grid(self.model, *shape, self.dtype, self.in_kernel)
        while self._grids and grid.bytes + sum(kept.bytes for kept in self._grids.values()) > self.kept_bytes:
            self._grids.pop(next(iter(self._grids)))  # the least recently used
        self._grids[shape] = grid
        return grid


class _Job:
    """One call of `generate`: the groups that wait, the current grid, and the results so far."""

    def __init__(
        self,
        prompts: Prompts,
        num_samples: int,
        sampling: Sampling,
        keys: Tensor,
        group_size: int,
        make_grid: Callable[[int, int, int, int], Grid],
    ):
        self.prompts, self.sampling, self.keys, self.group_size, self.make_grid = prompts, sampling, keys, group_size, make_grid
        shape, device = (len(keys), sampling.max_new_tokens), keys.device
        self.results = {
            "tokens": torch.zeros(shape, dtype=torch.int64, device=device),
            "logprobs": torch.zeros(shape, device=device),
            "length": torch.zeros(len(keys), dtype=torch.int64, device=device),
        }
        # A prompt with more than group_size samples has several groups, the last one padded with -1.
        samples = torch.arange(len(keys), device=device).view(len(prompts), num_samples)
        padding = -num_samples % group_size
        self.groups = torch.nn.functional.pad(samples, (0, padding), value=-1).view(-1, group_size)
        self.groups_per_prompt = (num_samples + padding) // group_size
        self.prompt_length = _rounded(int(prompts.lengths.max()))
        self.next_group = self.steps = self.cache_bytes = 0
        self.prefill_seconds = 0.0

    def run(self, num_slots: int, vocab_size: int) -> tuple[Rollouts, RolloutStatistics]:
        """Sample all responses."""
        start, limit = time.perf_counter(), self.sampling.max_new_tokens
        grid = self.make_grid(num_slots, self.group_size, self.prompt_length, limit)
        stops = torch.zeros(vocab_size, dtype=torch.bool)
        stops[list(self.sampling.stop_ids)] = True
        grid.reset(stops.to(self.keys.device))
        active, lengths = self._finish(grid)
        while True:
            empty, waiting = (~active.any(1)).nonzero()[:, 0], len(self.groups) - self.next_group
            # Admit into at least a quarter of the slots at a time, because small batches cost more per token.
            if waiting and len(empty) >= min(waiting, (grid.num_slots + 3) // 4):
                self._admit(grid, empty[:waiting])
            elif not active.any():
                break
            else:
                lengths = lengths[active]
                count = min(BURST, limit - int(lengths.min()))
                grid = grid if waiting else self._compact(grid, active)
                grid.steps(count, self.sampling, min(limit, _rounded(int(lengths.max()) + count)))
                self.steps += count
            self.cache_bytes = max(self.cache_bytes, grid.bytes)
            active, lengths = self._finish(grid)
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

    def _admit(self, grid: Grid, slots: Tensor) -> None:
        """Admit waiting groups into these slots; a prompt with several groups is computed once for each of them."""
        start = time.perf_counter()
        groups = torch.arange(self.next_group, self.next_group + len(slots))
        lengths = self.prompts.lengths.cpu()
        chosen = groups // self.groups_per_prompt
        starts = self.prompts.cu_seqlens.cpu()[chosen]
        cu_seqlens = cumulative(lengths[chosen])
        index = torch.arange(int(cu_seqlens[-1])) + (starts - cu_seqlens[:-1]).repeat_interleave(lengths[chosen])
        device = self.keys.device
        prompts = Prompts(self.prompts.tokens[index.to(device)], cu_seqlens.to(device), self.prompts.ids[chosen.to(device)])
        grid.admit(slots.to(device), prompts, self.groups[groups.to(device)], self.keys, self.sampling)
        self.next_group += len(slots)
        self.prefill_seconds += time.perf_counter() - start

    def _finish(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """Store the results of samples that have ended since the last call.

        Returns which samples are still active, and their lengths, both [num_slots, group_size] on the host. This is the one
        place that waits for the device.
        """
        state = torch.stack([grid.done.long(), grid.sample, grid.length]).cpu()
        done, samples, lengths = state.view(3, grid.num_slots, grid.group_size)
        ended = ((done == 1) & (samples >= 0)).flatten().nonzero()[:, 0]
        if len(ended):
            rows, samples = (x.to(self.keys.device) for x in (ended, samples.flatten()[ended]))
            for name, result in self.results.items():
                result[samples] = getattr(grid, name)[rows]
            grid.sample[rows] = -1
        return done == 0, lengths

    def _compact(self, grid: Grid, active: Tensor) -> Grid:
        """Return a smaller grid with the active samples if it is at most three quarters the size, otherwise the same grid."""
        slots = active.any(1).nonzero()[:, 0]
        most = int(active.sum(1).max())
        size = min(grid.num_slots, _rounded(len(slots))), min(grid.group_size, _rounded(most))
        if 4 * size[0] * size[1] > 3 * grid.num_slots * grid.group_size:
            return grid
        smaller = self.make_grid(*size, self.prompt_length, self.sampling.max_new_tokens)
        rows = active[slots].long().argsort(dim=1, descending=True, stable=True)[:, :most]  # active samples first
        device = self.keys.device
        smaller.compact_from(grid, slots.to(device), (slots[:, None] * grid.group_size + rows).to(device))
        return smaller
