"""Responses of an evaluation in training that are kept to be looked at: the lines of samples.jsonl."""

from typing import Any

import torch
from torch import Tensor

from maxrl_fast.evaluation.evaluator import sample_records
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.tasks import Task

MOST_OF_A_PROMPT = 4


class KeptSamples:
    """The first responses, at most 4 to a prompt.

    Args:
        count: how many.
        step: of training.
    """

    def __init__(self, task: Task, count: int, step: int):
        self._task, self._count, self._step = task, count, step
        self.records: list[dict[str, Any]] = []

    def take(self, prompts: Prompts, rollouts: Rollouts, rewards: Tensor) -> None:
        """Keep of these what is still to be kept."""
        num_rollouts = len(rollouts.lengths) // len(prompts)
        per_prompt = min(num_rollouts, MOST_OF_A_PROMPT)
        num_wanted = -(-(self._count - len(self.records)) // per_prompt)  # prompts
        if num_wanted <= 0:
            return
        prompts = prompts.take(0, min(num_wanted, len(prompts)))
        firsts = torch.arange(len(prompts), device=rewards.device)[:, None] * num_rollouts
        chosen = (firsts + torch.arange(per_prompt, device=rewards.device)).flatten()
        records = sample_records(self._task, prompts, rollouts.select(chosen), rewards[chosen])
        self.records += [{"step": self._step, **record} for record in records]
        del self.records[self._count :]
