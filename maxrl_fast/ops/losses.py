"""The token losses: what each computes, its options, and where it is from."""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from maxrl_fast import _C
from maxrl_fast.algorithms.arguments import check_choice, check_number

_NOT_NEGATIVE = "a finite number of at least 0"
_POSITIVE = "a finite number above 0"
_SHARE = "a number above 0 and at most 1"
_FROM_0_TO_1 = "a number from 0 to 1"
_TOP_K = f"an integer from 1 to {_C.MAX_TOP_TOKENS}"
_RANGES: dict[str, Callable[[float], bool]] = {
    _NOT_NEGATIVE: lambda x: 0 <= x < math.inf,
    _POSITIVE: lambda x: 0 < x < math.inf,
    _SHARE: lambda x: 0 < x <= 1,
    _FROM_0_TO_1: lambda x: 0 <= x <= 1,
    _TOP_K: lambda x: x in range(1, _C.MAX_TOP_TOKENS + 1),
}


@dataclass(frozen=True)
class LossOption:
    """A number of one loss alone."""

    default: float
    wanted: str = _NOT_NEGATIVE


@dataclass(frozen=True)
class LossSpec:
    """What a loss is. Its formula is code in csrc/token_loss.h and in token_loss_reference.py.

    Args:
        formula: of a token. A: advantage, rho = pi / pi_old, sg: a constant factor, without a gradient.
        weight: the factor of A grad logp in the descent direction; at rho = 1 it is 1 for every loss, except for the tokens
            that clip_cov, lp_reg and simko choose.
        source: the publication, and the code that the formula was compared with.
        options: at most four, in the order of csrc/token_loss.h.
        sequence: what the ratio of a whole sequence is made of, where the loss has one: the mean of the tokens' log-ratios,
            their mean with each clipped on the side where its advantage pushes, or their sum.
        clips: whether it takes clip_low and clip_high.
        aggregation: that is a part of the loss.
        statistic: what the loss takes as token_statistics; None: it takes none.
        rows: whether the statistic is made of ops.row_statistics of the sampling policy, which is one more forward pass.
        top_tokens: whether it takes top_tokens [T, K], where K is its option k.
    """

    formula: str
    weight: str
    source: str
    options: Mapping[str, LossOption] = field(default_factory=dict)
    sequence: Literal["mean", "clipped_mean", "sum"] | None = None
    clips: bool = False
    aggregation: str | None = None
    statistic: str | None = None
    rows: bool = False
    top_tokens: bool = False


