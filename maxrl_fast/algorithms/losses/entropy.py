"""What any loss can be combined with: the mask of the highest entropies, and SIREN's term."""

import math

import torch
from torch import Tensor

from maxrl_fast.algorithms.tokens import Tokens

SIREN_NUCLEUS = 0.8  # the probability of the tokens whose entropy SIREN is about
SIREN_QUANTILE = 0.8  # of a response's entropies, above which they count
# nats; entropies this near may be equal but for rounding, as those of the first tokens of a
# prompt's responses
_TIE = 1e-5


def highest_entropies(t: Tokens, share: float) -> Tensor:
    """Return which tokens [T] bool keep a policy gradient: the ceil(share n) highest entropies
    of the update's n tokens, with ties (Wang et al. 2025, arXiv:2506.01939)."""
    entropies = t.entropy.detach()[t.mask]
    if not len(entropies):
        return t.mask
    count = math.ceil(round(share * len(entropies), 6))  # .2 x 15 is 3.0000000000000004
    threshold = entropies.sort(descending=True).values[max(count, 1) - 1]
    t.metrics["entropy_threshold"] = threshold
    return t.mask & (t.entropy.detach() >= threshold - _TIE)


def nucleus_entropy(log_p: Tensor) -> Tensor:
    """Return the entropy [C], in nats, of each row's renormalised nucleus: the fewest tokens
    with SIREN_NUCLEUS of the probability."""
    ordered, order = log_p.detach().sort(dim=-1, descending=True, stable=True)
    p = ordered.exp()
    is_in = p.cumsum(-1) - p < SIREN_NUCLEUS  # what comes before has less; the first always is
    is_in[:, 0] = True
    outside = ~torch.zeros_like(is_in).scatter_(-1, order, is_in)
    log_q = torch.log_softmax(log_p.masked_fill(outside, -torch.inf), -1)
    return -(log_q.exp() * log_q.masked_fill(outside, 0.0)).sum(-1)


def siren(t: Tokens, entropies: Tensor, coef: float, anchor: Tensor) -> Tensor:
    """Return SIREN's term coef (H - anchor)^2, [] (arXiv:2509.25133).

    H is the mean over responses of the mean nucleus entropy of the tokens above their response's
    SIREN_QUANTILE, as in the authors' code; a response without such tokens counts with 0.
    entropies: [T], nucleus_entropy, with a gradient. anchor: float64 [1], H at the run's first
    update; NaN in that update. The metric siren_anchor is what was used.
    """
    entropies = entropies.double()
    above = t.mask & (entropies.detach() > t.sequence_quantile(entropies.detach(), SIREN_QUANTILE))
    counts = t.sequence_sum(above.double()).clamp_min(1)  # of the token's response
    mean = torch.where(above, entropies / counts, 0.0).sum() / max(len(t.cu_seqlens) - 1, 1)
    kept = mean.detach() if bool(anchor.isnan()) else anchor.to(mean.device)[0]
    t.metrics |= {"siren_entropy": mean.detach(), "siren_anchor": kept}
    return coef * (mean - kept).square()
