"""The rollout engine for policies that transformers runs: for tests and small models.

Each prompt is computed once. Decoding uses the attention function of training, with a KV cache of
its own. All samples of a pass decode together until the last one has ended. In episodes a pass
waits for the reply to each turn before its next step, so that its samples have the same length.
"""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from maxrl_fast.model.attention import (
    PLAIN_ATTENTION,
    AttentionVariant,
    Forest,
    tree_attention,
)
from maxrl_fast.model.huggingface import HuggingFacePolicy
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.model.tiling import tile
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.rollout import (
    Environments,
    RolloutStatistics,
    Sampling,
    check_cache,
    check_request,
)
from maxrl_fast.rollout.native import MAX_BATCH, default_cache_bytes
from maxrl_fast.rollout.random import sample_keys, uniforms
from maxrl_fast.rollout.sampling import sample
from maxrl_fast.rollout.turns import Turns


class TransformersEngine:
    """Samples responses with a copy of the policy in the compute dtype. The random numbers of a
    sample depend only on (seed, step, prompt id, sample, position). Prompts beyond `cache_bytes`
    wait."""

    def __init__(
        self,
        model: HuggingFacePolicy,
        dtype: torch.dtype,
        *,
        cache_bytes: int | None = None,
        max_batch: int | None = None,
    ):
        self.device = model.lm_head.weight.device
        self.config, self.dtype = model.config, dtype
        self.cache_bytes = default_cache_bytes(self.device) if cache_bytes is None else cache_bytes
        self.max_batch = MAX_BATCH[self.device.type] if max_batch is None else max_batch
        self.statistics = RolloutStatistics()
        self.model = model.copy_in(dtype)

    def describe(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"plain ({self.model.backend}, {name}, key/value cache of at most "
            f"{self.cache_bytes / 1e9:.3g} GB)"
        )

    def load_weights(self, model: PolicyModel) -> None:
        assert isinstance(model, HuggingFacePolicy)
        self.model.copy_weights(model)

    def sleep(self) -> None:
        """The cache exists only while samples are decoded."""

    def sequence_bytes(self, prompt_length: int, max_new_tokens: int) -> tuple[int, int]:
        c, element = self.config, torch.empty((), dtype=self.dtype).element_size()
        token = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * element
        prompt, own = token * prompt_length, token * max_new_tokens
        check_cache(self.cache_bytes, prompt, own, prompt_length, max_new_tokens)
        return prompt, own

    @torch.no_grad()
    def generate(
        self,
        prompts: Prompts,
        num_samples: int,
        sampling: Sampling,
        *,
        seed: int,
        step: int,
        environments: Environments | None = None,
    ) -> Rollouts:
        check_request(prompts, num_samples, sampling, self.config)
        prompt, own = self.sequence_bytes(int(prompts.lengths.max()), sampling.max_new_tokens)
        # of a prompt, in one pass
        samples = max(1, min(num_samples, self.max_batch, (self.cache_bytes - prompt) // own))
        fitting = self.cache_bytes // (prompt + samples * own)
        groups = max(1, min(self.max_batch // samples, fitting))
        stops = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=self.device)
        stops[list(sampling.stop_ids)] = True
        start, parts = time.perf_counter(), []
        index = torch.arange(len(prompts) * num_samples, device=self.device).view(-1, num_samples)
        turns = None
        if environments is not None:
            turns = Turns(environments, index.numel(), sampling, self.config.vocab_size)
        passes = [
            _Pass(self.model, self.dtype, sampling, stops, turns)
            for _ in range(-(-len(prompts) // groups))
        ]
        for i, one in enumerate(passes):
            chosen = prompts.take(i * groups, min(groups, len(prompts) - i * groups))
            shares = [
                one.run(chosen, seed, step, part, part % num_samples)
                for part in index[i * groups : i * groups + len(chosen)].split(samples, 1)
            ]
            parts.append([torch.cat(x, 1).flatten(0, 1) for x in zip(*shares, strict=True)])
        tokens, logprobs, lengths = (torch.cat(column) for column in zip(*parts, strict=True))
        truncated, given = ~stops[tokens.gather(1, lengths[:, None] - 1)[:, 0]], None  # [S]
        if turns is not None:
            truncated |= turns.truncated.to(self.device)
            given = turns.given.to(self.device)
        rollouts = Rollouts.from_padded(tokens, logprobs, lengths, truncated, given)
        prefill = sum(one.prefill_seconds for one in passes)
        self.statistics = RolloutStatistics(
            prefill_seconds=prefill,
            decode_seconds=time.perf_counter() - start - prefill,
            decode_steps=sum(one.steps for one in passes),
            prompt_tokens=len(prompts.tokens),
            response_tokens=len(rollouts.tokens),
            cache_bytes=min(len(prompts), groups) * (prompt + samples * own),
        )
        return rollouts


@dataclass
class _Pass:
    model: HuggingFacePolicy
    dtype: torch.dtype
    sampling: Sampling
    stops: Tensor  # [V] bool, the tokens that end a response or a turn
    turns: Turns | None
    prefill_seconds: float = 0.0
    steps: int = 0
    # by layer: keys and values of prompts, and of samples
    caches: dict[int, list[Tensor]] = field(default_factory=dict)

    def run(
        self, prompts: Prompts, seed: int, step: int, index: Tensor, number: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens and log-probs [g, n, limit] and lengths [g, n] of the samples `index`
        [g, n] of the call, each `number` [g, n] of its prompt."""
        start, device, n = time.perf_counter(), prompts.tokens.device, index.shape[1]
        limit = self.sampling.max_new_tokens
        keys = sample_keys(seed, step, prompts.ids.repeat_interleave(n), number.flatten())
        u = uniforms(keys, 0).view(-1, n)
        token, log_p = sample(self._prefill(prompts, n), u, self.sampling)
        self.prefill_seconds += time.perf_counter() - start
        token, log_p = token.flatten(), log_p.flatten()
        tokens = torch.zeros(len(keys), limit, dtype=torch.int64, device=device)
        logprobs, lengths = torch.zeros(len(keys), limit, device=device), torch.zeros_like(keys)
        is_done = torch.zeros_like(keys, dtype=torch.bool)
        given_end = torch.zeros_like(keys)  # up to here, `tokens` has what environments wrote
        for t in range(limit):
            if t:
                logits = self._step(token, prompts.lengths, t - 1)
                u = uniforms(keys, t)[:, None]
                token, log_p = (x[:, 0] for x in sample(logits, u, self.sampling))
            is_given = t < given_end
            token = torch.where(is_given, tokens[:, t], token)
            tokens[:, t], logprobs[:, t] = token.where(~is_done, 0), log_p.where(~is_done, 0)
            lengths += ~is_done
            ends = self.stops[token] & ~is_done & ~is_given
            is_done |= ends
            if self.turns is not None and bool(ends.any()):
                rows = {int(index.flatten()[row]): row for row in ends.nonzero()[:, 0].tolist()}
                for s, reply in self._replies(self.turns, rows, tokens, t + 1).items():
                    end = t + 1 + len(reply)
                    tokens[rows[s], t + 1 : end] = torch.tensor(reply, device=device)
                    given_end[rows[s]], is_done[rows[s]] = end, False
            if bool(is_done.all()):
                break
        self.caches.clear()
        return tokens.view(-1, n, limit), logprobs.view(-1, n, limit), lengths.view(-1, n)

    def _replies(
        self, turns: Turns, rows: dict[int, int], tokens: Tensor, length: int
    ) -> dict[int, list[int]]:
        """Submit the turns that end at `length` in the rows of these samples, wait for their
        replies, and return those that do not end their episodes, by sample."""
        due, replies = set[int](), {}
        for s, row in rows.items():
            if turns.submit(s, tokens[row, turns.lengths[s] : length].tolist()):
                due.add(s)
        while due:
            for reply in turns.replies(wait=True):
                due.remove(reply.sample)
                if not reply.is_last:
                    replies[reply.sample] = reply.tokens
        return replies

    def _prefill(self, prompts: Prompts, num_samples: int) -> Tensor:
        lengths = prompts.lengths
        forest = Forest.roots(lengths)
        tiling, limit = tile(lengths), self.sampling.max_new_tokens

        def attention(
            layer: int, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant = PLAIN_ATTENTION
        ) -> Tensor:
            # [g, n, limit, Hkv, D]
            own = [x.new_zeros(len(prompts), num_samples, limit, *x.shape[1:]) for x in (k, v)]
            self.caches[layer] = [tiling.pad(k), tiling.pad(v), *own]
            return tree_attention(q, k, v, forest, variant)

        starts = prompts.cu_seqlens[:-1].repeat_interleave(lengths)  # [U]
        positions = torch.arange(len(prompts.tokens), device=lengths.device) - starts
        hidden = self.model(
            prompts.tokens, positions, attention, prompts.cu_seqlens[1:] - 1, self.dtype
        )
        return self.model.logits(hidden)

    def _step(self, token: Tensor, prompt_lengths: Tensor, at: int) -> Tensor:
        """Return logits [g n, V] after the newest tokens [g n], number `at` of their responses."""
        self.steps += 1
        groups = len(prompt_lengths)
        positions = prompt_lengths.repeat_interleave(len(token) // groups) + at

        def attention(
            layer: int, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant = PLAIN_ATTENTION
        ) -> Tensor:
            cache = self.caches[layer]
            for own, x in zip(cache[2:], (k, v), strict=True):
                own[:, :, at] = x.unflatten(0, (groups, -1))  # [g, n, Hkv, D]
            return decode_attention(q, cache, prompt_lengths, at, variant)

        rows = torch.arange(len(token), device=token.device)
        return self.model.logits(self.model(token, positions, attention, rows, self.dtype))


def decode_attention(
    q: Tensor, cache: list[Tensor], prompt_lengths: Tensor, at: int, variant: AttentionVariant
) -> Tensor:
    """Return [g n, Hq, D], in float32 PyTorch. cache: keys and values of prompts [g, P, Hkv, D],
    then of samples [g, n, limit, Hkv, D]."""
    keys, values, own_keys, own_values = (x.float() for x in cache)
    own_keys, own_values = own_keys[:, :, : at + 1], own_values[:, :, : at + 1]
    g, n, kv_heads = *own_keys.shape[:2], keys.shape[2]
    # [g, n, Hkv, R, D], R query heads of a key head
    wide = q.float().view(g, n, kv_heads, -1, q.shape[-1]) * q.shape[-1] ** -0.5
    to_prompts = torch.einsum("gnkrd,gpkd->gnkrp", wide, keys)
    to_own = torch.einsum("gnkrd,gnwkd->gnkrw", wide, own_keys)
    scores = torch.cat([to_prompts, to_own], -1)  # [g, n, Hkv, R, P + at + 1]
    if variant.softcap:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    lengths = prompt_lengths[:, None]
    p, i = (torch.arange(x.shape[-1], device=q.device) for x in (to_prompts, to_own))
    # [g, P + at + 1]
    is_seen = torch.cat([p < lengths, torch.ones_like(i, dtype=torch.bool).expand(g, -1)], 1)
    if variant.window:
        key_positions = torch.cat([p.expand(g, -1), lengths + i], 1)
        is_seen &= key_positions > lengths + at - variant.window
    scores = scores.masked_fill(~is_seen[:, None, None, None], float("-inf"))
    if variant.sinks is not None:
        sinks = variant.sinks.float().view(kv_heads, -1, 1).expand(g, n, -1, -1, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    of_prompts, of_own = weights.split([to_prompts.shape[-1], to_own.shape[-1]], -1)
    out = torch.einsum("gnkrp,gpkd->gnkrd", of_prompts, values)
    out = out + torch.einsum("gnkrw,gnwkd->gnkrd", of_own, own_values)
    return out.flatten(2, 3).flatten(0, 1).to(q.dtype)
