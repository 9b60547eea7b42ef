"""Evaluation on held-out prompts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.evaluation import MAX, PASS
from maxrl_fast.evaluation.coverage import max_at_k, powers_of_two
from maxrl_fast.records import Prompts, Samples
from maxrl_fast.rollout import Engine, RolloutRequest, Sampling, sample_and_score
from maxrl_fast.runtime.background import Progress, no_progress
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.scorer import Scorer

CPU = torch.device("cpu")
MOST_PROMPTS = 4096  # in a record of pass_rates.jsonl

Keep = Callable[[Samples, Tensor, Sequence[dict[str, float]]], None]


def is_correct(rewards: Tensor) -> Tensor:
    """One whose reward failed (NaN) is not."""
    return rewards > 0.5


def mean_max_at_k(values: Tensor) -> dict[int, float]:
    return {k: float(max_at_k(values, k).mean()) for k in powers_of_two(values.shape[1])}


@dataclass(frozen=True)
class Evaluation:
    """Of all ranks: P prompts in their order, n samples of each."""

    ids: Tensor  # [P] int64
    rewards: Tensor  # [P, n] float32 on the host, NaN where scoring failed
    num_tokens: int  # sampled
    num_truncated: int  # responses cut off at the length limit

    @cached_property
    def num_correct(self) -> Tensor:  # [P] int64
        return is_correct(self.rewards).sum(1)

    @cached_property
    def values(self) -> Tensor:
        """The rewards [P, n]; a failed one is the lowest, or 0."""
        lowest = self.rewards.nan_to_num().min().clamp_max(0)
        return torch.where(self.rewards.isnan(), lowest, self.rewards)

    @property
    def pass_at_k(self) -> dict[int, float]:
        """The mean of pass@k over prompts, for k = 1, 2, 4, ... up to n."""
        return mean_max_at_k(is_correct(self.rewards))

    def first(self, count: int) -> "Evaluation":
        return replace(self, ids=self.ids[:count], rewards=self.rewards[:count])

    def record(self) -> dict[str, Any]:
        return {
            PASS: {str(k): x for k, x in self.pass_at_k.items()},
            MAX: {str(k): x for k, x in mean_max_at_k(self.values).items()},
            "response_length_mean": self.num_tokens / self.rewards.numel(),
            "truncated": self.num_truncated / self.rewards.numel(),
            "num_tokens": self.num_tokens,
            "num_prompts": len(self.rewards),
            "reward_errors": float(self.rewards.isnan().double().mean()),
        }

    @classmethod
    def joined(cls, sets: Iterable["Evaluation"]) -> "Evaluation":
        ids, rewards = zip(*((x.ids, x.rewards) for x in sets), strict=True)
        fewest = min(x.shape[1] for x in rewards)
        return cls(torch.cat(ids), torch.cat([x[:, :fewest] for x in rewards]), 0, 0)

    def pass_counts(self) -> dict[str, Any]:
        """Return the correct samples, or the mean and maximum reward if any is neither 0 nor 1, by
        ascending prompt id, for pass_rates.jsonl."""
        order = self.ids.argsort(stable=True)[:MOST_PROMPTS]
        counts = {"num_correct": self.num_correct}
        if not torch.equal(is_correct(self.rewards).float(), self.values):
            mean, largest = self.values.double().mean(1), self.values.amax(1)
            counts = {"reward_mean": mean, "reward_max": largest}
        return {
            "num_samples": self.rewards.shape[1],
            "num_prompts": len(self.ids),
            **{name: x[order].tolist() for name, x in {"ids": self.ids, **counts}.items()},
        }


def over_sets(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the numbers of a held-out set; of several, means or sums, and each as SET/NUMBER."""
    joined = {**next(iter(records.values()))}
    if len(records) == 1:
        return joined
    for name, value in joined.items():
        own = [record[name] for record in records.values() if name in record]
        if isinstance(value, dict):
            joined[name] = {k: fmean(x[k] for x in own) for k in value if all(k in x for x in own)}
        else:
            joined[name] = sum(own) if name.startswith("num_") else fmean(own)
    return joined | {f"{x}/{name}": value for x in records for name, value in records[x].items()}


@dataclass(frozen=True)
class Evaluator:
    """Samples responses to the first prompts of a split, and scores them. The ranks divide the
    prompts, and each samples `chunk` prompts at a time; with an engine that it shares also without
    own prompts, for the others."""

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
    beat: Progress = no_progress  # called while it samples and scores

    def evaluate(
        self, progress: Callable[[int], None] = lambda done: None, keep: Keep | None = None
    ) -> Evaluation:
        """Evaluate the engine's policy; all ranks must call this. `progress` gets the number of
        prompts done and may raise; `keep` each chunk of this rank's samples, their rewards [S], NaN
        where scoring failed, and components [S]."""
        ranks, none = self.ranks, torch.zeros(0, dtype=torch.int64, device=self.device)
        places, ids, rewards = [none], [none], [none.float()]  # of this rank
        counts = torch.zeros(1, 2, dtype=torch.int64, device=self.device)  # tokens and truncated
        for start in range(0, self.num_prompts, self.chunk * ranks.size):
            count = min(self.chunk * ranks.size, self.num_prompts - start)
            first, own = ranks.part(count)
            first += start
            prompts = self.task.prompts(self.split, first, own) if own else Prompts.none(CPU)
            asked = prompts.to(self.device), self.num_samples, self.sampling, self.seed
            request = RolloutRequest(*asked, beat=self.beat)
            sampled = sample_and_score(self.engine, self.task, self.scorer, request)
            if own and keep:
                keep(sampled, sampled.rewards, sampled.components)
            places.append(torch.arange(first, first + own, device=self.device))
            ids.append(prompts.ids)
            rewards.append(sampled.rewards)
            counts[0, 0] += len(sampled.rollouts.tokens)
            counts[0, 1] += sampled.rollouts.truncated.sum()
            progress(start + count)
        order = ranks.concatenate(torch.cat(places)).argsort().cpu()
        whole = ranks.concatenate(torch.cat(rewards)).view(-1, self.num_samples).cpu()
        num_tokens, num_truncated = ranks.concatenate(counts).sum(0).tolist()
        own_ids = ranks.concatenate(torch.cat(ids)).cpu()[order]
        return Evaluation(own_ids, whole[order], num_tokens, num_truncated)
