"""Estimators that scale the rewards of a group by the whole batch."""

from torch import Tensor

from maxrl_fast.algorithms.estimator import Ddof, Eps, estimator
from maxrl_fast.algorithms.group import BATCH, Group, ratio


@estimator(
    source="Lite PPO, Liu et al. 2025, arXiv:2508.08221, as ROLL computes it; TRL's "
    "scale_rewards=batch has eps 1e-4",
    weight="depends on the batch",
    over_batch=True,
)
def lite_ppo(g: Group, *, eps: Eps = 1e-6, ddof: Ddof = 1) -> Tensor:
    """(r - mean)/(std of r over the batch + eps); eps 1e-6, ddof 1."""
    return ratio(g.centre(g.rewards), g.std(g.rewards, ddof, over=BATCH) + eps)


@estimator(
    source="REINFORCE++ with baseline, Hu et al. 2025, arXiv:2501.03262",
    weight="depends on the batch",
    over_batch=True,
)
def reinforce_pp(g: Group, *, eps: Eps = 1e-8, ddof: Ddof = 1) -> Tensor:
    """x = r - mean, then x/(std of x over the batch + eps); eps 1e-8, ddof 1."""
    x = g.centre(g.rewards)
    return ratio(x, g.std(x, ddof, over=BATCH) + eps)


@estimator(
    source="REINFORCE++ with baseline, Hu et al. 2025, arXiv:2501.03262, as verl and OpenRLHF "
    "compute it",
    weight="depends on the batch",
    over_batch=True,
)
def reinforce_pp_tokens(g: Group, lengths: Tensor, *, eps: Eps = 1e-8, ddof: Ddof = 1) -> Tensor:
    """x = r - mean, then (x - m)/(s + eps), m and s: mean and std of x over all tokens of the
    batch; eps 1e-8, ddof 1.
    """
    x = g.centre(g.rewards)
    return ratio(g.centre(x, lengths, over=BATCH), g.std(x, ddof, lengths, over=BATCH) + eps)
