"""Estimators that take the prompt's greedy response, or the log-probabilities of responses."""

from typing import Annotated

import torch
from torch import Tensor

from maxrl_fast.algorithms.estimator import Ddof, Eps, estimator
from maxrl_fast.algorithms.estimators.moments import grpo
from maxrl_fast.algorithms.group import Group
from maxrl_fast.algorithms.options import Help


@estimator(
    "ReMax, Li et al. 2023, arXiv:2310.10505, as verl computes it",
    weight="is 1, whatever the greedy response",
    min_rollouts=1,
)
def remax(g: Group, greedy_rewards: Tensor) -> Tensor:
    """r - reward of the prompt's greedy response."""
    return g.rewards - greedy_rewards


@estimator(
    "SELF, Nguyen et al. 2025, as compared in MaxRL, Table 3",
    weight="depends on the greedy rollout",
)
def self_(g: Group, greedy_correct: Tensor, *, eps: Eps = 1e-6, ddof: Ddof = 1) -> Tensor:
    """grpo, 0 for prompts whose greedy rollout is correct."""
    return torch.where(greedy_correct, 0.0, grpo(g, eps=eps, ddof=ddof))


@estimator(
    "Differential Smoothing, Gai et al. 2025", weight="depends on the log-probs", for_binary=True
)
def differential_smoothing(
    g: Group,
    logprobs: Tensor,
    *,
    tau: Annotated[float, Help("Weight of the log-probs.")] = 0.05,
    eps: Eps = 1e-6,
    ddof: Ddof = 0,
) -> Tensor:
    """grpo (ddof 0) - tau (mean logp) where r = 1, + tau (mean logp) where r = 0."""
    return grpo(g, eps=eps, ddof=ddof) + tau * (1 - 2 * g.rewards) * logprobs


@estimator(
    "Rewarding the Unlikely, He et al. 2025, arXiv:2506.02355", weight="depends on the log-probs"
)
def unlikeliness(
    g: Group,
    logprobs: Tensor,
    *,
    penalty: Annotated[
        float, Help("Share of the reward that the most probable rollout of a group loses.")
    ] = 0.25,
    eps: Eps = 1e-6,
    ddof: Ddof = 1,
) -> Tensor:
    """grpo of r (1 - penalty rank/N), rank of the mean logp, 0 for the least likely."""
    rewards = g.rewards * (1 - penalty * (g.rank(logprobs) / g.n.clamp_min(1)))
    return grpo(Group(rewards, g.valid), eps=eps, ddof=ddof)
