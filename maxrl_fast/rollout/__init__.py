"""Rollout engines: prompts in, sampled responses with their log-probs out."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from maxrl_fast.errors import InputError, NonFiniteError
from maxrl_fast.model.decoder import Decoder, DecoderConfig
from maxrl_fast.records import Prompts, Rollouts


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Temperature, 0 for the likeliest token; then, of what the temperature makes, the `top_k` likeliest tokens (0: all), of
    these the fewest likeliest that have at least `top_p` of the probability, and of these those with at least `min_p` of the
    likeliest one's. At most max_new_tokens tokens a response, ending with the first of stop_ids.
    """

    temperature: float
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def greedy(self) -> "Sampling":
        """The same at temperature 0."""
        return replace(self, temperature=0.0)

    @property
    def leaves_out(self) -> bool:
        """Whether some tokens may get no probability."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True)
class RolloutStatistics:
    """What one call of `generate` did."""

    prefill_seconds: float  # the prompts, and the first token of each response
    decode_seconds: float
    decode_steps: int  # model passes after the prompts'
    prompt_tokens: int
    response_tokens: int
    cache_bytes: int  # of keys and values at the most; 0 where the engine does not say


class Engine(Protocol):
    """What the trainer asks of a rollout engine."""

    statistics: RolloutStatistics  # of the last call of generate

    def describe(self) -> str:
        """What runs, for the report at the start of a run."""

    def load_weights(self, model: Decoder) -> None:
        """Take over the policy's weights."""

    def sleep(self) -> None:
        """Give memory back until the next call, where the engine can."""

    def generate(self, prompts: Prompts, num_samples: int, sampling: Sampling, *, seed: int, step: int) -> Rollouts:
        """`num_samples` responses to each prompt.

        Log-probs are those of the distribution sampled from, 0 at temperature 0.

        Raises:
            InputError: where the request cannot be met, with a sentence.
        """


def check_request(prompts: Prompts, num_samples: int, sampling: Sampling, model: DecoderConfig) -> None:
    """Refuse what no engine can do.

    Raises:
        InputError: on empty prompts, unknown tokens, prompts too long for the model's context, or options out of range.
    """
    lengths = prompts.lengths
    if num_samples < 1 or len(prompts) < 1:
        raise InputError(f"rollout needs at least one prompt and one sample, got {len(prompts)} and {num_samples}")
    if sampling.max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be at least 1, got {sampling.max_new_tokens}")
    if int(lengths.min()) < 1:
        raise InputError(f"prompts must have at least one token, got prompt {int(prompts.ids[lengths.argmin()])} with none")
    lowest, highest = int(prompts.tokens.min()), int(prompts.tokens.max())
    if lowest < 0 or highest >= model.vocab_size:
        raise InputError(
            f"prompt tokens must be in the vocabulary, 0 to {model.vocab_size - 1}, got {lowest if lowest < 0 else highest}"
        )
    longest = int(lengths.max())
    if longest + sampling.max_new_tokens > model.max_position_embeddings:
        raise InputError(
            f"a prompt and its response must fit the model's context of {model.max_position_embeddings} tokens, got prompt "
            f"{int(prompts.ids[lengths.argmax()])} of {longest} and max_new_tokens {sampling.max_new_tokens}"
        )
    for stop in sampling.stop_ids:
        if not 0 <= stop < model.vocab_size:
            raise InputError(f"stop ids must be in the vocabulary, 0 to {model.vocab_size - 1}, got {stop}")
    if not (
        0 <= sampling.temperature < float("inf")
        and sampling.top_k >= 0
        and 0 < sampling.top_p <= 1
        and 0 <= sampling.min_p <= 1
    ):
        raise InputError(
            f"sampling needs a finite temperature >= 0, top_k >= 0, 0 < top_p <= 1 and 0 <= min_p <= 1, got "
            f"{sampling.temperature}, {sampling.top_k}, {sampling.top_p} and {sampling.min_p}"
        )


def check_rewards(rewards: Tensor, prompts: Prompts, step: int) -> None:
    """Raise NonFiniteError naming the first prompt with a reward [G, N] that is not finite."""
    broken = (~rewards.isfinite()).nonzero()
    if len(broken):
        group, rollout = broken[0].tolist()
        reward = float(rewards[group, rollout])
        raise NonFiniteError(f"step {step}: the reward of rollout {rollout} of prompt {int(prompts.ids[group])} is {reward}")


def check_finite(rollouts: Rollouts, prompts: Prompts, step: int) -> None:
    """Raise NonFiniteError naming the first prompt whose sampled log-probs are not finite."""
    broken = (~rollouts.logprobs.isfinite()).nonzero()
    if len(broken):
        sequence = int(torch.searchsorted(rollouts.cu_seqlens, broken[0], right=True)) - 1
        prompt = int(prompts.ids[sequence // (len(rollouts.lengths) // len(prompts))])
        raise NonFiniteError(f"step {step}: the log-probs sampled for prompt {prompt} are not finite")
