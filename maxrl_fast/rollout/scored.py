"""Samples responses and scores them: those of a training step, its greedy ones, and those of an
evaluation, in one turn or as episodes.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from maxrl_fast.records import SEQUENCE, Prompts, Samples
from maxrl_fast.rewards.scoring import Scorer
from maxrl_fast.rollout import Engine, Sampling
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.episode import Episodes, EpisodeTask


@dataclass(frozen=True)
class ScoredSamples(Samples):
    # [S], NaN where scoring failed or there is no scorer
    rewards: Annotated[Tensor, SEQUENCE, torch.float32]
    # [S], of each reward; {} where there are none
    components: Annotated[tuple[dict[str, float], ...], SEQUENCE]


def sample_and_score(
    engine: Engine,
    task: Task,
    scorer: Scorer | None,
    prompts: Prompts,
    num_samples: int,
    sampling: Sampling,
    *,
    seed: int,
    step: int,
    clock: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> ScoredSamples:
    """Sample `num_samples` responses to each prompt, with the environments of an EpisodeTask, and
    score them.

    A rank without prompts scores nothing; it takes part in sampling with an engine that it shares.

    Args:
        clock: measures the stages "rollout" and "reward".
    """
    episodes: Episodes | None = None
    options: dict[str, Any] = {}  # engines need to know environments only where there are some
    with contextlib.ExitStack() as not_finished:
        if isinstance(task, EpisodeTask):
            episodes = options["environments"] = task.environments(prompts, num_samples)
            not_finished.callback(episodes.close)
            sampling = replace(sampling, max_turns=task.max_turns)
        with clock("rollout"):
            rollouts = engine.generate(
                prompts, num_samples, sampling, seed=seed, step=step, **options
            )
        if scorer is None or not len(prompts):
            rewards = torch.full((len(rollouts),), torch.nan, device=rollouts.tokens.device)
            return ScoredSamples(prompts, rollouts, rewards, ({},) * len(rollouts))
        with clock("reward"):
            rewards = scorer.score(prompts, rollouts, episodes)
        not_finished.pop_all()
    return ScoredSamples(prompts, rollouts, rewards, tuple(scorer.components))
