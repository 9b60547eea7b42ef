"""Evaluation on held-out prompts: unbiased pass@k."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.evaluation.coverage import pass_at_k, powers_of_two
from maxrl_fast.records import Prompts, Samples
from maxrl_fast.rewards.scoring import Scorer
from maxrl_fast.rollout import Engine, Sampling
from maxrl_fast.rollout.scored import sample_and_score
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Evaluation:
    pass_at_k: dict[int, float]  # by k, mean over prompts
    response_length_mean: float  # tokens
    truncated: float  # fraction of responses cut off at the length limit
    num_tokens: int  # number of sampled tokens
    num_prompts: int
    reward_errors: float = 0.0  # fraction of responses whose reward failed, which count as wrong

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> "Evaluation":
        return cls(**{**fields, "pass_at_k": {int(k): p for k, p in fields["pass_at_k"].items()}})


def is_correct(rewards: Tensor) -> Tensor:
    """Return which responses are correct; one whose reward failed (NaN) is not."""
    return rewards > 0.5


@dataclass(frozen=True)
class Evaluator:
    """Samples responses to the first prompts of a split, and estimates pass@k from them.

    The ranks divide the prompts. The random numbers depend only on the seed, the prompt and the
    sample, so two policies are evaluated with the same random numbers. A rank samples `chunk`
    prompts at a time. If it `shares_engine`, a rank without prompts takes part in sampling for the
    others.
    """

    engine: Engine
    task: Task
    scorer: Scorer
    sampling: Sampling
    num_prompts: int
    num_samples: int
    seed: int = 0
    device: torch.device = CPU
    split: str = "test"
    chunk: int = 32
    ranks: Ranks = field(default_factory=Ranks)
    shares_engine: bool = False

    def evaluate(
        self,
        progress: Callable[[int], None] = lambda done: None,
        keep: Callable[[Samples, Tensor, Sequence[dict[str, float]]], None] | None = None,
    ) -> Evaluation:
        """Return pass@k for k = 1, 2, 4, ... up to `num_samples`.

        `progress` is called with the number of prompts done, and may raise. `keep` is called with
        every chunk of this rank's samples, their rewards [S], NaN where scoring failed, and the
        components [S].
        """
        ranks, num_samples = self.ranks, self.num_samples
        correct, lengths, truncated, failed = [], [], [], []
        for start in range(0, self.num_prompts, self.chunk * ranks.size):
            count = min(self.chunk * ranks.size, self.num_prompts - start)
            own_start, own_count = ranks.part(count)
            prompts = Prompts.none(self.device)
            if own_count:
                prompts = self.task.prompts(self.split, start + own_start, own_count).to(
                    self.device
                )
            if own_count or self.shares_engine:
                sampled = sample_and_score(
                    self.engine,
                    self.task,
                    self.scorer,
                    prompts,
                    num_samples,
                    self.sampling,
                    seed=self.seed,
                    step=0,
                )
                rewards, rollouts = sampled.rewards, sampled.rollouts
                if own_count and keep:
                    keep(sampled, rewards, sampled.components)
                correct.append(is_correct(rewards).view(-1, num_samples).sum(1))
                failed.append(rewards.isnan())
                lengths.append(rollouts.lengths)
                truncated.append(rollouts.truncated)
            progress(start + count)
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        num_correct, num_tokens, num_truncated, num_failed = (
            ranks.concatenate(torch.cat([none, *(x.long() for x in parts)]))
            for parts in (correct, lengths, truncated, failed)
        )
        return Evaluation(
            pass_at_k={
                k: float(pass_at_k(num_samples, num_correct, k).mean())
                for k in powers_of_two(num_samples)
            },
            response_length_mean=float(num_tokens.double().mean()),
            truncated=float(num_truncated.double().mean()),
            num_tokens=int(num_tokens.sum()),
            num_prompts=self.num_prompts,
            reward_errors=float(num_failed.double().mean()),
        )
