"""Decoding in PyTorch, on any device and in any dtype; on a GPU steps are CUDA graphs.

A slot holds a prompt and up to `group_size` of its samples, so that one matrix multiplication
scores its keys for all of them. A finished group's slot admits the next one; when none is waiting,
steps compute half of the rows, a quarter, and so on. Only the device knows which samples have
finished, and the host asks after every tuning.BURST steps. A sample that waits for a reply keeps
its row."""

import contextlib
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.layer_kernels import KERNELS
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.ops.dispatch import dtype_name
from maxrl_fast.records import Rollouts
from maxrl_fast.rollout import (
    NativeEngine,
    RolloutRequest,
    RolloutStatistics,
    Turns,
    decode_slots,
    finished,
)
from maxrl_fast.rollout.decode_slots import (
    LOGIT_BYTES,
    ROWS,
    DecodeSlots,
    Shape,
    has_kernel,
    samples_in_kernel,
)
from maxrl_fast.runtime import tuning
from maxrl_fast.runtime.device import copy_to_host, memory_bytes, to_device

# of the device's memory: a KV cache that takes more is freed while the policy trains
KEPT_SHARE = 0.1


def _rounded(n: int) -> int:
    """Round up to a power of two or 3/4 of one, so that longer prompts rarely need a new cache."""
    power = 1 << max(n - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and n <= power * 3 // 4 else power


def decoding_copy(policy: PolicyModel, dtype: torch.dtype) -> PolicyModel:
    """Return a copy without gradients, whose weights keep their addresses: CUDA graphs read
    them."""
    if isinstance(policy, Decoder):
        copied: Any = Decoder.empty(policy.config, policy.device, dtype)
        copied.pack()
    else:
        (own,), device = policy.bare or (policy,), policy.device
        copied = own.copied(lambda x: torch.zeros_like(x, dtype=dtype, device=device))
        copied.to(device)  # buffers keep their dtype
        copied.checkpoint_activations = False
    copied.requires_grad_(False)
    copied.copy_weights(policy)
    return cast(PolicyModel, copied)


class DeviceEngine(NativeEngine):
    """A copy of any policy, and slots, which grow to hold the largest call."""

    def __init__(self, model: PolicyModel, dtype: torch.dtype, **limits: Any):
        super().__init__(model, dtype, **limits)
        self.model = decoding_copy(model, dtype)
        # whether attention runs in the CUDA kernel
        self.in_kernel = isinstance(model, Decoder) and has_kernel(model.config, dtype, self.device)
        # PyTorch's default is a stream of the first capture's device; each keeps 32 MiB for cuBLAS
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.batch: DecodeSlots | None = None

    def bytes_of(self, slots: int, rows: int, prompt_width: int, limit: int) -> int:
        return Shape(slots, rows, 1, prompt_width, limit).cache_bytes(self.model.config, self.dtype)

    def describe(self) -> str:
        model, how = self.model, ""
        if isinstance(model, Decoder) and self.device.type == "cuda":
            names = "PyTorch", "CUDA"
            layers = names[model.ops(self.dtype) is KERNELS]
            how = f", CUDA graphs, attention in {names[self.in_kernel]}, layers in {layers}"
        backend = "PyTorch" if isinstance(model, Decoder) else model.backend
        most = f"key/value cache and tensors of a step of at most {self.cache_bytes / 1e9:.3g} GB"
        return f"native ({backend}, {dtype_name(self.dtype)}{how}, {most})"

    def sequence_bytes(self, prompt_length: int, max_new_tokens: int) -> tuple[int, int]:
        return self.bytes_of(1, 0, prompt_length, 0), self.bytes_of(0, 1, 0, max_new_tokens)

    def sleep(self) -> None:
        """Free a KV cache that takes much of the device's memory; to make it and its graphs again
        takes tens of milliseconds."""
        if self.batch is not None and self.batch.bytes > KEPT_SHARE * memory_bytes(self.device):
            self.batch = None

    def load_weights(self, model: PolicyModel) -> None:
        self.model.copy_weights(model)

    @torch.no_grad()
    def serve(self, request: RolloutRequest, prompt: int, own: int) -> Rollouts:
        prompts, num_samples, sampling = request.prompts, request.num_samples, request.sampling
        budget, max_batch, limit = self.cache_bytes, self.max_batch, sampling.max_new_tokens
        row, token, longest = own, self.bytes_of(1, 0, 1, 0), int(prompts.lengths.max())
        in_kernel = samples_in_kernel(sampling, self.dtype, self.device)
        if decode_slots.uses_graphs(self.device) and not in_kernel:
            filtered = LOGIT_BYTES * ROWS * self.model.config.vocab_size
            budget = max(budget - filtered, longest * token + row)
        # the largest shape within the budget that this call can use
        width = min(_rounded(longest), (budget - row) // token)
        group_size = max(1, min(num_samples, max_batch, (budget - width * token) // row))
        slots = max(1, min(max_batch // group_size, budget // (group_size * row + width * token)))
        slots = min(slots, len(prompts) * -(-num_samples // group_size))
        shape = Shape(slots, slots * group_size, group_size, width, limit)
        # Graphs are captured and replayed on the current device.
        is_gpu = self.device.type == "cuda"
        with torch.cuda.device(self.device) if is_gpu else contextlib.nullcontext():
            batch = self._batch_of(shape, budget)
            batch.begin(slots, group_size, sampling)
            rollouts, self.statistics = _Job(request, batch, self.config.vocab_size).run()
            return rollouts

    def _batch_of(self, shape: Shape, budget: int) -> DecodeSlots:
        """Return slots that hold a shape: the present ones, or larger ones if they fit."""
        if self.batch is None or not self.batch.shape.holds(shape):
            if self.batch is not None and self.batch.shape.limit == shape.limit:
                both = shape.joined(self.batch.shape)
                is_small = both.cache_bytes(self.model.config, self.dtype) <= budget
                shape = both if is_small else shape
            self.batch = None  # and its graphs, before the new one is allocated
            self.batch = DecodeSlots(self.model, shape, self.dtype, self.in_kernel, self.stream)
        return self.batch


class _Job:
    def __init__(self, request: RolloutRequest, batch: DecodeSlots, vocab_size: int):
        self.turns = None if request.environments is None else Turns(request, vocab_size)
        self.samples = torch.zeros(0)  # of each row in the newest state
        self.prompts = request.prompts.to(torch.device("cpu"))
        self.sampling, self.batch = request.sampling, batch
        self.beat, self.keys = request.beat, request.keys()
        count, self.of_rows = len(self.keys), (batch.tokens, batch.logprobs, batch.length)
        # [S, limit] or [S]
        self.results = [x.new_zeros(count, *x.shape[1:]) for x in self.of_rows]
        # A prompt with more than group_size samples has several groups, the last padded with -1.
        samples = torch.arange(count, device=self.keys.device).view(-1, request.num_samples)
        padding = -request.num_samples % batch.group_size
        padded = torch.nn.functional.pad(samples, (0, padding), value=-1)
        self.groups = padded.view(-1, batch.group_size)
        self.groups_per_prompt = padded.shape[1] // batch.group_size
        self.next_group = self.steps = 0
        self.is_stored = torch.zeros(count, dtype=torch.bool)
        self.pinned: list[Tensor] = []
        self.prefill_seconds = 0.0

    def run(self) -> tuple[Rollouts, RolloutStatistics]:
        """On a GPU the next burst is launched before the state after the last one is read, except
        where rows move: the GPU never waits for the host, at the cost of one burst at the end."""
        start, limit, batch = time.perf_counter(), self.sampling.max_new_tokens, self.batch
        active, held, lengths = self._finish(self._state())
        # of the burst that is not in `active` and `lengths` yet: the state after it, and its steps
        ahead: Callable[[], Tensor] | None = None
        running = 0
        while True:
            self.beat()
            waiting = len(self.groups) - self.next_group
            slots = self._slots_to_fill(held, waiting)
            if self.turns is not None and held.any() and not active.any() and not len(slots):
                self._feed(self.turns, active, wait=True)  # all replies may end their episodes
            still = lengths[active]
            count = min(tuning.BURST, limit - running - int(still.min())) if len(still) else 0
            moves = len(slots) or (not waiting and batch.fitting(int(held.sum())) < batch.rows)
            if ahead is not None and (moves or count <= 0):
                active, held, lengths = self._finish(ahead)
                ahead, running = None, 0
            elif len(slots):
                self._admit(slots)
                active, held, lengths = self._finish(self._state())
            elif not held.any():
                break
            else:
                if count:
                    longest = int(lengths[held].max())
                    if moves:
                        batch.compact(held, longest)
                    batch.steps(count, self.sampling, min(limit, longest + running + count))
                    self.steps += count
                due, ahead, running = ahead, self._state(), count
                if not batch.has_graphs or self.turns is not None:  # a turn is answered at once
                    due, ahead, running = ahead, None, 0
                if due is not None:
                    active, held, lengths = self._finish(due)
        tokens, logprobs, lengths = self.results
        last = tokens.gather(1, lengths[:, None] - 1)[:, 0]  # [S], the last token of each response
        rollouts = finished(self.turns, tokens, logprobs, lengths, ~batch.stops[last])
        return rollouts, RolloutStatistics(
            prefill_seconds=self.prefill_seconds,
            decode_seconds=time.perf_counter() - start - self.prefill_seconds,
            decode_steps=self.steps,
            cache_bytes=batch.bytes,
        )

    def _slots_to_fill(self, held: Tensor, waiting: int) -> Tensor:
        """Return empty slots, at least a quarter of all, as small batches are slow."""
        if not waiting:
            return torch.arange(0)
        num_slots, group_size = self.batch.num_slots, self.batch.group_size
        by_slot = held[: num_slots * group_size].view(num_slots, group_size)
        empty = (~by_slot.any(1)).nonzero()[:, 0]
        return empty[: waiting if len(empty) >= min(waiting, (num_slots + 3) // 4) else 0]

    def _admit(self, slots: Tensor) -> None:
        """At most tuning.PREFILL_TOKENS in one forward pass; a prompt's groups each compute it."""
        start, device = time.perf_counter(), self.keys.device
        for part in slots.split(max(1, tuning.PREFILL_TOKENS // self.batch.shape.prompt_width)):
            groups = torch.arange(self.next_group, self.next_group + len(part))
            prompts = self.prompts.select(groups // self.groups_per_prompt).to(device)
            samples = self.groups[groups.to(device)]  # [g, group_size]
            self.batch.admit(part.to(device), prompts, samples, self.keys, self.sampling)
            self.next_group += len(part)
        self.prefill_seconds += time.perf_counter() - start

    def _state(self) -> Callable[[], Tensor]:
        """Return a function that waits for the state [3, rows] as it is now."""
        batch = self.batch
        state = torch.stack([batch.done.long(), batch.sample, batch.length])
        if self.keys.device.type != "cuda":
            return lambda: state
        if not self.pinned:
            self.pinned = [torch.empty(state.shape, dtype=state.dtype).pin_memory() for _ in "ab"]
        self.pinned.reverse()  # the other one may not be read yet
        return copy_to_host(state, self.pinned[0])

    def _finish(self, state: Callable[[], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Store the results of samples that had ended in a state. Returns which rows are active,
        which are held by samples that are active or wait, and their lengths, all on the host. Only
        this waits for the device."""
        batch = self.batch
        done, samples, lengths = state()[:, : batch.rows].clone()
        self.samples, active = samples, done == 0
        held = active
        if self.turns is not None:
            self._submit(self.turns, active, lengths)
            if self.turns.waiting:  # at once, so that an episode that ends leaves its row
                self._feed(self.turns, active, wait=False)
            waiting = torch.tensor([*self.turns.waiting], dtype=torch.int64)
            held = active | torch.isin(samples, waiting)
        ended = (~held & (samples >= 0)).nonzero()[:, 0]
        ended = ended[~self.is_stored[samples[ended]]]
        if len(ended):
            self.is_stored[samples[ended]] = True
            rows, samples = to_device(self.keys.device, ended, samples[ended])
            for result, x in zip(self.results, self.of_rows, strict=True):
                result[samples] = x[rows]
            batch.forget(rows)
        return active, held, lengths

    def _submit(self, turns: Turns, active: Tensor, lengths: Tensor) -> None:
        rows = (~active & (self.samples >= 0)).nonzero()[:, 0].tolist()
        ended = [(row, int(self.samples[row]), int(lengths[row])) for row in rows]
        ended = [(row, s, length) for row, s, length in ended if length > turns.lengths[s]]
        index = torch.tensor([row for row, _, _ in ended], dtype=torch.int64)
        tokens = self.batch.tokens[index.to(self.keys.device)].tolist()
        for (_, s, length), row_tokens in zip(ended, tokens, strict=True):
            turn = row_tokens[turns.lengths[s] : length]
            if turn[-1] in self.sampling.stop_ids:
                turns.submit(s, turn)

    def _feed(self, turns: Turns, active: Tensor, wait: bool) -> None:
        """Carry out replies; rows whose samples have tokens to read become active."""
        for reply in turns.replies(wait):
            if not reply.is_last:
                row = int((self.samples == reply.sample).nonzero())
                start = turns.lengths[reply.sample] - len(reply.tokens)
                self.batch.feed(row, start, reply.tokens)
                active[row] = True
