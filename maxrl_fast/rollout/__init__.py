"""Rollout engines: prompts in, sampled responses with their log-probs out."""

from dataclasses import dataclass, replace

import torch

from maxrl_fast.errors import NonFiniteError
from maxrl_fast.options import Config
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.tasks import Task


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Temperature, 0 for the likeliest token; at most max_new_tokens tokens a response, ending with the first of stop_ids.
    """

    temperature: float
    max_new_tokens: int
    stop_ids: tuple[int, ...]

    @classmethod
    def of(cls, config: Config, task: Task) -> "Sampling":
        """That of a resolved configuration."""
        assert config.rollout.max_new_tokens is not None
        return cls(config.rollout.temperature, config.rollout.max_new_tokens, task.stop_ids)

    @property
    def greedy(self) -> "Sampling":
        """The same at temperature 0."""
        return replace(self, temperature=0.0)


def check_finite(rollouts: Rollouts, prompts: Prompts, step: int) -> None:
    """Raise NonFiniteError naming the first prompt whose sampled log-probs are not finite."""
    broken = (~rollouts.logprobs.isfinite()).nonzero()
    if len(broken):
        sequence = int(torch.searchsorted(rollouts.cu_seqlens, broken[0], right=True)) - 1
        prompt = int(prompts.ids[sequence // (len(rollouts.lengths) // len(prompts))])
        raise NonFiniteError(f"step {step}: the log-probs sampled for prompt {prompt} are not finite")
