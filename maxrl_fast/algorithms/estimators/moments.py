"""Estimators that shift and scale the rewards, or S_i, by moments or a quantile of their group or
the batch."""

from typing import Annotated

import torch
from torch import Tensor

from maxrl_fast.algorithms.estimator import Ddof, Eps, K, Kernel, estimator
from maxrl_fast.algorithms.estimators.max_at_k import shortfall
from maxrl_fast.algorithms.group import BATCH, Group, ratio
from maxrl_fast.algorithms.options import BelowOne, Help, Share

FalsePositiveRate = Annotated[
    BelowOne, Help("Probability that the verifier accepts a wrong rollout.")
]
FalseNegativeRate = Annotated[
    BelowOne, Help("Probability that the verifier rejects a correct rollout.")
]


@estimator(
    "MaxRL, Algorithm 1",
    weight="(1-(1-p)^(N-1))/p at eps 0",
    for_binary=True,
    kernel=Kernel(centred=True, scale="mean"),
)
def maxrl_ratio(g: Group, *, eps: Eps = 0.0) -> Tensor:
    """(r - mean)/(mean + eps), 0 where mean + eps = 0."""
    return ratio(g.centre(g.rewards), g.mean(g.rewards) + eps)


@estimator(
    "MaxRL, eq. 6",
    weight="(1-(1-p)^N)/p",
    for_binary=True,
    kernel=Kernel(scale="mean"),
    min_rollouts=1,
)
def maxrl_conditional(g: Group) -> Tensor:
    """r/mean, 0 where mean = 0; r N/C for rewards 0 or 1."""
    return ratio(g.rewards, g.mean(g.rewards))


@estimator("MaxRL, eq. 7", weight="(1-(1-p)^N)/p", for_binary=True)
def maxrl_control_variate(g: Group) -> Tensor:
    """r/mean - 1, -1 where mean = 0; r N/C - 1 for rewards 0 or 1."""
    return maxrl_conditional(g) - 1


@estimator(
    "RLOO, Kool et al. 2019; Ahmadian et al. 2024",
    weight="1",
    kernel=Kernel(centred=True, scale="leave_one_out"),
)
def rloo(g: Group) -> Tensor:
    """r - mean of the others = (N/(N-1)) (r - mean)."""
    return g.centre(g.rewards) * g.n / (g.n - 1).clamp_min(1)


@estimator(
    "MaxRL, section 2: REINFORCE with the group's mean",
    weight="(N-1)/N",
    kernel=Kernel(centred=True),
)
def reinforce(g: Group) -> Tensor:
    """r - mean."""
    return g.centre(g.rewards)


@estimator("REINFORCE, Williams 1992", weight="1", kernel=Kernel(), min_rollouts=1)
def reinforce_raw(g: Group) -> Tensor:
    """r."""
    return g.rewards


@estimator(
    "GRPO, Shao et al. 2024, section 4.1.2",
    kernel=Kernel(centred=True, scale="std"),
    aggregation="seq_mean_token_mean",
)
def grpo(g: Group, *, eps: Eps = 1e-6, ddof: Ddof = 1) -> Tensor:
    """(r - mean)/(std + eps)."""
    return ratio(g.centre(g.rewards), g.std(g.rewards, ddof) + eps)


@estimator(
    "Lite PPO, Liu et al. 2025, arXiv:2508.08221, as ROLL computes it; TRL's "
    "scale_rewards=batch has eps 1e-4",
    weight="depends on the batch",
    over_batch=True,
)
def lite_ppo(g: Group, *, eps: Eps = 1e-6, ddof: Ddof = 1) -> Tensor:
    """(r - mean)/(std of r over the batch + eps)."""
    return ratio(g.centre(g.rewards), g.std(g.rewards, ddof, over=BATCH) + eps)


@estimator(
    "REINFORCE++ with baseline, Hu et al. 2025, arXiv:2501.03262",
    weight="depends on the batch",
    over_batch=True,
)
def reinforce_pp(g: Group, *, eps: Eps = 1e-8, ddof: Ddof = 1) -> Tensor:
    """x = r - mean, then x/(std of x over the batch + eps)."""
    x = g.centre(g.rewards)
    return ratio(x, g.std(x, ddof, over=BATCH) + eps)


@estimator(
    "REINFORCE++ with baseline, Hu et al. 2025, arXiv:2501.03262, as verl and OpenRLHF compute it",
    weight="depends on the batch",
    over_batch=True,
)
def reinforce_pp_tokens(g: Group, lengths: Tensor, *, eps: Eps = 1e-8, ddof: Ddof = 1) -> Tensor:
    """x = r - mean, then (x - m)/(s + eps), m and s: mean and std of x over all tokens of the
    batch."""
    x = g.centre(g.rewards)
    return ratio(g.centre(x, lengths, over=BATCH), g.std(x, ddof, lengths, over=BATCH) + eps)


