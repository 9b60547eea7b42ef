"""Evaluation on held-out prompts: unbiased pass@k."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.parallel import Ranks
from maxrl_fast.rewards.scoring import Scorer
from maxrl_fast.rollout import Engine, Sampling
from maxrl_fast.tasks import Task


def pass_at_k(num_samples: int, num_correct: Tensor, k: int) -> Tensor:
    """Unbiased estimate 1 - C(n-c, k) / C(n, k) from c correct of n samples (Chen et al. 2021, eq. 1).

    Shapes: num_correct int [...] -> float64 [...]. A product of ratios in [0, 1], which neither over- nor underflows badly.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@k of {num_samples} samples needs 1 <= k <= {num_samples}, got {k}")
    wrong = (num_samples - num_correct).double()[..., None]
    i = torch.arange(k, dtype=torch.float64, device=num_correct.device)
    return 1 - ((wrong - i) / (num_samples - i)).clamp_min(0).prod(-1)


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, ... up to `largest`."""
    return [2**i for i in range(largest.bit_length())]


@dataclass(frozen=True)
class Evaluation:
    pass_at_k: dict[int, float]  # by k, mean over prompts
    response_length_mean: float  # tokens
    truncated: float  # fraction of responses stopped by the length limit
    num_tokens: int  # sampled
    reward_errors: float = 0.0  # fraction of responses whose reward failed, which count as wrong

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> "Evaluation":
        """From its fields after JSON, whose keys are text."""
        return cls(**{**fields, "pass_at_k": {int(k): p for k, p in fields["pass_at_k"].items()}})


def evaluate(
    engine: Engine,
    task: Task,
    scorer: Scorer,
    num_prompts: int,
    num_samples: int,
    sampling: Sampling,
    *,
    seed: int,
    device: torch.device,
    ks: Iterable[int] | None = None,
    progress: Callable[[int], None] = lambda done: None,
    ranks: Ranks | None = None,
) -> Evaluation:
    """pass@k over the first `num_prompts` test prompts, `num_samples` responses to each.

    The ranks divide the prompts. The random numbers depend on the seed, the prompt and the sample alone, so that two
    policies meet the same luck.
    `progress` is called with the number of prompts done, and may raise.
    """
    ranks = ranks or Ranks()
    chunk = 32 * ranks.size
    correct, lengths, truncated, failed = [], [], [], []
    for start in range(0, num_prompts, chunk):
        count = min(chunk, num_prompts - start)
        own_start, own_count = ranks.part(count)
        if own_count:
            prompts = task.prompts("test", start + own_start, own_count).to(device)
            rollouts = engine.generate(prompts, num_samples, sampling, seed=seed, step=0)
            rewards = scorer.score(prompts, rollouts)
            correct.append(rewards.view(-1, num_samples).gt(0.5).sum(1))
            failed.append(rewards.isnan())
            lengths.append(rollouts.lengths)
            truncated.append(rollouts.truncated)
        progress(start + count)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    num_correct, num_tokens, num_truncated, num_failed = (
        ranks.concatenate(torch.cat([none, *(x.long() for x in parts)])) for parts in (correct, lengths, truncated, failed)
    )
    return Evaluation(
        pass_at_k={k: float(pass_at_k(num_samples, num_correct, k).mean()) for k in (ks or powers_of_two(num_samples))},
        response_length_mean=float(num_tokens.double().mean()),
        truncated=float(num_truncated.double().mean()),
        num_tokens=int(num_tokens.sum()),
        reward_errors=float(num_failed.double().mean()),
    )
