"""Decoding of policies that transformers runs: for tests and small models.

Each prompt is computed once. Decoding uses the attention function of training, with a KV cache of
its own. All samples of a pass decode together until the last one has ended. In episodes a pass
waits for the reply to each turn before its next step, so that its samples have the same length.
"""

from typing import Any

import torch
from torch import Tensor

from maxrl_fast.model.attention import (
    PLAIN_ATTENTION,
    AttentionVariant,
    Forest,
    merge,
    tree_attention,
)
from maxrl_fast.model.flash import attend, padded_rows
from maxrl_fast.model.huggingface import HuggingFacePolicy
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.model.recurrence import Run, States, over_forest
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.rollout import NativeEngine, RolloutRequest
from maxrl_fast.rollout.episodes import Turns, finished
from maxrl_fast.rollout.random import uniforms
from maxrl_fast.rollout.sampling import sample


class TransformersEngine(NativeEngine):
    def __init__(self, model: HuggingFacePolicy, dtype: torch.dtype, **limits: Any):
        super().__init__(model, dtype, **limits)
        self.model = model.copy_in(dtype)

    def describe(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        most = f"of at most {self.cache_bytes / 1e9:.3g} GB"
        return f"plain ({self.model.backend}, {name}, key/value cache {most})"

    def load_weights(self, model: PolicyModel) -> None:
        assert isinstance(model, HuggingFacePolicy)
        self.model.copy_weights(model)

    def sleep(self) -> None:
        """The cache exists only while samples are decoded."""

    def sequence_bytes(self, prompt_length: int, max_new_tokens: int) -> tuple[int, int]:
        c = self.model.config
        token = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * self.dtype.itemsize
        return token * prompt_length, token * max_new_tokens

    @torch.no_grad()
    def serve(self, request: RolloutRequest, prompt: int, own: int) -> Rollouts:
        prompts, num_samples = request.prompts, request.num_samples
        budget, max_batch = self.cache_bytes, self.max_batch
        # of a prompt, in one pass
        samples = max(1, min(num_samples, max_batch, (budget - prompt) // own))
        groups = max(1, min(max_batch // samples, budget // (prompt + samples * own)))
        turns = None
        if request.environments is not None:
            turns = Turns(request, self.model.config.vocab_size)
        passes = _Passes(self.model, self.dtype, request, turns)
        index = torch.arange(request.num_sequences, device=prompts.ids.device)
        index = index.view(-1, num_samples)
        for i in range(0, len(prompts), groups):
            for part in index[i : i + groups].split(samples, 1):
                request.beat()
                passes.run(prompts.take(i, groups), part)
        return passes.rollouts()


class _Passes:
    def __init__(
        self,
        model: HuggingFacePolicy,
        dtype: torch.dtype,
        request: RolloutRequest,
        turns: Turns | None,
    ):
        self.model, self.dtype, self.turns = model, dtype, turns
        self.sampling, self.keys = request.sampling, request.keys()
        device, shape = self.keys.device, (len(self.keys), self.sampling.max_new_tokens)
        self.stops = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=device)
        self.stops[list(self.sampling.stop_ids)] = True
        # of all samples, [S, limit] and [S]
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(shape, device=device)
        self.lengths = torch.zeros_like(self.keys)
        # by layer: keys and values of prompts, and of samples
        self.caches: dict[int, list[Tensor]] = {}
        self.states: dict[tuple[int, int], States] = {}  # of samples, of layers with a state

    def run(self, prompts: Prompts, index: Tensor) -> None:
        """Sample responses to prompts [g]; index: [g, n] samples of the request."""
        n, turns = index.shape[1], self.turns
        samples, limit = index.flatten(), self.sampling.max_new_tokens
        keys, numbers = self.keys[samples], samples.tolist()
        row_of = {s: row for row, s in enumerate(numbers)}
        first = sample(self._prefill(prompts, n), uniforms(keys, 0).view(-1, n), self.sampling)
        newest = first[0].flatten(), first[1].flatten()
        tokens = torch.zeros(len(keys), limit, dtype=torch.int64, device=keys.device)
        logprobs, lengths = torch.zeros(tokens.shape, device=keys.device), torch.zeros_like(keys)
        is_done = torch.zeros_like(keys, dtype=torch.bool)
        given_end = torch.zeros_like(keys)  # up to here, `tokens` has what environments wrote
        t = 0

        def sample_on() -> tuple[list[tuple[int, list[int]]], bool]:
            """Sample one token of each; see Turns.play."""
            nonlocal t, newest
            if t == limit or bool(is_done.all()) or (turns is not None and turns.waiting):
                return [], False
            if t:
                logits = self._step(newest[0], prompts.lengths, t - 1)
                drawn = sample(logits, uniforms(keys, t)[:, None], self.sampling)
                newest = drawn[0][:, 0], drawn[1][:, 0]
            is_given = t < given_end
            token, log_p = torch.where(is_given, tokens[:, t], newest[0]), newest[1]
            newest = token, log_p
            tokens[:, t], logprobs[:, t] = token.where(~is_done, 0), log_p.where(~is_done, 0)
            lengths.add_(~is_done)
            ends = self.stops[token] & ~is_done & ~is_given
            is_done.logical_or_(ends)
            t += 1
            ended = []
            if turns is not None:
                for row in ends.nonzero()[:, 0].tolist():
                    s = numbers[row]
                    ended.append((s, tokens[row, turns.lengths[s] : t].tolist()))
            return ended, True

        def feed(s: int, reply: list[int]) -> None:
            row, end = row_of[s], t + len(reply)
            if not reply:
                return
            tokens[row, t:end] = torch.tensor(reply, device=tokens.device)
            given_end[row], is_done[row] = end, False

        if turns is not None:
            turns.play(sample_on, feed)
        else:
            while sample_on()[1]:
                pass
        self.caches.clear()
        self.states.clear()
        self.tokens[samples], self.logprobs[samples] = tokens, logprobs
        self.lengths[samples] = lengths

    def rollouts(self) -> Rollouts:
        last = self.tokens.gather(1, self.lengths[:, None] - 1)[:, 0]
        return finished(self.turns, self.tokens, self.logprobs, self.lengths, ~self.stops[last])

    def _prefill(self, prompts: Prompts, num_samples: int) -> Tensor:
        lengths = prompts.lengths
        forest = Forest.roots(lengths)
        tile, limit = padded_rows(prompts.cu_seqlens[:-1], lengths)[0], self.sampling.max_new_tokens

        def attention(
            layer: int, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant = PLAIN_ATTENTION
        ) -> Tensor:
            # [g, n, limit, Hkv, D]
            own = [x.new_zeros(len(prompts), num_samples, limit, *x.shape[1:]) for x in (k, v)]
            self.caches[layer] = [k[tile], v[tile], *own]
            return tree_attention(q, k, v, forest, variant)

        def recurrence(layer: tuple[int, int], run: Run, hidden: Tensor) -> Tensor:
            out, states = over_forest(run, hidden, forest.padded)
            own = torch.arange(len(prompts), device=hidden.device).repeat_interleave(num_samples)
            self.states[layer] = states.rows(own)
            return out

        starts = prompts.cu_seqlens[:-1].repeat_interleave(lengths)  # [U]
        positions = torch.arange(len(prompts.tokens), device=lengths.device) - starts
        hidden = self.model(
            prompts.tokens,
            positions,
            attention,
            prompts.cu_seqlens[1:] - 1,
            self.dtype,
            recurrence,
        )
        return self.model.logits(hidden)

    def _step(self, token: Tensor, prompt_lengths: Tensor, at: int) -> Tensor:
        """Return logits [g n, V] after the newest tokens [g n], number `at` of their responses."""
        groups = len(prompt_lengths)
        positions = prompt_lengths.repeat_interleave(len(token) // groups) + at

        def attention(
            layer: int, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant = PLAIN_ATTENTION
        ) -> Tensor:
            cache = self.caches[layer]
            for own, x in zip(cache[2:], (k, v), strict=True):
                own[:, :, at] = x.unflatten(0, (groups, -1))  # [g, n, Hkv, D]
            return decode_attention(q, cache, prompt_lengths, at, variant)

        def recurrence(layer: tuple[int, int], run: Run, hidden: Tensor) -> Tensor:
            return run(hidden[:, None], self.states[layer], None)[:, 0]

        rows = torch.arange(len(token), device=token.device)
        hidden = self.model(token, positions, attention, rows, self.dtype, recurrence)
        return self.model.logits(hidden)


def decode_attention(
    q: Tensor, cache: list[Tensor], prompt_lengths: Tensor, at: int, variant: AttentionVariant
) -> Tensor:
    """Return [g n, Hq, D]. cache: keys and values of prompts [g, P, Hkv, D], then of samples
    [g, n, limit, Hkv, D]."""
    keys, values, *own = cache
    own_keys, own_values = (x.flatten(0, 1)[:, : at + 1] for x in own)
    p, i = (torch.arange(x.shape[1], device=q.device) for x in (keys, own_keys))
    lengths = prompt_lengths[:, None, None]
    of_prompts, of_own = p < lengths, (i <= at)[None, None]  # [g, 1, P] and [1, 1, at + 1]
    if variant.window:
        of_prompts = of_prompts & (p > lengths + at - variant.window)
        of_own = of_own & (i > at - variant.window)
    by_prompt = q.unflatten(0, (len(keys), -1))  # [g, n, Hq, D]
    to_prompts = attend(by_prompt, keys, values, of_prompts, variant.softcap)
    to_own = attend(q[:, None], own_keys, own_values, of_own, variant.softcap)
    o, lse = merge(*(x.flatten(0, 1) for x in (*to_prompts, *to_own)))
    if variant.sinks is not None:  # as a part of the keys with the value 0
        o = o * torch.sigmoid(lse - variant.sinks)[..., None].to(o.dtype)
    return o
