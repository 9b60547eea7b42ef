"""Selects the rollouts of a step that a run keeps, as records of rollouts.jsonl."""

import json
import zlib
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.evaluation.kept_samples import finite, sample_records
from maxrl_fast.records import Prompts, Samples
from maxrl_fast.runtime.device import to_device, to_host
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.training.collect import CPU, RolloutBatch


def rollout_records(
    task: Task, batch: RolloutBatch, advantages: Tensor, count: int, ranks: Ranks
) -> list[dict[str, Any]]:
    """Return `count` >= 1 rollouts of a step as JSON objects, group by group, on the first rank; an
    empty list on the others.

    All ranks must call this. `advantages` [S] are the update's.
    """
    num_rollouts, device = batch.num_rollouts, batch.rewards.device
    prompts, per_prompt = batch.prompts.to(CPU), min(count, num_rollouts)
    groups = first_groups(prompts, -(-count // per_prompt))
    sequences = (groups[:, None] * num_rollouts + torch.arange(per_prompt)).flatten()
    own = {s: parts for s in sequences.tolist() if (parts := batch.components[s])}
    components = {
        s: parts
        for line in ranks.texts(json.dumps([*own.items()]))
        for s, parts in json.loads(line)
    }
    if not ranks.is_first:
        return []
    (chosen,) = to_device(device, sequences)
    values = batch.task_rewards.masked_fill(~batch.has_reward, torch.nan).flatten()
    values, advantages = to_host(values[chosen], advantages.detach()[chosen])
    samples = Samples(prompts.select(groups), batch.raw_rollouts.select(chosen).to(CPU))
    records = sample_records(
        task, samples, values, [components.get(s, {}) for s in sequences.tolist()]
    )
    return [
        {
            "step": batch.step,
            **record,
            "advantage": None if record["reward"] is None else finite(advantage),
        }
        for record, advantage in zip(records, advantages.tolist(), strict=True)
    ][:count]


def first_groups(prompts: Prompts, count: int) -> Tensor:
    """Return the indices of `count` prompts, int64 on the host: the ones with the smallest
    checksums of their tokens.

    The prompts are on the host. The choice depends only on the tokens: about half of the prompts
    chosen in one epoch of a data set are chosen again in the next, however it is shuffled. By
    chance it would be one in G.
    """
    checksums = [
        zlib.crc32(tokens.numpy().tobytes())
        for tokens in prompts.tokens.split(prompts.lengths.tolist())
    ]
    return torch.tensor(sorted(range(len(checksums)), key=checksums.__getitem__)[:count])
