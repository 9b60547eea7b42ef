"""The native rollout engine: each prompt is computed once, its keys and values serve all its samples."""

import torch
from torch import Tensor

from maxrl_fast.model.attention import SharedPromptLayout, merge, shared_prompt_attention
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.flash import attend
from maxrl_fast.model.tiling import padding_mask, tile
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.rollout import Sampling
from maxrl_fast.rollout.random import sample_keys, uniforms


class _PromptCache:
    """Keys and values of G prompts [G, P, Hkv, D], a pair a layer."""

    def __init__(self, lengths: Tensor):
        none = torch.zeros(0, dtype=torch.int64)
        self.layout = SharedPromptLayout.build(lengths.cpu(), none, none, lengths.device)
        self.tiling, self.mask = tile(lengths), padding_mask(lengths)
        self.layers: list[tuple[Tensor, Tensor]] = []

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the prompts, for the decoder to call; keeps k and v."""
        self.layers.append((self.tiling.pad(k), self.tiling.pad(v)))
        return shared_prompt_attention(q, k, v, self.layout)


class _Suffixes:
    """The unfinished samples of a wave: their keys and values [A, max_new_tokens, Hkv, D] and their prompts' caches."""

    def __init__(self, cache: _PromptCache, num_samples: int, max_new_tokens: int):
        k, _ = cache.layers[0]
        self.groups = torch.arange(len(k), device=k.device).repeat_interleave(num_samples)  # [A]
        self.prompts = cache.layers
        self.prompt_mask = cache.mask
        self.grid = tile(torch.bincount(self.groups))  # samples by prompt: those of a prompt read its keys in one product
        shape = (len(self.groups), max_new_tokens, *k.shape[2:])
        self.layers = [(k.new_empty(shape), k.new_empty(shape)) for _ in cache.layers]

    def keep(self, rows: Tensor, length: int) -> None:
        """Drop all samples but `rows`, and the prompts that have none left; `length` tokens of each are cached."""
        remaining, self.groups = torch.unique(self.groups[rows], return_inverse=True)
        for k, v in self.layers:
            k[: len(rows), :length], v[: len(rows), :length] = k[rows, :length], v[rows, :length]
        self.layers = [(k[: len(rows)], v[: len(rows)]) for k, v in self.layers]
        if len(remaining) < len(self.prompts[0][0]):
            self.prompts = [(k[remaining], v[remaining]) for k, v in self.prompts]
            self.prompt_mask = None if self.prompt_mask is None else self.prompt_mask[remaining]
        self.grid = tile(torch.bincount(self.groups))

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        """Attention of one new token of each sample to its prompt and to its own tokens: q [A, Hq, D] -> [A, Hq, D]."""
        (k_prompt, v_prompt), (k_own, v_own) = self.prompts[layer], self.layers[layer]
        k_own[:, position], v_own[:, position] = k, v
        samples, heads, dim = k.shape
        # The query heads that share a key/value head become further queries of it: [A, R, Hkv, D], no copies of k and v.
        q = q.view(samples, heads, -1, dim).transpose(1, 2).contiguous()
        repeats = q.shape[1]
        shape = (self.grid.rows, self.grid.width, repeats, heads)
        o1, l1 = attend(self.grid.pad(q).view(shape[0], -1, heads, dim), k_prompt, v_prompt, mask=self.prompt_mask)
        o1, l1 = self.grid.unpad(o1.reshape(*shape, dim)), self.grid.unpad(l1.reshape(shape))
        o2, l2 = attend(q, k_own[:, : position + 1], v_own[:, : position + 1])
        o, _ = merge(o1, l1, o2, l2)
        return o.transpose(1, 2).reshape(samples, -1, dim)


