"""MaxRL with as many rollouts of a prompt as it needs (docs/objectives/maxrl.md#stopping)."""

import torch
from torch import Tensor


def stopped_maxrl(rewards: Tensor, valid: Tensor, drawn_by: Tensor, stop_at: int) -> Tensor:
    """Return A_i = r_i/K - min(K_-i, m)/(m n_i), [G, N] float64, of groups that were drawn in whole
    rounds: K successes of the group, m = stop_at, n_i = drawn_by, K_-i successes among the others
    of these n_i; 0 where K = 0.

    Args:
        rewards: [G, N], 0 or 1, in the order of sampling.
        valid: [G, N] bool, False where a rollout was not drawn, or has no reward.
        drawn_by: int64 [G, N], the rollouts of the prompt after the round of each; 0 if not drawn.
    """
    r = torch.where(valid, rewards.double(), 0.0)
    others = r.cumsum(1).gather(1, (drawn_by - 1).clamp_min(0)) - r
    baseline = others.clamp_max(stop_at) / (stop_at * drawn_by.clamp_min(1))
    return torch.where(valid, r / r.sum(1, keepdim=True).clamp_min(1) - baseline, 0.0)
