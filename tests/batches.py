"""Rollouts and batches for the tests."""

import torch

from maxrl_fast.records import Prompts, Rollouts, pack
from maxrl_fast.training.packing import Batch, Packer


def make_prompts(token_lists: list[list[int]]) -> Prompts:
    tokens, cu_seqlens = pack(token_lists)
    return Prompts(tokens, cu_seqlens, torch.arange(len(token_lists)))


def one_batch(prompts: Prompts, rollouts: Rollouts, advantages: torch.Tensor | None = None, merge_cost: float = 0.0) -> Batch:
    """All rollouts as one micro-batch, every prompt shared that can be where merge_cost is 0."""
    num_sequences = len(rollouts.lengths)
    advantages = torch.ones(num_sequences) if advantages is None else advantages
    return Packer(prompts, rollouts, advantages, merge_cost).pack(torch.arange(num_sequences))
