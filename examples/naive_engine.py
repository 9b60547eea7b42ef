"""A rollout engine of your own: without a cache, every token is a forward pass over its whole
sequence.

The guide docs/adding_an_engine.md explains it.

    python -m maxrl_fast.train --rollout examples/naive_engine.py:NaiveEngine
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from maxrl_fast.errors import InputError
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.records import Rollouts
from maxrl_fast.rollout import RolloutRequest, Sampling, uniforms
from maxrl_fast.rollout.decode_slots import sample


class NaiveEngine:
    """Samples with a copy of the policy. Prompts and their samples are in the tensors of one prompt
    at a time.

    Raises:
        InputError: if the policy is not the native decoder.
    """

    def __init__(self, model: PolicyModel, dtype: torch.dtype):
        if not isinstance(model, Decoder):
            raise InputError(
                f"NaiveEngine samples from the native decoder, got a policy of {model.backend}"
            )
        self.model, self.dtype = Decoder.empty(model.config, model.lm_head.weight.device), dtype

    def describe(self) -> str:
        """Describe the engine in a few words, for the report at the start of a run."""
        return "naive (no cache)"

    @torch.no_grad()
    def load_weights(self, model: PolicyModel) -> None:
        """Copy the policy's weights, by their names in checkpoints: adapters are merged, sharded
        weights gathered.
        """
        own = dict(self.model.weights())
        for name, weight in model.weights():
            own[name].copy_(weight)

    def sleep(self) -> None:
        """Do nothing: there is no cache to free."""

    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Rollouts:
        """Sample the request's responses."""
        if request.environments is not None:
            raise InputError("NaiveEngine samples no episodes: use --rollout native")
        request.check(self.model.config)
        prompts = request.prompts
        # The numbers of a sample depend on nothing but its own place, so a resumed run draws the
        # same ones.
        keys = request.keys().split(request.num_samples)
        parts = [
            self._respond(prompt, own, request.sampling)
            for prompt, own in zip(
                prompts.tokens.split(prompts.lengths.tolist()), keys, strict=True
            )
        ]
        return Rollouts.concatenate(parts)

    def _respond(self, prompt: Tensor, keys: Tensor, sampling: Sampling) -> Rollouts:
        """Return a response to a prompt [P] for each of N keys."""
        stops = torch.tensor(sampling.stop_ids, dtype=torch.int64, device=prompt.device)
        tokens = prompt.repeat(len(keys), 1)  # [N, P + responses so far]
        logprobs: list[Tensor] = []
        lengths = torch.full_like(keys, sampling.max_new_tokens)  # [N]
        has_ended = torch.zeros_like(keys, dtype=torch.bool)  # [N], by a stop token
        for position in range(sampling.max_new_tokens):
            # [N, 1]
            token, logprob = sample(
                self._logits(tokens), uniforms(keys, position)[:, None], sampling
            )
            tokens = torch.cat([tokens, token], 1)
            logprobs.append(logprob)
            stops_now = ~has_ended & torch.isin(token[:, 0], stops)
            lengths[stops_now] = position + 1
            has_ended |= stops_now
            if bool(has_ended.all()):
                break
        lengths = lengths.clamp_max(len(logprobs))
        return Rollouts.from_padded(
            tokens[:, len(prompt) :], torch.cat(logprobs, 1), lengths, ~has_ended
        )

    def _logits(self, tokens: Tensor) -> Tensor:
        """Return the logits [N, V] of the token after each sequence [N, L]."""
        count, length = tokens.shape

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [N * L, heads, D]
            q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1)

        positions = torch.arange(length, device=tokens.device).repeat(count)
        last = torch.arange(1, count + 1, device=tokens.device) * length - 1
        hidden = self.model(tokens.flatten(), positions, attention, last, self.dtype)
        logits: Tensor = self.model.logits(hidden.float())
        return logits
