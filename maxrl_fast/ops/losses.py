"""The token losses: what each computes, its options, and where it is from."""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from maxrl_fast.ops.arguments import check_choice, check_number

_NOT_NEGATIVE = "a finite number of at least 0"
_POSITIVE = "a finite number above 0"


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
        weight: the factor of A grad logp in the descent direction; it is 1 at rho = 1 for every loss.
        source: the publication, and the code that the formula was compared with.
        options: at most four, in the order of csrc/token_loss.h.
        sequence: what the ratio of a whole sequence is made of, where the loss has one: the mean of the tokens' log-ratios,
            their mean with each clipped on the side where its advantage pushes, or their sum.
        clips: whether it takes clip_low and clip_high.
        aggregation: that is a part of the loss.
    """

    formula: str
    weight: str
    source: str
    options: Mapping[str, LossOption] = field(default_factory=dict)
    sequence: Literal["mean", "clipped_mean", "sum"] | None = None
    clips: bool = False
    aggregation: str | None = None


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
        "Liu et al. 2026 (arXiv 2602.05261); TRL",
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
        "DISPO 2026 (arXiv 2602.00983); formula and bounds from secondary sources, not compared with the authors' code",
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
        "Le Roux et al. 2025 (arXiv 2503.14286), eq. 8, with the sign of A in place of the reward's",
        sequence="sum",
    ),
    "topr_token": LossSpec(
        "-A logp for A > 0, -sg(min(rho, 1)) A logp below",
        "1 for A > 0, min(rho, 1) below",
        "ROLL's topr, with the sign of A in place of the score's",
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
    return [
        check_number(f"{name} of {loss}", values.get(name, option.default), option.wanted, _holds(option))
        for name, option in options.items()
    ]


def _holds(option: LossOption) -> Callable[[float], bool]:
    return lambda x: 0 <= x < math.inf and (x > 0 or option.wanted == _NOT_NEGATIVE)


def _unknown(loss: str, name: Any) -> str:
    known = tuple(LOSSES[loss].options)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
    wanted = f"loss_options of {loss} must be among {', '.join(known)}" if known else f"loss {loss} takes no options"
    return f"{wanted}, got {name!r:.80}" + (f"; did you mean {close[0]!r}?" if close else "")


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
        return torch.where(advantage >= 0, log_ratio.clamp_max(high), log_ratio.clamp_min(-low))
    return log_ratio
