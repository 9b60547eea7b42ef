"""What any loss can be combined with: masks of tokens, computed before it, and SIREN's term."""

import math

import torch
from torch import Tensor

from maxrl_fast.algorithms.tokens import Tokens

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
