"""Rollouts and batches for the tests."""

from dataclasses import dataclass

import torch

from maxrl_fast.records import Prompts, Rollouts, Samples, pack
from maxrl_fast.rollout import RolloutRequest
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.packing import MicroBatch, Packer


@dataclass(frozen=True)
class Chosen(RolloutRequest):
    """Some samples of a larger request, by their keys."""

    chosen: torch.Tensor | None = None

    def keys(self):
        return self.chosen


def make_prompts(token_lists: list[list[int]]) -> Prompts:
    tokens, cu_seqlens = pack(token_lists)
    return Prompts(tokens, cu_seqlens, torch.arange(len(token_lists)))


THREE_PROMPTS = make_prompts([[5, 6, 7, 8], [9, 1], [1, 2, 3, 4, 5, 6, 7]])
FIVE_PROMPTS = make_prompts([[5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6, 7], [9, 9], [30, 2, 4]])


def one_batch(
    prompts: Prompts,
    rollouts: Rollouts,
    advantages: torch.Tensor | None = None,
    shares_all: bool = True,
) -> MicroBatch:
    num_sequences = len(rollouts)
    if advantages is None:
        advantages = torch.ones(num_sequences, device=rollouts.tokens.device)
    return Packer(prompts, rollouts, advantages, shares_all).pack(torch.arange(num_sequences))


def collected(
    samples: Samples,
    rewards: torch.Tensor,
    valid: torch.Tensor | None = None,
    greedy_rewards: torch.Tensor | None = None,
    step: int = 1,
) -> RolloutBatch:
    unknown = rewards if valid is None else rewards.masked_fill(~valid, float("nan"))
    num_tokens = 0 if samples.rollouts is None else len(samples.rollouts.tokens)
    return RolloutBatch(
        samples.prompts,
        samples.rollouts,
        *(step, samples.rollouts, rewards, rewards, unknown, num_tokens),
        components=tuple({} for _ in range(rewards.numel())),
        valid=valid,
        greedy_rewards=greedy_rewards,
    )
