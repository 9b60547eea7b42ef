"""Estimators that shift and scale the rewards, or S_i, by moments or a quantile of their group or
the batch; then those that take the greedy response, log-probs, or several rewards."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import is_host_readable
from maxrl_fast.algorithms.estimator import BATCH, Ddof, Eps, Group, K, Kernel, estimator, ratio
from maxrl_fast.algorithms.estimators.max_at_k import shortfall
from maxrl_fast.algorithms.options import BelowOne, Help, Limit, Share

OF_PROXIES = Help("Scale of PACS's reward proxies, in reward per nat of log-ratio.")
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
def pacs_first_update(g: Group, *, beta: Annotated[float, OF_PROXIES] = 1.0) -> Tensor:
    """beta N^2/(4 (N-1) C) where r = 1, -beta N^2/(4 (N-1) F) where r = 0, 0 where all r are equal;
    beta 1."""
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


@estimator(
    "GDPO, Liu et al. 2026, arXiv:2601.05242, as the authors' code and TRL's "
    "normalize_then_sum compute it",
    weight="depends on the rewards that are summed",
    over_batch=True,
)
def gdpo(
    g: Group,
    reward_parts: Tensor,
    *,
    reward_weights: Sequence[float],
    eps: Eps = 1e-4,
    ddof: Ddof = 1,
) -> Tensor:
    """x/(std of x over the batch + eps), x = sum of w_k (r_k - mean)/(std + eps) over rewards k;
    eps 1e-4."""
    x = torch.zeros_like(g.rewards)
    for part, weight in zip(reward_parts, reward_weights, strict=True):
        applies = g.valid & ~part.isnan()
        x = x + weight * torch.where(applies, grpo(Group(part, applies), eps=eps, ddof=ddof), 0.0)
    return ratio(x, g.std(x, ddof, over=BATCH) + eps)


@estimator(
    "HERO, Tao et al. 2025, arXiv:2510.07242, eqs. 3-5 as others quote them; w's constants "
    "are its main text's",
    weight="depends on the scores",
    over_batch=True,
    refuses={
        "hero needs 1 as the weight of the verifier, the first of --reward-weights, got "
        "{reward_weights}": lambda c: c.reward_weights[:1] not in ((), (1.0,))
    },
)
def hero(
    g: Group,
    reward_parts: Tensor,
    *,
    reward_weights: Sequence[float],
    score_range: Annotated[
        float,
        Limit("above 0 and below .5", lambda x: 0 < x < 0.5),
        Help("Half-width of the score range within a verifier class."),
    ] = 0.05,
    eps: Eps = 1e-6,
    ddof: Ddof = 1,
) -> Tensor:
    """w (x - mean of x), x = v - a + 2a (d - min)/(max - min + eps), v a verifier's, d a score, min
    and max over equal v; w = .5 + 1.5 sigmoid(5 (std of d - its mean over the groups)); a =
    score_range .05."""
    if len(reward_parts) < 2 or reward_weights[0] != 1:
        weights = " ".join(f"{weight:g}" for weight in reward_weights)
        raise ValueError(
            "hero takes a verifier of weight 1 and one or more scores as reward_parts, got "
            f"{len(reward_parts)} with the weights {weights}"
        )
    verified, scores = reward_parts[0], reward_parts[1:].nan_to_num(0.0)
    other = g.valid & (verified != 0) & (verified != 1)
    if is_host_readable(other) and bool(other.any()):
        raise ValueError(f"the verifier of hero must give 0 or 1, got {float(verified[other][0])}")
    scored = g.valid & ~reward_parts[1:].isnan().all(0)
    score = share = torch.zeros_like(g.rewards)
    for part, part_weight in zip(scores, reward_weights[1:], strict=True):
        score = score + part_weight * part
    for verdict in (0, 1):
        same = Group(score, scored & (verified == verdict))
        low, high = same.smallest(score), same.largest(score)
        own = torch.where(same.valid & (high > low), (score - low) / (high - low + eps), 0.0)
        # a response to which no score applies takes the mean of those with its verdict
        own = torch.where(same.valid, own, same.mean(own))
        share = torch.where(verified == verdict, own, share)
    of_scores = Group(score, scored)
    spread = torch.where(of_scores.n > ddof, of_scores.std(score, ddof), 0.0)  # [G, 1]
    weight = 0.5 + 1.5 * torch.sigmoid(5 * (spread - spread.sum() / (g.n > 0).sum()))
    x = torch.where(other, torch.nan, verified) - score_range + 2 * score_range * share
    return weight * g.centre(x)
