"""The token losses: what a function must be to serve as one, the losses, and what any loss can be
combined with, masks and SIREN's term. Kernels compute the fused ones (csrc/token_loss.h), whose
functions are the reference."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import is_host_readable
from maxrl_fast.algorithms.method import AnyFunction, Method, Registry, check_options, name_of
from maxrl_fast.algorithms.options import (
    BelowOne,
    Limit,
    NotNegative,
    Positive,
    Share,
    UnitInterval,
    options_of,
    parameters_of,
)
from maxrl_fast.algorithms.tokens import Tokens, limited
from maxrl_fast.errors import InputError

# numbers of several losses: arguments of ops.policy_gradient_loss
CLIPS = ("clip_low", "clip_high", "dual_clip")


@dataclass(frozen=True)
class Clips:
    """The options of a run with a loss that clips."""

    clip_low: BelowOne = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: NotNegative = 0.2
    """The ratio is clipped above 1 + clip_high."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLoss(Method):
    """A token loss: a function of Tokens that returns the loss of each token [T]
    (docs/token_loss.md). One whose second parameter is `logits` is called with some of the tokens
    at a time, cut anywhere, and their logits [T, V] divided by the temperature, with a gradient."""

    clips: bool = False  # whether it takes clip_low and clip_high
    aggregation: str | None = None  # the only one that the loss is defined for
    by_sequence: bool = False  # whether it has a ratio of whole responses
    # of all Tokens of an update, without gradients, and of the options that it names; the loss gets
    # the result [T, ...] as `statistics` of its tokens
    statistics: Callable[..., Tensor] | None = None
    # a fused loss. The function then is one like `statistics`, and returns which tokens [T] bool
    # keep their advantage in that loss.
    masks: str = ""
    all_tokens: bool | None = None  # tokens with the advantage 0 have a gradient; None: if a user's
    fused: bool = False  # whether a kernel computes it
    bounds: tuple[tuple[str, str], ...] = ()  # pairs of options: the first is at most the second

    noun: ClassVar[str] = "loss"
    first: ClassVar[str] = "Tokens"
    of_users: ClassVar[Mapping[str, Any]] = {"weight": ""}

    @classmethod
    def of(cls, function: Callable[..., Any], **fields: Any) -> "TokenLoss":
        parameters = parameters_of(function)
        options = options_of(function) if parameters else {}
        known = {*options, *CLIPS, "logits"}
        needed = (x.name for x in parameters[1:] if x.default is x.empty)
        if others := [name for name in needed if name not in known]:
            raise ValueError(
                f"the parameters of loss {name_of(function)} after Tokens must be keyword-only "
                f"numbers, got {', '.join(others)}"
            )
        own = {name: option for name, option in options.items() if name not in CLIPS}
        clips = "masks" in fields or any(x.name == "clip_low" for x in parameters)
        return super().of(function, options=own, clips=clips, **fields)

    @property
    def is_users(self) -> bool:
        return not str(getattr(self.function, "__module__", "")).startswith("maxrl_fast.")

    @property
    def over_batch(self) -> bool:
        """Whether the loss of a token depends on other responses of the update."""
        return bool(self.statistics or self.masks)

    @property
    def reads_logits(self) -> bool:
        return "logits" in inspect.signature(self.function).parameters

    @property
    def shown_options(self) -> str:
        return " ".join([super().shown_options, "--clip-low, --clip-high" * self.clips]).strip()

    def resolve(self, given: Mapping[str, Any] | None) -> dict[str, float]:
        """Return all options; raise ValueError or TypeError where one does not fit."""
        if given is not None and not isinstance(given, Mapping):
            got = type(given).__name__
            raise TypeError(f"loss_options must be a mapping of names to numbers, got {got}")
        values = check_options(f"loss {self.name}", self.options, given or {})
        for low, high in self.bounds:
            if values[low] > values[high]:
                wanted = f"at most its {high}, {values[high]:g}"
                raise ValueError(f"{low} of {self.name} must be {wanted}, got {values[low]:g}")
        return values

    def bind(self, options: Mapping[str, float], **clips: float) -> Callable[..., Tensor]:
        """Return the function with its options, and those of the given clips that it takes."""
        return _bound(self.function, {**options, **clips})

    def compare(self, tokens: Tokens, options: Mapping[str, float]) -> Tensor:
        """Return what the loss reads of all tokens of an update: statistics, or a mask."""
        return _bound(self.statistics or self.function, options)(tokens)


def _bound(function: Callable[..., Tensor], options: Mapping[str, float]) -> Callable[..., Tensor]:
    parameters = inspect.signature(function).parameters
    return partial(function, **{name: x for name, x in options.items() if name in parameters})


_REGISTRY = Registry(TokenLoss)
LOSSES, ALIASES, find_loss = _REGISTRY.methods, _REGISTRY.aliases, _REGISTRY.find


def token_loss(
    source: str, *, weight: str = "", **fields: Any
) -> Callable[[AnyFunction], AnyFunction]:
    """Register the decorated function in LOSSES; `fields`: further ones of its TokenLoss."""
    return _REGISTRY.register(source, weight=weight, **fields)