LOSSES: dict[str, LossSpec] = {
    "reinforce": LossSpec("-A logp", "1", "Williams 1992"),
    "ppo": LossSpec(
        "max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)); with dual_clip c at most -A c for A < 0",
        "rho, and 0 where the clip is active",
        "Schulman et al. 2017, eq. 7; dual clip: Ye et al. 2020",
        clips=True,
    ),
    "cispo": LossSpec("-sg(clip(rho)) A logp", "clip(rho)", "MiniMax-M1 2025", clips=True),
    "gspo": LossSpec(
        "ppo with the ratio of the sequence exp(mean_t log rho_t)",
        "the sequence's ratio, and 0 where the clip is active",
        "Zheng et al. 2025; with advantages per token their GSPO-token",
        sequence="mean",
        clips=True,
    ),
    "luspo": LossSpec(
        "gspo times the number of the response's tokens: aggregation seq_mean_token_sum",
        "gspo's times the response's length",
        "Liu et al. 2026 (arXiv 2602.05261), compared with TRL; the authors' code (murphy4122/LUSPO) was not at hand",
        sequence="mean",
        clips=True,
        aggregation="seq_mean_token_sum",
    ),
    "gmpo": LossSpec(
        "-A s, s = exp(mean_t x_t), x_t = min(log rho_t, high) for A >= 0 and max(log rho_t, -low) below",
        "s, and 0 for tokens whose log-ratio is clipped",
        "Zhao et al. 2025 (arXiv 2507.20673), the authors' code; verl's geo_mean",
        {"low": LossOption(0.4), "high": LossOption(0.4)},
        sequence="clipped_mean",
    ),
    "vespo": LossSpec(
        "-sg(phi(w)) A logp, w = prod_t rho_t, phi(w) = e^lambda w^k e^(-lambda w), k and lambda by the sign of A",
        "phi(w)",
        "VESPO 2026, the authors' code; TRL",
        {
            "k_positive": LossOption(2.0),
            "lambda_positive": LossOption(3.0),
            "k_negative": LossOption(3.0),
            "lambda_negative": LossOption(2.0),
        },
        sequence="sum",
    ),
    "sapo": LossSpec(
        "-A (4 / tau) sigmoid(tau (rho - 1)), tau by the sign of A",
        "4 sigmoid (1 - sigmoid) rho, near 0 for small and for large rho",
        "Gao et al. 2025 (arXiv 2511.20347); TRL, verl",
        {"tau_positive": LossOption(1.0, _POSITIVE), "tau_negative": LossOption(1.05, _POSITIVE)},
    ),
    "dppo": LossSpec(
        "-A rho, 0 where A > 0 and pi - pi_old > high, or A < 0 and pi - pi_old < -low; plus kl (log rho)^2",
        "rho, and 0 where the probability has moved too far; beside it the pull of (log rho)^2 on every token",
        "DPPO 2026 (arXiv 2602.04879) with the KL term of Kimi K2.5, as prime-rl's default loss",
        {"low": LossOption(0.2), "high": LossOption(0.2), "kl": LossOption(1e-3)},
    ),
    "dispo": LossSpec(
        "-sg(clip(rho, low, high)) A logp, bounds by the sign of A",
        "clip(rho)",
        "DISPO, Karaman et al. 2026 (arXiv 2602.00983); formula and bounds from secondary sources; no code was found",
        {
            "low_positive": LossOption(0.8),
            "high_positive": LossOption(11.0),
            "low_negative": LossOption(0.0),
            "high_negative": LossOption(101.0),
        },
    ),
    "topr": LossSpec(
        "-A logp for A > 0, -sg(min(w, 1)) A logp below, w = prod_t rho_t",
        "1 for A > 0, min(w, 1) below",
        "Le Roux et al. 2025 (arXiv 2503.14286), eq. 8, with the sign of A in place of the reward's; no code was found",
        sequence="sum",
    ),
    "topr_token": LossSpec(
        "-A logp for A > 0, -sg(min(rho, 1)) A logp below",
        "1 for A > 0, min(rho, 1) below",
        "ROLL's topr with the sign of A in place of the score's; Trinity-RFT's topr; compared with both",
    ),
    "kl_cov": LossSpec(
        "-A rho, and for the chosen tokens -A rho + coef |log rho|; chosen is the share of tokens with the greatest covariance "
        "(A - mean A)(logp - mean logp)",
        "rho; on the chosen tokens beside it a pull of coef towards rho = 1",
        "Cui et al. 2025 (arXiv 2505.22617), the authors' code; verl",
        {"share": LossOption(2e-4, _SHARE), "coef": LossOption(1.0)},
        statistic="1 for the tokens that ops.kl_cov_tokens chooses and 0 for others",
    ),
    "clip_cov": LossSpec(
        "ppo, and 0 for the chosen tokens: the share of all, drawn from those whose covariance is between low and high",
        "ppo's, and 0 for the chosen tokens",
        "Cui et al. 2025 (arXiv 2505.22617), the authors' code; verl",
        {"share": LossOption(2e-4, _SHARE), "low": LossOption(1.0), "high": LossOption(5.0)},
        clips=True,
        statistic="1 for the tokens that ops.clip_cov_tokens chooses and 0 for others",
    ),
    "lp_reg": LossSpec(
        "-A rho + k3(pi || proxy) for protected tokens with pi < proxy, others max(-A rho, -A clip(rho, 1 - low, 1 + high)); "
        "protected is the share of the tokens with A < 0 that has the lowest log-probs; the proxy is pi_old without the tokens "
        "below min_p times its greatest probability, renormalised",
        "rho, and 0 where the clip is active; on protected tokens beside it a pull of proxy / pi - 1 upwards",
        "Lp-Reg, Huang et al. 2025 (arXiv 2510.03222), the authors' code",
        {
            "share": LossOption(0.01, _SHARE),
            "min_p": LossOption(0.02, _SHARE),
            "low": LossOption(1.0),
            "high": LossOption(9.0),
        },
        statistic="the log-probs that ops.lp_reg_proxies returns",
        rows=True,
    ),
    "simko": LossSpec(
        "ppo with (1 - alpha) rho + (alpha / k) sum_j [sg(rho) / sg(rho_j)] rho_j in place of rho for A > 0, j over the k most "
        "probable tokens of pi_old; penalty A in place of A where A < 0 and the token is the most probable one; both only for "
        "tokens whose entropy is above the quantile tau of their response, the others have ppo",
        "ppo's; of it alpha / k goes to each of the k tokens, and 1 - alpha to the sampled one",
        "SimKO, Peng et al. 2025 (arXiv 2510.14807), the authors' code",
        {
            "alpha": LossOption(0.01, _FROM_0_TO_1),
            "k": LossOption(3.0, _TOP_K),
            "tau": LossOption(0.8, _FROM_0_TO_1),
            "penalty": LossOption(1.1),
        },
        clips=True,
        statistic="1 for the tokens that ops.simko_tokens returns and 0 for others",
        rows=True,
        top_tokens=True,
    ),
}


