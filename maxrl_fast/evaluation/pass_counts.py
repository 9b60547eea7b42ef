"""Counts the correct samples of each prompt in an evaluation, for pass_rates.jsonl."""

from typing import Any

import torch
from torch import Tensor

from maxrl_fast.evaluation.evaluator import is_correct
from maxrl_fast.records import Samples
from maxrl_fast.runtime.ranks import Ranks

MOST_PROMPTS = 4096  # in a record, about 50 kB


class PassCounts:
    """Counts the correct samples of each prompt that this rank evaluates, `num_samples` of each."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._counts: list[Tensor] = []  # each [2, G] int64: ids and numbers of correct samples

    def take(self, samples: Samples, rewards: Tensor) -> None:
        """Count a chunk of samples with rewards [S]; a failed reward (NaN) is not correct."""
        num_correct = is_correct(rewards).view(-1, self._num_samples).sum(1)
        self._counts.append(torch.stack([samples.prompts.ids.to(rewards.device), num_correct]))

    def record(self, ranks: Ranks, device: torch.device) -> dict[str, Any]:
        """Return all ranks' counts by ascending id, of 4,096 prompts; all ranks must call this."""
        none = torch.zeros(2, 0, dtype=torch.int64, device=device)
        ids, num_correct = (
            ranks.concatenate(x.contiguous()) for x in torch.cat([none, *self._counts], 1)
        )
        ids, order = ids.sort(stable=True)
        kept = order[:MOST_PROMPTS]
        return {
            "num_samples": self._num_samples,
            "num_prompts": len(ids),
            "ids": ids[:MOST_PROMPTS].tolist(),
            "num_correct": num_correct[kept].tolist(),
        }
