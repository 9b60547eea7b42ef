"""Selects the rollouts of a step that a run keeps, as records of rollouts.jsonl."""

import zlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.evaluation.kept_samples import finite, sample_records
from maxrl_fast.records import Prompts, Rollouts, Samples, gather_sequences
from maxrl_fast.runtime.device import to_device, to_host
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.training.collect import CPU, RolloutBatch


def rollout_records(
    task: Task, batch: RolloutBatch, advantages: Tensor, count: int, ranks: Ranks
) -> list[dict[str, Any]]:
    """Return `count` >= 1 rollouts of a step as JSON objects, group by group, on the first rank; an
    empty list on the others. All ranks must call this. `advantages` [S] are the update's."""
    prompts, rollouts, num_rollouts = batch.prompts, batch.raw_rollouts, batch.num_rollouts
    # a GPU is waited for twice: here, and for the tokens that are kept
    tokens, prompt_cu, ids, cu_seqlens, truncated, rewards, has_reward, advantages = to_host(
        *(prompts.tokens, prompts.cu_seqlens, prompts.ids, rollouts.cu_seqlens, rollouts.truncated),
        *(batch.task_rewards.flatten(), batch.has_reward.flatten(), advantages.detach()),
    )
    prompts = replace(prompts, tokens=tokens, cu_seqlens=prompt_cu, ids=ids)
    groups = first_groups(prompts, len(prompts))
    sequences = (groups[:, None] * num_rollouts + torch.arange(num_rollouts)).flatten()
    if batch.frac_drawn < 1:
        sequences = sequences[cu_seqlens.diff()[sequences] > 0]
    sequences = sequences[:count]
    own = {s: parts for s in sequences.tolist() if (parts := batch.components[s])}
    components = {s: parts for of_rank in ranks.values([*own.items()]) for s, parts in of_rank}
    if not ranks.is_first:
        return []
    device = rollouts.tokens.device
    positions, kept_cu = gather_sequences(cu_seqlens, sequences)
    (kept,) = to_host(rollouts.tokens[to_device(device, positions)[0]])
    responses = Rollouts(kept, kept_cu, torch.zeros(len(kept)), truncated[sequences])
    if rollouts.inserted is not None:
        chosen = rollouts.select(sequences.to(device)).to(CPU)
        responses = replace(responses, inserted=chosen.inserted)
    # one prompt for each: groups may be uneven, or in part
    samples = Samples(prompts.select(sequences // num_rollouts), responses)
    values = rewards.masked_fill(~has_reward, torch.nan)[sequences]
    parts = [components.get(s, {}) for s in sequences.tolist()]
    records = []
    for record, x in zip(
        sample_records(task, samples, values, parts), advantages[sequences].tolist(), strict=True
    ):
        advantage = None if record["reward"] is None else finite(x)
        records.append({"step": batch.step, **record, "advantage": advantage})
    return records


def first_groups(prompts: Prompts, count: int) -> Tensor:
    """Return the indices of `count` prompts, which are on the host, int64: the ones with the
    smallest checksums of their tokens."""
    parts = prompts.tokens.split(prompts.lengths.tolist())
    checksums = [zlib.crc32(tokens.numpy().tobytes()) for tokens in parts]
    return torch.tensor(sorted(range(len(checksums)), key=checksums.__getitem__)[:count])
