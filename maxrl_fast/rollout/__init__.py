"""Rollout engines: they take prompts and return sampled responses with their log-probs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from maxrl_fast.errors import InputError, NonFiniteError
from maxrl_fast.model.policy_model import PolicyModel, PolicySizes
from maxrl_fast.records import Prompts, Rollouts, cumulative, ranges, unpack
from maxrl_fast.rollout.random import sample_keys
from maxrl_fast.runtime.background import Progress, no_progress
from maxrl_fast.runtime.device import memory_bytes
from maxrl_fast.tasks import Environments

ENGINES = ("native", "vllm")  # the names that --rollout takes
MAX_BATCH = {"cpu": 1024, "cuda": 16384}  # samples decoded at a time; larger batches are no faster


def default_cache_bytes(device: torch.device) -> int:
    return memory_bytes(device) // (4 if device.type == "cuda" else 8)


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled; the filters apply after the temperature, in this order."""

    temperature: float  # 0: greedy decoding
    max_new_tokens: int  # of one response, with what environments insert
    stop_ids: tuple[int, ...]  # a response, or a turn of an episode, ends with the first of these
    top_k: int = 0  # keep the k most probable tokens; 0: all
    top_p: float = 1.0  # nucleus sampling
    # keep tokens with at least min_p times the probability of the most probable one
    min_p: float = 0.0
    max_turns: int = 1  # of an episode, with environments
    # gives the length at which a response ends before its last token, as at a stop text, or None
    end_of: Callable[[list[int]], int | None] | None = None

    @property
    def greedy(self) -> "Sampling":
        return replace(self, temperature=0.0)

    @property
    def filters_tokens(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def cut(rollouts: Rollouts, sampling: Sampling) -> Rollouts:
    """End responses where `sampling.end_of`, which no engine knows, ends them: later tokens count
    as never sampled, and a response that ends is not truncated."""
    if sampling.end_of is None:
        return rollouts
    ends = [*map(sampling.end_of, unpack(rollouts.tokens, rollouts.lengths))]
    is_cut = torch.tensor([end is not None for end in ends], device=rollouts.tokens.device)
    given = torch.tensor([end or 0 for end in ends], device=rollouts.tokens.device)
    lengths = torch.where(is_cut, given, rollouts.lengths)
    kept = ranges(rollouts.cu_seqlens[:-1], lengths)
    return replace(
        rollouts,
        tokens=rollouts.tokens[kept],
        logprobs=rollouts.logprobs[kept],
        cu_seqlens=cumulative(lengths),
        truncated=rollouts.truncated & ~is_cut,
    )


@dataclass(frozen=True)
class RolloutRequest:
    """The responses, or with `environments` the episodes, that an engine is asked for. The random
    numbers of a sample depend only on the seed, the step, its prompt's id, its number and the
    position of a token."""

    prompts: Prompts  # G
    num_samples: int  # N, of each prompt
    sampling: Sampling
    seed: int = 0
    step: int = 0
    environments: Environments | None = None  # of the S = G N samples; None: a response is one turn
    beat: Progress = no_progress  # called while samples are made, for --stall-limit
    first_sample: int = 0  # number of the first one of each prompt: others were made before
    # further samples may be asked for: the C++ decoder keeps the prompts' keys and values
    keeps_prompts: bool = False

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.num_samples

    def keys(self) -> Tensor:
        """Return the keys of random.uniforms, int64 [S]."""
        ids = self.prompts.ids
        samples = torch.arange(self.num_samples, device=ids.device) + self.first_sample
        of_samples = ids.repeat_interleave(self.num_samples), samples.repeat(len(ids))
        return sample_keys(self.seed, self.step, *of_samples)

    def name_of(self, sample: int) -> str:
        group, number = divmod(sample, self.num_samples)
        return f"sample {self.first_sample + number} of prompt {int(self.prompts.ids[group])}"

    def check(self, model: PolicySizes) -> None:
        """Raise InputError for what no engine can serve with a policy of these sizes."""
        prompts, sampling, lengths = self.prompts, self.sampling, self.prompts.lengths
        counts = len(prompts), self.num_samples, sampling.max_new_tokens, sampling.max_turns
        names = "number of prompts", "num_samples", "max_new_tokens", "max_turns"
        for name, count in zip(names, counts, strict=True):
            if count < 1:
                raise InputError(f"{name} must be at least 1, got {count}")
        if int(lengths.min()) < 1:
            empty = int(prompts.ids[lengths.argmin()])
            raise InputError(f"prompts must have at least one token, got prompt {empty} with none")
        ends = int(prompts.tokens.min()), int(prompts.tokens.max())
        for what, tokens in (("prompt tokens", ends), ("stop ids", sampling.stop_ids)):
            for token in tokens:
                if not 0 <= token < model.vocab_size:
                    wanted = f"must be in the vocabulary, 0 to {model.vocab_size - 1}"
                    raise InputError(f"{what} {wanted}, got {token}")
        longest = int(lengths.max())
        if longest + sampling.max_new_tokens > model.max_position_embeddings:
            raise InputError(
                "a prompt and its response must fit the model's context of "
                f"{model.max_position_embeddings} tokens, got prompt "
                f"{int(prompts.ids[lengths.argmax()])} of {longest} tokens and max_new_tokens "
                f"{sampling.max_new_tokens}"
            )
        tau, top_k = sampling.temperature, sampling.top_k
        top_p, min_p = sampling.top_p, sampling.min_p
        if not (0 <= tau < math.inf and top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1):
            raise InputError(
                "sampling needs a finite temperature >= 0, top_k >= 0, 0 < top_p <= 1 and "
                f"0 <= min_p <= 1, got {tau}, {top_k}, {top_p} and {min_p}"
            )


@dataclass(frozen=True)
class RolloutStatistics:
    """Of the native engine's last call of `generate`, for benchmarks."""

    prefill_seconds: float = 0.0  # for the prompts and the first token of each response
    decode_seconds: float = 0.0
    decode_steps: int = 0  # forward passes after the prefill
    cache_bytes: int = 0  # peak size of the KV cache, on a GPU with the tensors of a step
    # rows of these forward passes; the C++ decoder has one row for samples with the same tokens so
    # far; 0 from the PyTorch decoder
    decoded_rows: int = 0


class Engine(Protocol):
    def describe(self) -> str:
        """Describe the engine in a few words, for the start of a run."""

    def load_weights(self, model: PolicyModel) -> None:
        """Copy the policy's weights into the engine."""

    def sleep(self) -> None:
        """Free memory, if the engine can; `load_weights` must follow before `generate`."""

    def generate(self, request: RolloutRequest) -> Rollouts:
        """Sample the responses, or episodes where the request has environments.

        In an episode a stop token ends a turn, which is submitted. The episode ends with turn
        max_turns, with a reply that is the last, or truncated: by the length limit, also where a
        reply leaves no room for another sampled token. Log-probs are as in `Rollouts`; 0 at
        temperature 0. Those that the engine cannot know are NaN, and training refuses them."""


class NativeEngine(Engine):
    """What our own engines share: a copy of the policy in the compute dtype. cache_bytes: limit of
    the KV cache, in PyTorch with a step's tensors; samples beyond it wait. max_batch: samples
    decoded at a time."""

    def __init__(
        self,
        model: PolicyModel,
        dtype: torch.dtype,
        cache_bytes: int | None = None,
        max_batch: int | None = None,
    ):
        self.config, self.dtype = model.config, dtype
        self.device = device = model.lm_head.weight.device
        self.cache_bytes = default_cache_bytes(device) if cache_bytes is None else cache_bytes
        self.max_batch = MAX_BATCH[device.type] if max_batch is None else max_batch
        self.statistics = RolloutStatistics()

    def sequence_bytes(self, prompt_length: int, max_new_tokens: int) -> tuple[int, int]:
        """Of a prompt and of a response in the KV cache."""
        raise NotImplementedError

    def serve(self, request: RolloutRequest, prompt: int, own: int) -> Rollouts:
        """Serve a checked request, whose longest prompt and response have so many bytes."""
        raise NotImplementedError

    def check_fits(self, prompt_length: int, max_new_tokens: int) -> tuple[int, int]:
        """Raise InputError if `sequence_bytes` exceed the cache."""
        prompt, own = self.sequence_bytes(prompt_length, max_new_tokens)
        if prompt + own > self.cache_bytes:
            raise InputError(
                "kv_cache_gb must hold the longest prompt and a response, "
                f"{(prompt + own) / 1e9:.3g} GB at {prompt_length} and {max_new_tokens} tokens, "
                f"got {self.cache_bytes / 1e9:.3g}"
            )
        return prompt, own

    def generate(self, request: RolloutRequest) -> Rollouts:
        request.check(self.config)
        longest = int(request.prompts.lengths.max())
        return self.serve(request, *self.check_fits(longest, request.sampling.max_new_tokens))


def check_rewards(rewards: Tensor, prompts: Prompts, step: int) -> None:
    """Raise NonFiniteError naming the first prompt with a wrong reward [G, N]."""
    for group, rollout in (~rewards.isfinite()).nonzero()[:1].tolist():
        whose = f"rollout {rollout} of prompt {int(prompts.ids[group])}"
        reward = float(rewards[group, rollout])
        raise NonFiniteError(f"step {step}: the reward of {whose} is {reward}")


def check_finite(rollouts: Rollouts, prompts: Prompts, step: int) -> None:
    """Raise NonFiniteError naming the first prompt whose sampled log-probs are not finite."""
    for token in (~rollouts.logprobs.isfinite()).nonzero()[:1]:
        sequence = int(torch.searchsorted(rollouts.cu_seqlens, token, right=True)) - 1
        prompt = int(prompts.ids[sequence // (len(rollouts) // len(prompts))])
        raise NonFiniteError(
            f"step {step}: the log-probs sampled for prompt {prompt} are not finite"
        )