class NativeEngine:
    """Samples responses with a copy of the decoder in the compute dtype.

    Args:
        model: the policy; its weights are copied by `load_weights`.
        dtype: of the computation.
        max_rows: samples computed side by side, at least those of one prompt; more are done in waves, which bounds the
            memory of the caches.
    """

    MAX_ROWS = 1024

    def __init__(self, model: Decoder, dtype: torch.dtype, max_rows: int = MAX_ROWS):
        self.dtype, self.max_rows = dtype, max_rows
        device = model.lm_head.weight.device
        self.model = Decoder.empty(model.config, device, dtype).requires_grad_(False)
        self.load_weights(model)

    def load_weights(self, model: Decoder) -> None:
        """Take over the policy's weights, rounded to the compute dtype once instead of at every token."""
        own = dict(self.model.weights())
        for name, weight in model.weights():
            own[name].copy_(weight)

    @torch.no_grad()
    def generate(self, prompts: Prompts, num_samples: int, sampling: Sampling, *, seed: int, step: int) -> Rollouts:
        """`num_samples` responses to each prompt.

        A sample's random numbers depend on (seed, step, prompt id, sample, position) alone. Log-probs are those of the
        distribution sampled from, softmax(logits / temperature); at temperature 0 they are 0.
        """
        per_wave = max(1, self.max_rows // num_samples)
        waves = [
            self._wave(prompts.take(start, per_wave), num_samples, sampling, seed, step)
            for start in range(0, len(prompts), per_wave)
        ]
        return Rollouts.concatenate(waves)

    def _wave(self, prompts: Prompts, num_samples: int, sampling: Sampling, seed: int, step: int) -> Rollouts:
        device, lengths = prompts.tokens.device, prompts.lengths
        cache = _PromptCache(lengths)
        positions = torch.arange(len(prompts.tokens), device=device) - prompts.cu_seqlens[:-1].repeat_interleave(lengths)
        hidden = self.model(prompts.tokens, positions, cache.prefill, prompts.cu_seqlens[1:] - 1, self.dtype)
        logits = self.model.logits(hidden).repeat_interleave(num_samples, 0)  # [A, V]

        suffixes = _Suffixes(cache, num_samples, sampling.max_new_tokens)
        shape = (len(prompts) * num_samples, sampling.max_new_tokens)
        tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        logprobs = torch.zeros(shape, device=device)
        response_lengths = torch.full(shape[:1], sampling.max_new_tokens, device=device)
        truncated = torch.ones(shape[:1], dtype=torch.bool, device=device)
        stop_ids = torch.tensor(sampling.stop_ids, device=device)

        rows = torch.arange(shape[0], device=device)  # [A] the samples still computed, finished ones not yet dropped included
        keys = sample_keys(seed, step, prompts.ids.repeat_interleave(num_samples), rows % num_samples)
        starts = lengths.repeat_interleave(num_samples)
        for t in range(sampling.max_new_tokens):
            if sampling.temperature == 0:  # all probability lies on the likeliest token
                token, log_p = logits.argmax(-1), torch.zeros_like(logits)
            else:
                log_p = torch.log_softmax(logits / sampling.temperature, -1)
                token = _sample(log_p, uniforms(keys, t))
            tokens[rows, t] = token
            logprobs[rows, t] = log_p.gather(-1, token[:, None])[:, 0]
            stopped = torch.isin(token, stop_ids) & truncated[rows]
            response_lengths[rows[stopped]] = t + 1
            truncated[rows[stopped]] = False
            unfinished = truncated[rows].nonzero()[:, 0]
            if len(unfinished) == 0 or t + 1 == sampling.max_new_tokens:
                break
            if len(unfinished) < 0.875 * len(rows):  # moving the caches together must pay
                suffixes.keep(unfinished, t)
                rows, keys, token = rows[unfinished], keys[unfinished], token[unfinished]

            def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, position: int = t) -> Tensor:
                return suffixes.decode(layer, q, k, v, position)

            every = torch.arange(len(rows), device=device)
            logits = self.model.logits(self.model(token, starts[rows] + t, attention, every, self.dtype))
        return Rollouts.from_padded(tokens, logprobs, response_lengths, truncated)


def _sample(log_p: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF sampling: the first token whose cumulative probability exceeds u; log_p [A, V], u [A] in [0, 1) -> [A]."""
    cdf = log_p.exp().cumsum(-1)
    return torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True)[:, 0].clamp_max(log_p.shape[-1] - 1)
