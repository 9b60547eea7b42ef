"""The token losses. Kernels compute those that are fused (csrc/token_loss.h); here they are the
reference. Then losses that treat a few tokens of an update differently, by the ratio of each token,
and by that of each response: a mean or a sum over its tokens that are not masked."""

import math
from typing import Annotated

import torch
from torch import Tensor

from maxrl_fast.algorithms.losses.registry import token_loss
from maxrl_fast.algorithms.options import Limit, NotNegative, Positive, Share, UnitInterval
from maxrl_fast.algorithms.tokens import Tokens, limited


def clipped(
    t: Tokens,
    ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = math.inf,
) -> Tensor:
    """Return ppo's loss [T] of these ratios and advantages, and mark clipped tokens."""
    free = -advantages * ratio
    value = torch.maximum(free, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    t.mark_clipped(
        (ratio < 1 - clip_low) & (advantages < 0), (ratio > 1 + clip_high) & (advantages > 0)
    )
    limit = -advantages * dual_clip
    return torch.where((advantages < 0) & (value > limit), limit, value)


@token_loss("Williams 1992", weight="1", fused=True)
def reinforce(t: Tokens) -> Tensor:
    """-A logp."""
    return -t.advantages * t.logprobs


@token_loss(
    "Schulman et al. 2017, eq. 7; dual clip: Ye et al. 2020",
    weight="rho, and 0 where the clip is active",
    fused=True,
)
def ppo(
    t: Tokens,
    *,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    dual_clip: NotNegative = math.inf,
) -> Tensor:
    """max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)); with dual_clip c at most -A c for A <
    0.
    """
    return clipped(t, t.ratio, t.advantages, clip_low, clip_high, dual_clip)


@token_loss("MiniMax-M1 2025", weight="clip(rho)", fused=True)
def cispo(t: Tokens, *, clip_low: NotNegative = 0.2, clip_high: NotNegative = 0.2) -> Tensor:
    """-sg(clip(rho)) A logp."""
    ratio = t.ratio.detach()
    t.mark_clipped(ratio < 1 - clip_low, ratio > 1 + clip_high)
    return -ratio.clamp(1 - clip_low, 1 + clip_high) * t.advantages * t.logprobs


@token_loss(
    "Zheng et al. 2025; with advantages per token their GSPO-token",
    weight="the response's ratio, and 0 where the clip is active",
    by_sequence=True,
    fused=True,
)
def gspo(
    t: Tokens,
    *,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    dual_clip: NotNegative = math.inf,
) -> Tensor:
    """ppo with the ratio of the response exp(mean_t log rho_t)."""
    ratio = t.sequence_ratio(t.sequence_mean(t.logprobs - t.old_logprobs))
    return clipped(t, ratio, t.advantages, clip_low, clip_high, dual_clip)


TopK = Annotated[float, Limit("an integer from 1 to 8", lambda x: x in range(1, 9))]
_COVARIANCE = "Cui et al. 2025, arXiv:2505.22617, the authors' code; verl"


def covariance(t: Tokens) -> Tensor:
    """Return (A - mean A)(logp - mean logp) [T] over the update's tokens; -inf for masked ones."""
    n = t.mask.sum().clamp_min(1)
    a, logp = (torch.where(t.mask, x, 0.0) for x in (t.advantages, t.logprobs))
    return ((a - a.sum() / n) * (logp - logp.sum() / n)).masked_fill(~t.mask, -torch.inf)


def number_of(share: float, among: Tensor) -> int:
    """Return the share of the tokens `among` [T] bool, rounded down; a GPU's host waits."""
    return int(round(share * int(among.sum()), 6))  # .29 x 100 is 28.999999999999996


def choose(t: Tokens, index: Tensor) -> Tensor:
    """Return which tokens [T] bool are at the index; their number is the metric tokens_chosen."""
    chosen = torch.zeros_like(t.mask).index_fill(0, index, True) & t.mask
    t.metrics["tokens_chosen"] = chosen.sum()
    return chosen


def greatest_covariances(t: Tokens, share: float) -> Tensor:
    most = covariance(t).argsort(descending=True, stable=True)
    return choose(t, most[: max(number_of(share, t.mask), 1)])


@token_loss(
    _COVARIANCE,
    weight="rho; on the chosen tokens also a pull of coef towards rho = 1",
    statistics=greatest_covariances,
    all_tokens=True,
)
def kl_cov(t: Tokens, *, share: Share = 2e-4, coef: NotNegative = 1.0) -> Tensor:
    """-A rho, and for the chosen tokens -A rho + coef |log rho|; chosen is the share of tokens with
    the greatest covariance (A - mean A)(logp - mean logp)."""
    return -t.advantages * t.ratio + torch.where(t.statistics, coef * t.log_ratio.abs(), 0.0)


@token_loss(
    _COVARIANCE, weight="ppo's, and 0 for the chosen tokens", masks="ppo", bounds=(("low", "high"),)
)
def clip_cov(t: Tokens, *, share: Share = 2e-4, low: float = 1.0, high: float = 5.0) -> Tensor:
    """ppo, and 0 for the chosen tokens: the share of all, drawn from those whose covariance is
    between low and high.
    """
    between = covariance(t)
    candidates = ((between > low) & (between < high)).nonzero()[:, 0]
    shuffled = torch.randperm(len(candidates), generator=t.generator)
    drawn = shuffled[: max(number_of(share, t.mask), 1)]
    return ~choose(t, candidates[drawn.to(candidates.device)])


def lowest_logprobs(t: Tokens, share: float) -> Tensor:
    negative = t.mask & (t.advantages < 0)
    ascending = t.logprobs.masked_fill(~negative, torch.inf).argsort(stable=True)
    return choose(t, ascending[: number_of(share, negative)])


@token_loss(
    "Lp-Reg, Huang et al. 2025, arXiv:2510.03222, the authors' code",
    weight="rho, and 0 where the clip is active; on protected tokens also a pull of proxy / pi - 1 "
    "upwards",
    statistics=lowest_logprobs,
)
def lp_reg(
    t: Tokens,
    logits: Tensor,
    *,
    share: Share = 0.01,
    min_p: Share = 0.02,
    low: NotNegative = 1.0,
    high: NotNegative = 9.0,
) -> Tensor:
    """-A rho + k3(pi || proxy) for protected tokens with pi < proxy, others max(-A rho, -A
    clip(rho, 1 - low, 1 + high)); protected is the share of the tokens with A < 0 that has the
    lowest log-probs; the proxy is pi without the tokens below min_p times its greatest probability,
    renormalised."""
    log_p = logits.detach().log_softmax(-1)
    least = log_p.amax(-1, keepdim=True) + math.log(min_p)  # [T, 1]
    kept = log_p.masked_fill(log_p < least, -torch.inf).log_softmax(-1)
    proxy = kept.gather(-1, t.targets[:, None])[:, 0].double()  # -inf: without protection
    is_protected = t.statistics & (t.logprobs < proxy)
    value = clipped(t, t.ratio, t.advantages, low, high)
    t.mark_clipped(t.clipped_low & ~is_protected, t.clipped_high & ~is_protected)
    to_proxy = limited(t.logprobs - torch.where(is_protected, proxy, t.logprobs.detach()))
    pulled = -t.advantages * t.ratio + (-to_proxy).expm1() + to_proxy
    return torch.where(is_protected, pulled, value)


def high_entropies(t: Tokens, tau: float) -> Tensor:
    is_high = t.mask & (t.advantages != 0) & (t.entropy > t.sequence_quantile(t.entropy, tau))
    t.metrics["tokens_chosen"] = is_high.sum()
    return is_high


@token_loss(
    "SimKO, Peng et al. 2025, arXiv:2510.14807, the authors' code",
    weight="ppo's; of it alpha / k goes to each of the k tokens, and 1 - alpha to the sampled one",
    statistics=high_entropies,
)
def simko(
    t: Tokens,
    logits: Tensor,
    *,
    alpha: UnitInterval = 0.01,
    k: TopK = 3.0,
    tau: UnitInterval = 0.8,
    penalty: NotNegative = 1.1,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    dual_clip: NotNegative = math.inf,
) -> Tensor:
    """ppo with (1 - alpha) rho + (alpha / k) sum_j [sg(rho) / sg(rho_j)] rho_j in place of rho for
    A > 0, j over the k most probable tokens; penalty A in place of A where A < 0 and the token is
    the most probable one; both only for tokens whose entropy is above the quantile tau of their
    response, the others have ppo."""
    top = logits.log_softmax(-1).topk(min(int(k), logits.shape[-1]))  # [T, k]
    rewarded = t.statistics & (t.advantages > 0)
    punished = t.statistics & (t.advantages < 0) & (top.indices[:, 0] == t.targets)
    # The value is rho; of its gradient the part alpha goes to the most probable tokens.
    moved = torch.where(rewarded, alpha * (top.values.double().mean(-1) - t.logprobs), 0.0)
    ratio = limited(t.logprobs - t.old_logprobs + moved - moved.detach()).exp()
    advantages = torch.where(punished, penalty * t.advantages, t.advantages)
    return clipped(t, ratio, advantages, clip_low, clip_high, dual_clip)


@token_loss(
    "Gao et al. 2025, arXiv:2511.20347; TRL, verl",
    weight="4 sigmoid (1 - sigmoid) rho, near 0 for small and for large rho",
)
def sapo(t: Tokens, *, tau_positive: Positive = 1.0, tau_negative: Positive = 1.05) -> Tensor:
    """-A (4 / tau) sigmoid(tau (rho - 1)), tau by the sign of A."""
    tau = t.by_sign(tau_positive, tau_negative)
    return -t.advantages * (4 / tau) * torch.sigmoid(tau * (t.ratio - 1))


@token_loss(
    "DPPO 2026, arXiv:2602.04879, with the KL term of Kimi K2.5, as prime-rl's default loss",
    weight="rho, and 0 where the probability has moved too far; and the pull of (log rho)^2 on "
    "every token",
    all_tokens=True,
)
def dppo(
    t: Tokens, *, low: NotNegative = 0.2, high: NotNegative = 0.2, kl: NotNegative = 1e-3
) -> Tensor:
    """-A rho, 0 where A > 0 and pi - pi_old > high, or A < 0 and pi - pi_old < -low; plus kl (log
    rho)^2.
    """
    ratio = t.ratio.detach()
    # (pi - pi_old) rho, compared with the bounds times rho
    change = t.logprobs.detach().exp() * (ratio - 1)
    below = (t.advantages < 0) & (change < -low * ratio)
    above = (t.advantages > 0) & (change > high * ratio)
    t.mark_clipped(below, above)
    return torch.where(below | above, 0.0, -t.advantages * t.ratio) + kl * t.log_ratio.square()


@token_loss(
    "DISPO, Karaman et al. 2026, arXiv:2602.00983; formula and bounds from secondary sources; no "
    "code was found",
    weight="clip(rho)",
    bounds=(("low_positive", "high_positive"), ("low_negative", "high_negative")),
)
def dispo(
    t: Tokens,
    *,
    low_positive: NotNegative = 0.8,
    high_positive: NotNegative = 11.0,
    low_negative: NotNegative = 0.0,
    high_negative: NotNegative = 101.0,
) -> Tensor:
    """-sg(clip(rho, low, high)) A logp, bounds by the sign of A."""
    ratio = t.ratio.detach()
    least, most = t.by_sign(low_positive, low_negative), t.by_sign(high_positive, high_negative)
    t.mark_clipped(ratio < least, ratio > most)
    return -ratio.clamp(least, most) * t.advantages * t.logprobs


@token_loss(
    "ROLL's topr with the sign of A in place of the score's; Trinity-RFT's topr; compared with "
    "both",
    weight="1 for A > 0, min(rho, 1) below",
)
def topr_token(t: Tokens) -> Tensor:
    """-A logp for A > 0, -sg(min(rho, 1)) A logp below."""
    return tapered(t, t.ratio.detach())


def tapered(t: Tokens, ratio: Tensor) -> Tensor:
    """Return -A logp [T], times min(ratio, 1) for A < 0."""
    is_tapered = t.advantages < 0
    t.mark_clipped(torch.zeros_like(is_tapered), is_tapered & (ratio > 1))
    return -torch.where(is_tapered, ratio.clamp_max(1), 1.0) * t.advantages * t.logprobs


@token_loss(
    "Entropy-Adv, Cheng et al. 2025, arXiv:2506.14758; the MaxPO paper's baseline",
    weight="rho, and 0 where the clip is active; and that of the bonus, at most rho / kappa",
)
def entropy_adv(
    t: Tokens,
    *,
    alpha: NotNegative = 0.4,
    kappa: Positive = 2.0,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    dual_clip: NotNegative = math.inf,
) -> Tensor:
    """ppo with w (A + sg(min(alpha H, |A| / kappa))) in place of w A, H the token's entropy, w its
    importance weight."""
    entropy = t.importance_weights * t.entropy.detach()
    bonus = torch.minimum(alpha * entropy, t.advantages.abs() / kappa)
    return clipped(t, t.ratio, t.advantages + bonus, clip_low, clip_high, dual_clip)


@token_loss(
    "Zhao et al. 2025, arXiv:2507.20673, the authors' code; verl's geo_mean",
    weight="s, and 0 for tokens whose log-ratio is clipped",
    by_sequence=True,
)
def gmpo(t: Tokens, *, low: NotNegative = 0.4, high: NotNegative = 0.4) -> Tensor:
    """-A s, s = exp(mean_t x_t), x_t = min(log rho_t, high) for A >= 0 and max(log rho_t, -low)
    below.
    """
    x = (t.logprobs - t.old_logprobs).detach()
    # By the sign bit: an advantage below 0 times a factor of 0 is -0, and clipped as before.
    x_clipped = torch.where(t.advantages.signbit(), x.clamp_min(-low), x.clamp_max(high))
    s = t.sequence_ratio(t.sequence_mean(x_clipped))
    below, above = (t.advantages < 0) & (x < -low), (t.advantages > 0) & (x > high)
    t.mark_clipped(below, above)
    return -t.advantages * torch.where(below | above, s.detach(), s)


@token_loss("VESPO 2026, the authors' code; TRL", weight="phi(w)", by_sequence=True)
def vespo(
    t: Tokens,
    *,
    k_positive: NotNegative = 2.0,
    lambda_positive: NotNegative = 3.0,
    k_negative: NotNegative = 3.0,
    lambda_negative: NotNegative = 2.0,
) -> Tensor:
    """-sg(phi(w)) A logp, w = prod_t rho_t, phi(w) = e^lambda w^k e^(-lambda w), k and lambda by
    the sign of A.
    """
    w = t.sequence_ratio(t.sequence_sum(t.log_ratio)).detach()
    k, rate = t.by_sign(k_positive, k_negative), t.by_sign(lambda_positive, lambda_negative)
    return -(rate + k * w.log() - rate * w).exp() * t.advantages * t.logprobs


@token_loss(
    "Le Roux et al. 2025, arXiv:2503.14286, eq. 8, with the sign of A in place of the reward's; no "
    "code was found",
    weight="1 for A > 0, min(w, 1) below",
    by_sequence=True,
)
def topr(t: Tokens) -> Tensor:
    """-A logp for A > 0, -sg(min(w, 1)) A logp below, w = prod_t rho_t."""
    return tapered(t, t.sequence_ratio(t.sequence_sum(t.log_ratio)).detach())
