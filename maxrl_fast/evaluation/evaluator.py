"""Evaluation on held-out prompts: unbiased pass@k."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.distributed.ranks import Ranks
from maxrl_fast.evaluation.coverage import pass_at_k, powers_of_two
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.rewards.scoring import Scorer
from maxrl_fast.rollout import Engine, Sampling
from maxrl_fast.tasks import Task


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


def is_correct(rewards: Tensor) -> Tensor:
    """Whether responses of these rewards count as correct, bool; failed ones (NaN) do not."""
    return rewards > 0.5


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
    keep: Callable[[Prompts, Rollouts, Tensor], None] | None = None,
    split: str = "test",
    chunk: int = 32,
) -> Evaluation:
    """pass@k over the first `num_prompts` prompts of the split, `num_samples` responses to each.

    The ranks divide the prompts. The random numbers depend on the seed, the prompt and the sample alone, so that two
    policies meet the same luck.

    Args:
        progress: is called with the number of prompts done, and may raise.
        keep: is called with every chunk of this rank's prompts, their rollouts and rewards [S], NaN where they failed.
        chunk: prompts that a rank samples at a time.
    """
    ranks = ranks or Ranks()
    correct, lengths, truncated, failed = [], [], [], []
    for start in range(0, num_prompts, chunk * ranks.size):
        count = min(chunk * ranks.size, num_prompts - start)
        own_start, own_count = ranks.part(count)
        if own_count:
            prompts = task.prompts(split, start + own_start, own_count).to(device)
            rollouts = engine.generate(prompts, num_samples, sampling, seed=seed, step=0)
            rewards = scorer.score(prompts, rollouts)
            if keep:
                keep(prompts, rollouts, rewards)
            correct.append(is_correct(rewards).view(-1, num_samples).sum(1))
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


def sample_records(task: Task, prompts: Prompts, rollouts: Rollouts, rewards: Tensor) -> Iterator[dict[str, Any]]:
    """One object for JSON a response, in the order of the rollouts; rewards [S], null for NaN."""
    num_samples = len(rollouts.lengths) // len(prompts)
    texts = [task.decode(tokens.tolist()) for tokens in prompts.tokens.cpu().split(prompts.lengths.tolist())]
    responses, lengths = rollouts.tokens.cpu().split(rollouts.lengths.tolist()), rollouts.lengths.tolist()
    outcomes = zip(responses, lengths, rewards.tolist(), rollouts.truncated.tolist(), strict=True)
    for s, (tokens, length, reward, is_truncated) in enumerate(outcomes):
        yield {
            "id": int(prompts.ids[s // num_samples]),
            "prompt": texts[s // num_samples],
            "response": task.decode(tokens.tolist()),
            "reward": reward if math.isfinite(reward) else None,  # NaN is no JSON
            "truncated": is_truncated,
            "tokens": length,
        }