NAMES = tuple(LOSSES)


def loss_numbers(loss: str, given: Mapping[str, float] | None) -> list[float]:
    """Return the options of a loss as numbers, in their order.

    Raises:
        ValueError: if there is no such loss or option, or if a number is out of its range.
        TypeError: if `given` is not a mapping.
    """
    check_choice("loss", loss, NAMES)
    options = LOSSES[loss].options
    if given is None and not options:
        return []
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"loss_options must be a mapping of names to numbers, got {type(given).__name__}")
    values = dict(given or {})
    if unknown := [name for name in values if name not in options]:
        raise ValueError(_unknown(loss, unknown[0]))
    numbers = {
        name: check_number(f"{name} of {loss}", values.get(name, option.default), option.wanted, _RANGES[option.wanted])
        for name, option in options.items()
    }
    for name, low in numbers.items():
        upper = name.replace("low_", "high_")  # of a bound such as low_positive; others are compared with themselves
        if low > numbers[upper]:
            raise ValueError(f"{name} of {loss} must be at most its {upper}, {numbers[upper]:g}, got {low:g}")
    if loss == "clip_cov" and not numbers["low"] < numbers["high"]:
        raise ValueError(f"low of clip_cov must be below its high, {numbers['high']:g}, got {numbers['low']:g}")
    return [*numbers.values()]


def _unknown(loss: str, name: Any) -> str:
    known = tuple(LOSSES[loss].options)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
    wanted = f"loss_options of {loss} must be among {', '.join(known)}" if known else f"loss {loss} takes no options"
    return f"{wanted}, got {name!r:.80}" + (f"; did you mean {close[0]!r}?" if close else "")


def num_top_tokens(loss: str, options: list[float]) -> int:
    """Return K of the top_tokens [T, K] that the loss takes; 0 where it takes none."""
    spec = LOSSES[loss]
    return int(options[list(spec.options).index("k")]) if spec.top_tokens else 0


def summands(loss: str, options: list[float], log_ratio: Tensor, advantage: Tensor, limit: float) -> Tensor:
    """Return what each token [T] adds to the log-ratio of its sequence, from its own log-ratio and advantage, [T] each.

    Args:
        limit: of the log-ratios in a sum, as VESPO's authors limit them; the kernel limits the sum, or the mean, itself.
    """
    sequence = LOSSES[loss].sequence
    if sequence == "sum":
        return log_ratio.clamp(-limit, limit)
    if sequence == "clipped_mean":
        low, high = options
        # By the sign bit: a factor of 0 makes an advantage below 0 a -0, and its token is clipped as before.
        return torch.where(advantage.signbit(), log_ratio.clamp_min(-low), log_ratio.clamp_max(high))
    return log_ratio
