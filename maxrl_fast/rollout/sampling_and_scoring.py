"""Samples responses and scores them, in one turn or as episodes."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from maxrl_fast.records import SEQUENCE, Rollouts, Samples
from maxrl_fast.rollout import Engine, RolloutRequest, cut
from maxrl_fast.tasks import EpisodeTask, Task
from maxrl_fast.tasks.scorer import Scorer


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
    request: RolloutRequest,
    clock: Callable[[str], AbstractContextManager[object]] = nullcontext,
    shares_engine: bool = False,
    zero_truncated: bool = False,
) -> ScoredSamples:
    """Sample the responses of a request, with the environments of an EpisodeTask, and score them.

    A rank without prompts scores nothing; it takes part in sampling with an engine that it shares.
    clock: measures the stages "rollout" and "reward". shares_engine: whether the engine samples for
    several ranks, which call it together. zero_truncated: of `Scorer.score`."""
    prompts = request.prompts
    with contextlib.ExitStack() as not_finished:
        if isinstance(task, EpisodeTask):
            environments = task.environments(prompts, request.num_samples, request.beat)
            not_finished.callback(environments.close)
            sampling = replace(request.sampling, max_turns=task.max_turns)
            request = replace(request, sampling=sampling, environments=environments)
        with clock("rollout"):
            if len(prompts) or shares_engine:
                rollouts = cut(engine.generate(request), request.sampling)
            else:
                rollouts = Rollouts.given([]).to(prompts.tokens.device)
        if scorer is None or not len(prompts):
            rewards = torch.full((len(rollouts),), torch.nan, device=rollouts.tokens.device)
            return ScoredSamples(prompts, rollouts, rewards, ({},) * len(rollouts))
        with clock("reward"):
            given = prompts, rollouts, request.environments, request.beat
            rewards = scorer.score(*given, zero_truncated)
        not_finished.pop_all()
    return ScoredSamples(prompts, rollouts, rewards, tuple(scorer.components))