def checked(loss: TokenLoss, values: Any, tokens: Tokens) -> Any:
    """Return what a loss function has returned; raise InputError unless it is a loss of each token,
    on a CPU finite for tokens that are not masked where the loss is a user's."""
    like, got = tokens.logprobs, type(values).__name__
    if isinstance(values, Tensor):
        got = f"{values.dtype} of shape {tuple(values.shape)}"
    if got != f"{like.dtype} of shape {tuple(like.shape)}":
        wanted = f"{like.dtype} [T] = [{len(like)}]"
        raise InputError(f"loss {loss.name} must return {wanted}, got {got}")
    if like.requires_grad and torch.is_grad_enabled() and not values.requires_grad:
        wanted = "a gradient in the logprobs or the entropy of its tokens"
        raise InputError(f"loss {loss.name} must have {wanted}, got none")
    if loss.is_users and is_host_readable(values):
        # Where the policy is NaN, so are the log-probs, and the loss of any function.
        is_wrong = tokens.mask & ~values.isfinite() & ~like.isnan()
        if bool(is_wrong.any()):
            first = int(is_wrong.nonzero()[0])
            got = f"{values[first].item()} at token {first}"
            raise InputError(f"loss {loss.name} must be finite, got {got}")
    return values


def clipped(
    t: Tokens,
    ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = math.inf,
) -> Tensor:
    """Return ppo's loss [T], and mark clipped tokens."""
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
    0."""
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
    """Return (A - mean A)(logp - mean logp) [T]; -inf for masked tokens."""
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
    between low and high."""
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
    rho)^2."""
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
    below."""
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
    the sign of A."""
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


# Liu et al. 2026, arXiv:2602.05261, compared with TRL
ALIASES["luspo"] = replace(LOSSES["gspo"], aggregation="seq_mean_token_sum")

SIREN_NUCLEUS = 0.8  # the probability of the tokens whose entropy SIREN is about
SIREN_QUANTILE = 0.8  # of a response's entropies, above which they count
# nats; entropies this near may be equal but for rounding, as those of the first tokens of a
# prompt's responses
_TIE = 1e-5


def near_responses(t: Tokens, delta: float) -> Tensor:
    """Return which tokens [T] bool keep a policy gradient: not those of responses with A < 0 and
    mean log(pi_old / pi) above delta (DeepSeek-V3.2 2025, eq. 9)."""
    is_far = (t.advantages < 0) & (t.sequence_mean(t.old_logprobs - t.logprobs) > delta)
    lengths = t.cu_seqlens.diff()
    num_masked = is_far[t.cu_seqlens[:-1][lengths > 0]].sum()
    t.metrics["frac_sequences_masked"] = num_masked.double() / max(len(lengths), 1)
    return ~is_far


def highest_entropies(t: Tokens, share: float) -> Tensor:
    """Return which tokens [T] bool keep a policy gradient: the ceil(share n) highest entropies
    of the update's n tokens, with ties (Wang et al. 2025, arXiv:2506.01939)."""
    entropies = t.entropy[t.mask]
    if not len(entropies):
        return t.mask
    count = math.ceil(round(share * len(entropies), 6))  # .2 x 15 is 3.0000000000000004
    threshold = entropies.sort(descending=True).values[max(count, 1) - 1]
    t.metrics["entropy_threshold"] = threshold
    return t.mask & (t.entropy >= threshold - _TIE)


def nucleus_entropy(logits: Tensor) -> Tensor:
    """Return the entropy [C], in nats, of the renormalised nucleus of each row of logits [C, V]:
    the fewest tokens with SIREN_NUCLEUS of the probability."""
    log_p = logits.log_softmax(-1)
    ordered, order = log_p.detach().sort(dim=-1, descending=True, stable=True)
    p = ordered.exp()
    is_in = p.cumsum(-1) - p < SIREN_NUCLEUS  # what comes before has less; the first always is
    is_in[:, 0] = True
    outside = ~torch.zeros_like(is_in).scatter_(-1, order, is_in)
    log_q = torch.log_softmax(log_p.masked_fill(outside, -torch.inf), -1)
    return -(log_q.exp() * log_q.masked_fill(outside, 0.0)).sum(-1)


def siren(t: Tokens, entropies: Tensor, coef: float, anchor: Tensor) -> Tensor:
    """Return the derivative of SIREN's term coef (H - anchor)^2 (arXiv:2509.25133) with respect to
    the nucleus entropies [T] float64.

    H is the mean over responses of the mean entropy of the tokens above their response's
    SIREN_QUANTILE, as in the authors' code; a response without such tokens counts with 0. anchor:
    float64 [1], H at the run's first update; NaN in that update. The metric siren_anchor is what
    was used."""
    above = t.mask & (entropies > t.sequence_quantile(entropies, SIREN_QUANTILE))
    counts = t.sequence_sum(above.double()).clamp_min(1)  # of the token's response
    shares = above / counts / max(len(t.cu_seqlens) - 1, 1)
    mean = (shares * entropies).sum()
    kept = mean if bool(anchor.isnan()) else anchor.to(mean.device)[0]
    t.metrics |= {"siren_entropy": mean, "siren_anchor": kept}
    return 2 * coef * (mean - kept) * shares
