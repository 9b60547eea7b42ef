"""Rollouts in groups of several sizes and in no order, and their advantages computed one group at a
time."""

from dataclasses import dataclass

import torch

from maxrl_fast import ops
from maxrl_fast.algorithms.estimators import find_estimator
from maxrl_fast.algorithms.options import REQUIRED

SIZES = (1, 2, 5, 8, 3, 8)
K = 3  # larger than some groups allow
NUM_TOKENS = 12


@dataclass
class Rollouts:
    rewards: torch.Tensor  # [B]
    token_level_rewards: torch.Tensor  # [B, T], the reward at the last token
    mask: torch.Tensor  # [B, T], with holes
    prompts: list  # [B], keys of several types

    @property
    def lengths(self):
        return self.mask.sum(1)

    def expected(self, name, **options):
        return one_group_at_a_time(name, self.rewards, self.prompts, self.lengths, **options)


def rollouts(seed=0, binary=True):
    generator = torch.Generator().manual_seed(seed)
    keys = [
        f"prompt {g}" if g % 3 == 0 else g if g % 3 == 1 else (g, "prompt")
        for g in range(len(SIZES))
    ]
    order = torch.randperm(sum(SIZES), generator=generator).tolist()
    prompts = [key for key, size in zip(keys, SIZES, strict=True) for _ in range(size)]
    prompts = [prompts[i] for i in order]
    num = len(prompts)
    rewards = (
        (torch.rand(num, generator=generator) < 0.3).float()
        if binary
        else torch.randn(num, generator=generator)
    )
    ends = torch.randint(2, NUM_TOKENS + 1, (num,), generator=generator)
    mask = (torch.arange(NUM_TOKENS) < ends[:, None]).long()
    mask[::3, 1] = 0  # tokens of a tool
    mask[4] = 0  # an empty response
    token_level = torch.zeros(num, NUM_TOKENS)
    token_level[torch.arange(num), ends - 1] = rewards
    return Rollouts(rewards, token_level, mask, prompts)


def options_of(name):
    row = find_estimator(name)
    required = {name: 0.1 for name, option in row.options.items() if option.default is REQUIRED}
    return required | ({"k": K} if row.size is not None and row.size.name == "k" else {})


def needs_binary(name):
    return find_estimator(name).binary or name == "noisy_verifier_forward"


def one_group_at_a_time(name, rewards, prompts, lengths, **options):
    """Return the advantages [B]; of an estimator that scales by the whole batch, from group ids in
    one call."""
    row, advantages = find_estimator(name), torch.zeros_like(rewards)
    if row.over_batch:
        ids = torch.tensor([prompts.index(key) for key in prompts])
        inputs = {"lengths": lengths} if row.inputs else {}
        return ops.group_advantage(rewards, name, group_ids=ids, **options, **inputs)
    for key in set(prompts):
        members = torch.tensor([i for i, other in enumerate(prompts) if other == key])
        size = options.get("k")
        if size is None or row.size.smallest <= size <= len(members) - row.size.below_n:
            inputs = {"lengths": lengths[members][None]} if row.inputs else {}
            advantages[members] = ops.group_advantage(
                rewards[members][None], name, **options, **inputs
            )[0]
    return advantages