@estimator("The Best of N Worlds, Bagirov et al. 2025, eq. 9, BoN mean", centred=True)
def bon_mean(g: Group, *, k: K, eps: Eps = 1e-6, ddof: Ddof = 1) -> Tensor:
    """(x - mean of x)/(std of x + eps), x_i = (k/N) S_i."""
    # the largest reward shifts all x alike
    return grpo(Group(-k / g.n * shortfall(g, k), g.valid), eps=eps, ddof=ddof)


@estimator(
    "grpo as NeMo-RL computes it by default: leave-one-out baseline and deviation", binary=True
)
def grpo_nemo(g: Group) -> Tensor:
    """(r - mean of the others)/(std of the others + 1e-6), r - mean of the others where these are
    all equal; ddof 1."""
    others = (g.n - 1).clamp_min(1)
    correct = g.rewards.sum(1, keepdim=True) - g.rewards  # among the others
    # From counts, so that it is exactly 0 where the others are all equal.
    variance = correct * (others - correct) / (others * (others - 1).clamp_min(1))
    std = torch.where(variance > 0, variance.clamp_min(0).sqrt() + 1e-6, 1.0)
    return torch.where(g.n > 1, (g.rewards - correct / others) / std, 0.0)


@estimator(
    "PACS, eq. 8: -beta B dL/dr at proxies r = 0, as on the first update after sampling",
    weight="(beta/4) (N/(N-1)) ((1-(1-p)^(N-1))/p + (1-p^(N-1))/(1-p))",
    binary=True,
)
def pacs_first_update(
    g: Group,
    *,
    beta: Annotated[
        float, Help("Scale of PACS's reward proxies, in reward per nat of log-ratio.")
    ] = 1.0,
) -> Tensor:
    """beta N^2/(4 (N-1) C) where r = 1, -beta N^2/(4 (N-1) F) where r = 0, 0 where all r are equal;
    beta 1.
    """
    share = g.mean(g.rewards)  # C/N
    return ratio(
        beta * g.n / (4 * (g.n - 1).clamp_min(1)) * (g.rewards - share), share * (1 - share)
    )


@estimator("Quantile Advantage Estimation, Wu et al. 2025, arXiv:2509.22611")
def qae(
    g: Group,
    *,
    quantile: Annotated[Share, Help("Quantile of the group's rewards that is the baseline.")] = 0.4,
    eps: Eps = 1e-6,
    ddof: Ddof = 1,
) -> Tensor:
    """(r - b)/(std + eps), b = inf{x : F(x) >= quantile}, F the distribution function of r;
    quantile .4."""
    # rounded: .1 * 30 is a little above 3
    index = (quantile * g.n).round(decimals=9).ceil().long() - 1
    baseline = g.rewards.gather(1, g.order).gather(1, index.clamp_min(0))
    return ratio(g.rewards - baseline, g.std(g.rewards, ddof) + eps)


@estimator("NSR, Zhu et al. 2025, arXiv:2506.01347", weight="1", for_binary=True, min_rollouts=1)
def nsr(g: Group) -> Tensor:
    """r - 1."""
    return g.rewards - 1


@estimator(
    "Weighted-REINFORCE, Zhu et al. 2025, arXiv:2506.01347",
    weight="1 + correct_weight",
    for_binary=True,
    min_rollouts=1,
)
def w_reinforce(
    g: Group, *, correct_weight: Annotated[float, Help("Weight of correct rollouts.")] = 0.1
) -> Tensor:
    """correct_weight r - (1 - r)."""
    return correct_weight * g.rewards - (1 - g.rewards)


@estimator("OPO, Hao et al. 2025, arXiv:2505.23585", weight="(N-1)/N at equal lengths")
def opo(g: Group, lengths: Tensor) -> Tensor:
    """r - sum(length r)/sum(length)."""
    return g.centre(g.rewards, lengths)


@estimator(
    "PGBC, Cai et al. 2025, arXiv:2510.00915, Algorithm 1",
    weight="(N-1)/(N (1 - rho0 - rho1))",
    for_binary=True,
)
def noisy_verifier_backward(
    g: Group, *, false_positive_rate: FalsePositiveRate, false_negative_rate: FalseNegativeRate
) -> Tensor:
    """(r - mean)/(1 - rho0 - rho1): rewards (r - rho0)/(1 - rho0 - rho1), centred."""
    if not false_positive_rate + false_negative_rate < 1:
        raise ValueError("false_positive_rate and false_negative_rate must add up to less than 1")
    return g.centre(g.rewards) / (1 - false_positive_rate - false_negative_rate)


@estimator(
    "PGFC, Cai et al. 2025, arXiv:2510.00915, Algorithm 2",
    weight="1",
    for_binary=True,
    min_rollouts=1,
)
def noisy_verifier_forward(g: Group, *, false_negative_rate: FalseNegativeRate) -> Tensor:
    """rho1 where r = 1, rho1 - 1 where r = 0."""
    return g.rewards - 1 + false_negative_rate
