"""Losses that treat a few tokens of an update differently: by covariance, probability or
entropy."""

import math
from typing import Annotated

import torch
from torch import Tensor

from maxrl_fast.algorithms.losses.core import clipped
from maxrl_fast.algorithms.losses.registry import token_loss
from maxrl_fast.algorithms.options import Limit, NotNegative, Share, UnitInterval
from maxrl_fast.algorithms.tokens import Tokens, limited

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
    assert t.statistics is not None
    return -t.advantages * t.ratio + torch.where(t.statistics, coef * t.log_ratio.abs(), 0.0)


@token_loss(_COVARIANCE, weight="ppo's, and 0 for the chosen tokens", masks="ppo")
def clip_cov(t: Tokens, *, share: Share = 2e-4, low: float = 1.0, high: float = 5.0) -> Tensor:
    """ppo, and 0 for the chosen tokens: the share of all, drawn from those whose covariance is
    between low and high.
    """
    if not low < high:
        raise ValueError(f"low of clip_cov must be below its high, {high:g}, got {low:g}")
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
    assert t.statistics is not None
    assert t.targets is not None
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
    assert t.statistics is not None
    assert t.targets is not None
    top = logits.log_softmax(-1).topk(min(int(k), logits.shape[-1]))  # [T, k]
    rewarded = t.statistics & (t.advantages > 0)
    punished = t.statistics & (t.advantages < 0) & (top.indices[:, 0] == t.targets)
    # The value is rho; of its gradient the part alpha goes to the most probable tokens.
    moved = torch.where(rewarded, alpha * (top.values.double().mean(-1) - t.logprobs), 0.0)
    ratio = limited(t.logprobs - t.old_logprobs + moved - moved.detach()).exp()
    advantages = torch.where(punished, penalty * t.advantages, t.advantages)
    return clipped(t, ratio, advantages, clip_low, clip_high, dual_clip)
