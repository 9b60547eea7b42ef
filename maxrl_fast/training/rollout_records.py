"""The rollouts of a step that a run keeps, as records of rollouts.jsonl."""

import json
import zlib
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.distributed.ranks import Ranks
from maxrl_fast.evaluation.kept_samples import finite, sample_records
from maxrl_fast.records import Prompts, Samples
from maxrl_fast.tasks import Task
from maxrl_fast.training.collect import Collected


def rollout_records(task: Task, collected: Collected, advantages: Tensor, count: int, ranks: Ranks) -> list[dict[str, Any]]:
    """Return `count` rollouts of a step as JSON objects, all of one group before the next; all ranks must call this.

    Args:
        count: at least 1.
        advantages: [S], with which the rollouts have been learned from.

    Returns:
        The records on the first rank, none on the others.
    """
    per_prompt = min(count, collected.num_rollouts)
    groups = first_groups(collected.prompts, -(-count // per_prompt))
    sequences = (groups[:, None] * collected.num_rollouts + torch.arange(per_prompt)).flatten()
    own = {s: parts for s in sequences.tolist() if (parts := collected.components[s])}
    components = {s: parts for line in ranks.texts(json.dumps([*own.items()])) for s, parts in json.loads(line)}
    if not ranks.is_first:
        return []
    device = advantages.device
    samples = Samples(collected.prompts.select(groups.to(device)), collected.rollouts.select(sequences.to(device)))
    is_known = True if collected.valid is None else collected.valid.flatten().cpu()[sequences]
    rewards = torch.where(torch.as_tensor(is_known), collected.rewards.flatten().cpu()[sequences], torch.nan)
    records = sample_records(task, samples, rewards, [components.get(s, {}) for s in sequences.tolist()])
    values = advantages.detach().cpu()[sequences].tolist()
    kept = [
        {"step": collected.step, **record, "advantage": None if record["reward"] is None else finite(value)}
        for record, value in zip(records, values, strict=True)
    ]
    return kept[:count]


def first_groups(prompts: Prompts, count: int) -> Tensor:
    """Return the indices of `count` of the prompts, int64 on the host: those with the smallest checksums of their tokens.

    The choice depends on nothing else. So of the prompts of a data set that are chosen in one epoch, about half are chosen in
    the next, however it is shuffled; by chance it would be one in as many as a step has.
    """
    tokens = prompts.tokens.cpu().split(prompts.lengths.tolist())
    checksums = [zlib.crc32(part.numpy().tobytes()) for part in tokens]
    return torch.tensor(sorted(range(len(checksums)), key=checksums.__getitem__)[:count])
