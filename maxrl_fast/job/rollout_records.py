"""The rollouts of a step that a run keeps."""

import zlib
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.evaluation.kept_samples import finite, sample_records
from maxrl_fast.records import Prompts, Samples
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.training.collect import CPU, RolloutBatch


def rollout_records(
    task: Task, batch: RolloutBatch, advantages: Tensor, count: int, ranks: Ranks
) -> list[dict[str, Any]]:
    """Return `count` >= 1 rollouts of a step as lines of rollouts.jsonl, group by group; none if
    not on the first rank. All ranks must call this. `advantages` [S] are the update's."""
    samples = Samples(batch.prompts, batch.raw_rollouts).to(CPU)
    num, lengths = batch.num_rollouts, samples.rollouts.lengths.tolist()
    groups = first_groups(samples.prompts, len(samples.prompts)).tolist()
    sequences = [g * num + i for g in groups for i in range(num)]
    if batch.frac_drawn < 1:
        sequences = [s for s in sequences if lengths[s]]
    del sequences[count:]
    own = {s: parts for s in sequences if (parts := batch.components[s])}
    components: list[dict[str, float]] = [{} for _ in lengths]
    for s, parts in chain(*ranks.values([*own.items()])):
        components[s] = parts
    if not ranks.is_first:
        return []
    rewards = batch.task_rewards.masked_fill(~batch.has_reward, torch.nan).flatten()
    records = [*sample_records(task, samples, rewards.cpu(), components, sequences)]
    for record, x in zip(records, advantages.detach()[sequences].tolist(), strict=True):
        record["advantage"] = None if record["reward"] is None else finite(x)
    return [{"step": batch.step, **record} for record in records]


def first_groups(prompts: Prompts, count: int) -> Tensor:
    """Return the indices of `count` prompts on the host: those with the smallest checksums of their
    tokens."""
    parts = prompts.tokens.split(prompts.lengths.tolist())
    checksums = [zlib.crc32(tokens.numpy().tobytes()) for tokens in parts]
    return torch.tensor(sorted(range(len(checksums)), key=checksums.__getitem__)[:count])
