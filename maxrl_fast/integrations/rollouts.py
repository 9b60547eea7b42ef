"""Advantages of rollouts in any order, with a prompt key per rollout, for other trainers."""

import warnings
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from maxrl_fast import ops
from maxrl_fast.algorithms.estimators import ALIASES, find_estimator


def names() -> list[str]:
    known = ops.ESTIMATORS | ALIASES
    return [
        name for name, row in known.items() if {"lengths"}.issuperset(row.inputs) and not row.of_run
    ]


@torch.no_grad()
def rollout_advantages(
    name: str,
    options: Mapping[str, Any],
    rewards: Tensor,
    prompts: Iterable[Hashable] | None,
    lengths: Tensor,
) -> Tensor:
    """Return each rollout's advantage [B] by an estimator of `names()`, with options of
    `ops.group_advantage`; a NaN reward gets 0 with a warning. rewards, prompts (equal for rollouts
    of one prompt) and lengths (tokens of each response) are [B]."""
    given: Any = () if prompts is None else prompts
    keys = given.tolist() if hasattr(given, "tolist") else list(given)
    if prompts is None or len(keys) != len(rewards):
        got = len(keys) or "none"
        raise ValueError(f"{name} needs the prompt of each of {len(rewards)} rollouts, got {got}")
    numbers = dict[Hashable, int]()
    indices = [numbers.setdefault(key, len(numbers)) for key in keys]
    group_ids = torch.tensor(indices, device=rewards.device, dtype=torch.int64)
    inputs = {**options}
    if "lengths" in find_estimator(name).inputs:
        inputs["lengths"] = lengths
    is_missing = rewards.isnan()
    if bool(is_missing.any()):
        count = int(is_missing.sum())
        warnings.warn(
            f"{count} of {len(rewards)} rewards are NaN: these rollouts have advantage 0",
            RuntimeWarning,
            stacklevel=2,
        )
        rewards, inputs["valid"] = rewards.masked_fill(is_missing, 0.0), ~is_missing
    return ops.group_advantage(rewards, name, group_ids=group_ids, **inputs)


@torch.no_grad()
def advantages_and_returns(
    name: str,
    options: Mapping[str, Any],
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable] | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), both [B, T] and equal, as verl and SkyRL expect: those of
    rollouts whose reward and length are the sums of token_level_rewards and response_mask, repeated
    at every token of the mask. index [B]: the prompts."""
    lengths = response_mask.long().sum(-1)
    of_rollouts = rollout_advantages(name, options, token_level_rewards.sum(-1), index, lengths)
    advantages = of_rollouts[:, None] * response_mask
    return advantages, advantages
