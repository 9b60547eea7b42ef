"""Samples of an evaluation as records of samples.jsonl, and the few that an evaluation during training keeps."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.records import Samples
from maxrl_fast.tasks import Task

MOST_SAMPLES, MOST_OF_A_PROMPT = 32, 4  # kept by an evaluation during training
MOST_PROMPTS, PROMPT_LENGTH = 512, 2_000  # held-out prompts kept as text, and their characters


def sample_records(task: Task, samples: Samples, rewards: Tensor) -> Iterator[dict[str, Any]]:
    """Yield a JSON object for each response, in the order of the rollouts; a reward [S] of NaN becomes null.

    The texts show special tokens, so that a wrong chat template and stray control tokens can be seen.
    """
    prompts, rollouts = samples.prompts, samples.rollouts
    texts = [task.decode(tokens.tolist(), with_special=True) for tokens in prompts.tokens.cpu().split(prompts.lengths.tolist())]
    responses, lengths = rollouts.tokens.cpu().split(rollouts.lengths.tolist()), rollouts.lengths.tolist()
    outcomes = zip(responses, lengths, rewards.tolist(), rollouts.truncated.tolist(), strict=True)
    for s, (tokens, length, reward, is_truncated) in enumerate(outcomes):
        yield {
            "id": int(prompts.ids[s // samples.num_rollouts]),
            "prompt": texts[s // samples.num_rollouts],
            "response": task.decode(tokens.tolist(), with_special=True),
            "reward": reward if math.isfinite(reward) else None,  # JSON has no NaN
            "truncated": is_truncated,
            "tokens": length,
        }


def prompt_records(task: Task, split: str, num_prompts: int) -> Iterator[dict[str, Any]]:
    """Yield a JSON object with id and text for each of the first 512 prompts of a split, for eval_prompts.jsonl."""
    prompts = task.prompts(split, 0, min(num_prompts, MOST_PROMPTS))
    for i, tokens in zip(prompts.ids.tolist(), prompts.tokens.cpu().split(prompts.lengths.tolist()), strict=True):
        yield {"id": i, "prompt": task.decode(tokens.tolist(), with_special=True)[:PROMPT_LENGTH]}


class KeptSamples:
    """Keeps the first 32 responses of an evaluation, at most 4 per prompt.

    Args:
        step: the training step.
    """

    def __init__(self, task: Task, step: int):
        self._task, self._step = task, step
        self.records: list[dict[str, Any]] = []

    def take(self, samples: Samples, rewards: Tensor) -> None:
        """Keep samples until there are 32."""
        prompts, num_rollouts = samples.prompts, samples.num_rollouts
        per_prompt = min(num_rollouts, MOST_OF_A_PROMPT)
        num_wanted = -(-(MOST_SAMPLES - len(self.records)) // per_prompt)  # number of prompts
        if num_wanted <= 0:
            return
        prompts = prompts.take(0, min(num_wanted, len(prompts)))
        firsts = torch.arange(len(prompts), device=rewards.device)[:, None] * num_rollouts
        chosen = (firsts + torch.arange(per_prompt, device=rewards.device)).flatten()
        kept = Samples(prompts, samples.rollouts.select(chosen))
        self.records += [{"step": self._step, **record} for record in sample_records(self._task, kept, rewards[chosen])]
        del self.records[MOST_SAMPLES:]
